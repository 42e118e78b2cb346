"""HFEngine against plain forward passes of transformers."""

import gc
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rllib_mhgpo.engines import Cast, Completion, HFEngine, Prompt
from rllib_mhgpo.engines.hf import draw
from rllib_mhgpo.engines.reading import Pass
from rllib_mhgpo.errors import ModelError
from tests.toys import toy_model, toy_tokenizer

EOS = 0


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def plain_logprobs(
    model: PreTrainedModel, prompt: NDArray[np.int32], response: NDArray[np.int32], temperature: float
) -> NDArray[np.float32]:
    """One unpadded row, no cache."""
    tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logprobs_equal_an_unpadded_forward_pass(kind: Literal["llama", "gpt2"]) -> None:
    """Padding, the shared prefill, the cache and leaving rows change nothing, learned positions included (G12)."""
    model = toy_model(toy_tokenizer(), kind=kind).eval()
    engine = HFEngine(model, eos_ids=[EOS, 7, 8, 9])
    prompts = [
        Prompt(ids(*range(10, 13)), seeds=range(4), max_tokens=12),
        Prompt(ids(*range(20, 60)), seeds=range(4), max_tokens=5),
        Prompt(ids(*range(10, 13)), seeds=range(2), max_tokens=3),
    ]
    for prompt, completions in zip(prompts, engine.generate(prompts, temperature=0.7), strict=True):
        for completion in completions:
            expected = plain_logprobs(model, prompt.ids, completion.ids, 0.7)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_response_does_not_depend_on_its_wave() -> None:
    model = toy_model(toy_tokenizer()).eval()
    engine = HFEngine(model, eos_ids=[EOS], max_batch_tokens=200)
    long = Prompt(ids(*range(20, 90)), seeds=[5, 6, 7], max_tokens=20)
    short = Prompt(ids(3, 4), seeds=[1, 2], max_tokens=6)
    alone = engine.generate([short], 1.0)[0]
    together = engine.generate([long, short, long], 1.0)[1]
    assert [c.ids.tolist() for c in alone] == [c.ids.tolist() for c in together]
    assert alone[0].ids.tolist() != alone[1].ids.tolist()


def test_a_response_ends_with_its_eos_or_at_its_limit() -> None:
    model = toy_model(toy_tokenizer()).eval()
    eos = set(range(40))
    completions = HFEngine(model, eos_ids=sorted(eos)).generate([Prompt(ids(1, 2), range(50), max_tokens=4)], 1.0)[0]

    def is_whole(completion: Completion) -> bool:
        *body, last = completion.ids.tolist()
        ended = last in eos
        return not eos.intersection(body) and completion.truncated == (not ended) and (ended or len(body) == 3)

    assert all(map(is_whole, completions))
    assert {completion.truncated for completion in completions} == {True, False}


def test_draws_follow_the_distribution_at_the_temperature() -> None:
    """Logits [1, 0] at temperature 0.5: p(0) = 1 / (1 + exp(-2)) = 0.8808 (G9)."""
    uniforms = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    tokens, logprobs = draw(torch.tensor([[1.0, 0.0]]).expand(10_000, 2), uniforms, 0.5)
    assert (tokens == 0).float().mean().item() == pytest.approx(0.8808, abs=1e-3)
    assert logprobs[0].exp().item() == pytest.approx(0.8808, abs=1e-4)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, 3)
    tokens, _ = draw(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64), 1.0)
    assert tokens.tolist() == [1, 1, 1]


def test_greedy_takes_the_best() -> None:
    model = toy_model(toy_tokenizer()).eval()
    prompt = ids(5, 6, 7)
    response = HFEngine(model, eos_ids=[EOS]).generate([Prompt(prompt, [0], 8)], 0)[0][0].ids
    expected = model.generate(torch.from_numpy(prompt.astype(np.int64))[None], max_new_tokens=8, do_sample=False)
    assert response.tolist() == expected[0, 3 : 3 + len(response)].tolist()


def test_damaged_weights_stop_the_run_with_one_clear_error() -> None:
    with pytest.raises(ModelError, match="not finite"):
        draw(torch.full((1, 3), torch.nan), torch.zeros(1).double(), 1.0)


def tokens_read(model: PreTrainedModel, work: Callable[[], object]) -> int:
    """Counts the places of all forward passes, padding included."""
    seen: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    work()
    handle.remove()
    return sum(seen)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "granite", "mistral", "bloom"])
def test_a_beginning_that_prompts_share_is_read_once(kind: str) -> None:
    """Instructions of 60 tokens before six questions; models that cannot share rows are as right."""
    model = toy_model(toy_tokenizer(), kind=kind).eval()
    engine = HFEngine(model, eos_ids=[EOS])
    instructions = ids(*range(30, 90))
    prompts = [
        Prompt(np.concatenate([instructions, ids(*range(100, 103 + number))]), [number, 50], 2) for number in range(6)
    ]
    said: list[list[Completion]] = []
    assert engine.sharing.mode == ("off" if kind == "bloom" else "auto")
    count = tokens_read(model, lambda: said.extend(engine.generate(prompts, 0.7)))
    shares = kind not in ("mistral", "bloom")  # a window shorter than the prompts; distances within a row
    assert count <= 60 + 8 + 12 if shares else count >= 6 * 63
    for prompt, completions in zip(prompts, said, strict=True):
        for completion in completions:
            expected = plain_logprobs(model, prompt.ids, completion.ids, 0.7)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def three_rounds(engine: HFEngine) -> list[tuple[NDArray[np.int32], Completion]]:
    """Transcripts: what is said, then something that is found, then what is said to that."""
    waves = [[ids(*range(20, 60)), ids(*range(21, 50)), ids(*range(20, 60), 7)]]
    found: list[tuple[NDArray[np.int32], Completion]] = []
    for number in range(3):
        asked = [Prompt(prompt, [number, 10 + number], 4, stop=("z",)) for prompt in waves[-1]]
        said = engine.generate(asked, 1.0)
        found += [(p.ids, one) for p, completions in zip(asked, said, strict=True) for one in completions]
        results = ids(*range(70 + number, 90 + 3 * number))
        waves.append(
            [np.concatenate([p.ids, c.ids, results]) for p, ones in zip(asked, said, strict=True) for c in ones]
        )
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("room", [32768, 400, 1])
def test_a_transcript_is_read_on(kind: str, room: int) -> None:
    model = toy_model(toy_tokenizer(), kind=kind).eval()
    engine = HFEngine(model, eos_ids=[EOS], tokenizer=toy_tokenizer(), max_batch_tokens=room)
    found: list[tuple[NDArray[np.int32], Completion]] = []
    alone = tokens_read(model, lambda: found.extend(three_rounds(engine)))
    with engine.remembering():
        together = tokens_read(model, lambda: found.extend(three_rounds(engine)))
    assert together < 0.7 * alone if room == 32768 and kind != "mistral" else together <= alone
    for prompt, completion in found:
        expected = plain_logprobs(model, prompt, completion.ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_nothing_is_remembered_of_other_weights() -> None:
    model = toy_model(toy_tokenizer()).eval()
    engine = HFEngine(model, eos_ids=[EOS], tokenizer=toy_tokenizer())
    prompt = Prompt(ids(*range(20, 60)), [0], 4, stop=("z",))
    for seed in range(3):
        with engine.remembering():
            engine.generate([prompt], 1.0)
        model.load_state_dict(toy_model(toy_tokenizer(), seed=seed).state_dict())
        with engine.remembering():
            (completion,) = engine.generate([prompt], 1.0)[0]
        np.testing.assert_allclose(
            completion.logprobs, plain_logprobs(model, prompt.ids, completion.ids, 1.0), atol=1e-4
        )


def remembered() -> int:
    """Places of all passes that are alive in this process."""
    gc.collect()  # what other tests left in cycles
    return sum(one.size for one in gc.get_objects() if isinstance(one, Pass))


@pytest.mark.parametrize("whose", ["adapters", "policies"])
def test_what_is_remembered_of_all_agents_has_one_bound(whose: str) -> None:
    """Two agents whose weights differ read three rounds each; the oldest passes make room, whoever kept them."""
    model, most = toy_model(toy_tokenizer()).eval(), 400

    def made() -> HFEngine:
        turn = (lambda agent: None) if whose == "adapters" else None
        return HFEngine(model, eos_ids=[EOS], tokenizer=toy_tokenizer(), max_batch_tokens=most, act_as=turn)

    engine = made() if whose == "adapters" else Cast(made(), {"b": made()})
    before = remembered()
    held, prompts = [], {agent: ids(*range(20, 20 + length)) for agent, length in (("a", 60), ("b", 90))}
    with engine.remembering():
        for number in range(3):
            asked = [Prompt(prompt, range(2), 4, ("z",), agent) for agent, prompt in prompts.items()]
            found = {one.agent: (one, said[0]) for one, said in zip(asked, engine.generate(asked, 1.0), strict=True)}
            held.append(remembered() - before)
            for agent, (one, said) in found.items():
                expected = plain_logprobs(model, one.ids, said.ids, 1.0)
                np.testing.assert_allclose(said.logprobs, expected, atol=1e-4)
                prompts[agent] = np.concatenate([one.ids, said.ids, ids(*range(70 + number, 110))])
    assert held[0] == 150
    assert max(held) <= most
    assert held[1] > held[0]
    assert remembered() == before


def test_a_model_without_keys_and_values_is_refused() -> None:
    """One whose layers keep states: the engine would go on from nothing."""
    config = AutoConfig.for_model("mamba", vocab_size=258, hidden_size=32, num_hidden_layers=2, state_size=4)
    engine = HFEngine(AutoModelForCausalLM.from_config(config).eval(), eos_ids=[EOS])
    with pytest.raises(ModelError, match="MambaForCausalLM keeps no keys and values"):
        engine.generate([Prompt(ids(*range(9)), [1, 2], 6)], 1.0)
