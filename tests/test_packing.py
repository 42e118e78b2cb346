"""Rows that share prefixes: by hand, against unpadded rows on five kinds of models, and without whole logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rllib_mhgpo.footprint import Work
from rllib_mhgpo.llms.lora import lora_settings
from rllib_mhgpo.micro_batches import MicroBatches
from rllib_mhgpo.modules import scoring
from rllib_mhgpo.modules.attention import tree_mask
from rllib_mhgpo.modules.scoring import head_of, response_logprobs, work_of
from rllib_mhgpo.packing import Rows, Sharing, lay_out, plan
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.train_batch import TrainBatch
from tests.test_learner import gradient, make_learner, plain_gradient, update
from tests.toys import save_toy, toy_model, toy_tokenizer

MODES = ["auto", "shared", "plain", "off"]
KINDS = ["llama", "gpt2", "qwen2", "mistral", "granite", "falcon"]


def ids(*numbers: int) -> Tokens:
    return np.array(numbers, np.int32)


def tree_batch() -> TrainBatch:
    """Two agents: prompts shared, one the beginning of another, of one token; equal responses, of one token."""
    rng = np.random.default_rng(7)
    long = rng.integers(0, 256, 40).astype(np.int32)
    prompts = [long, long, long, long[:12], long[:12], ids(9), ids(9), long, np.concatenate([long, ids(3, 4)])]
    responses = [rng.integers(0, 256, n).astype(np.int32) for n in (5, 1, 9, 2, 1, 6, 3, 4, 2)]
    responses[7] = responses[0]  # the same response twice
    n = len(prompts)
    return TrainBatch(
        prompts, responses, [(-5 + rng.normal(size=len(r))).astype(np.float32) for r in responses],
        rng.normal(size=n), np.full(n, 0.1), np.zeros(n, dtype=np.int64), agents=["a", "b"] * 4 + ["a"],
    )  # fmt: skip


def test_a_row_by_hand() -> None:
    """Prompt 1 2 with responses 3 4 5 and 3 6: the tokens 1 2 3 stand once, the last tokens not at all."""
    prompts, responses = [ids(1, 2), ids(1, 2)], [ids(3, 4, 5), ids(3, 6, 7)]
    layout = lay_out(prompts, responses, Rows([[0, 1]], "tree"), [np.ones(3, bool)] * 2)
    assert layout.tokens.tolist() == [[1, 2, 3, 4, 6]]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 3]]
    assert layout.ends.tolist() == [[5, 5, 5, 4, 5]]
    assert layout.before.tolist() == [1, 2, 3, 1, 2, 4]
    assert layout.targets.tolist() == [3, 4, 5, 3, 6, 7]
    assert layout.trunk == 4
    assert tree_mask(torch.from_numpy(layout.ends), layout.trunk).int().tolist() == [
        [[[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]]
    ]


def test_tokens_that_the_policy_did_not_say_reach_no_head() -> None:
    said = [np.array([True, False, False, True])]
    layout = lay_out([ids(1)], [ids(2, 3, 4, 5)], Rows([[0]], "causal"), said)
    assert (layout.before.tolist(), layout.targets.tolist(), layout.cells.tolist()) == ([0, 3], [2, 5], [0, 3])


def test_prompts_are_shared_where_it_pays() -> None:
    """Long prompts with short responses share a row; short prompts with long responses do not."""
    long, short, rng = np.arange(400, dtype=np.int32), ids(1), np.random.default_rng(0)
    answers = [rng.integers(0, 9, 4).astype(np.int32) for _ in range(4)]
    essays = [rng.integers(0, 9, 300).astype(np.int32) for _ in range(4)]
    sharing = Sharing("auto", linear_cost=500)
    assert [len(part.rows) for part in plan([long] * 4, answers, 8192, sharing)] == [1]
    assert sum(len(part.rows) for part in plan([short] * 4, essays, 8192, sharing)) == 4
    assert sum(len(part.rows) for part in plan([short] * 4, essays, 8192, Sharing("shared"))) == 1


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_batch_is_cut_into_rows_within_the_budget(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda values: np.array(values, np.int32))
    prompts = data.draw(st.lists(tokens, min_size=1, max_size=12))
    responses = [data.draw(tokens) for _ in prompts]
    mode = data.draw(st.sampled_from(MODES))
    sharing = Sharing(mode, linear_cost=data.draw(st.sampled_from([1.0, 50.0])), window=data.draw(st.integers(3, 30)))
    budget = data.draw(st.integers(1, 80))
    parts = plan(prompts, responses, budget, sharing)
    assert sorted(i for part in parts for i in part.sequences) == list(range(len(prompts)))
    for part in parts:
        layout = lay_out(prompts, responses, part, [np.ones(len(r), bool) for r in responses])
        assert layout.tokens.size <= budget or len(part.rows) == 1
        for number, targets in zip(part.sequences, np.split(layout.targets, _cuts(part, responses)), strict=True):
            assert targets.tolist() == responses[number].tolist()
        for path in _paths(layout, part, prompts, responses):
            assert path


def _cuts(part: Rows, responses: list[Tokens]) -> Any:
    return np.cumsum([len(responses[i]) for i in part.sequences])[:-1]


def _paths(layout: Any, part: Rows, prompts: list[Tokens], responses: list[Tokens]) -> Any:
    """Whether what each response token's place sees, in order, is its prompt and the response so far."""
    width = layout.tokens.shape[1]
    places = iter(layout.before.tolist())
    for number in part.sequences:
        for k in range(len(responses[number])):
            row, place = divmod(next(places), width)
            seen = [j for j in range(place + 1) if place < layout.ends[row, j]]
            if part.attention == "causal":
                seen = list(range(place + 1))
            wanted = [*prompts[number].tolist(), *responses[number][:k].tolist()]
            yield layout.tokens[row, seen].tolist() == wanted and layout.positions[row, place] == len(wanted) - 1


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("packing", MODES)
def test_rows_have_the_gradient_of_unpadded_rows(folder: Path, packing: str) -> None:
    """Identity 9, against a version without any code of the package."""
    learner = make_learner(folder, packing=packing)
    with torch.no_grad():
        for parameter in learner.module["default_policy"].llm.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    batch = tree_batch()
    expected = plain_gradient(learner, batch)
    assert (gradient(learner, batch) - expected).abs().max() < 1e-5 * expected.abs().max()
    cannot = packing == "plain" and folder.name.startswith("falcon")  # its SDPA sees over all of a row
    assert learner.policy.micro.sharing.mode == ("off" if cannot else packing)


def test_rows_have_the_log_probabilities_of_unpadded_rows(folder: Path) -> None:
    batch = tree_batch()
    found = {mode: make_learner(folder, packing=mode).logprobs(batch) for mode in MODES}
    llm = make_learner(folder).module["default_policy"].llm
    for i in range(len(batch)):
        row = torch.from_numpy(np.concatenate([batch.prompts[i], batch.responses[i]]).astype(np.int64))[None]
        with torch.no_grad():
            logits = llm(row).logits[0, len(batch.prompts[i]) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, row[0, len(batch.prompts[i]) :, None])[:, 0].numpy()
        for mode in MODES:
            assert found[mode][i] == pytest.approx(expected, abs=2e-5), (mode, i)


def test_shared_rows_have_fewer_tokens(folder: Path) -> None:
    batch, counts = tree_batch(), {}
    for mode in ("shared", "off"):
        learner = make_learner(folder, packing=mode, kl_beta=0.0)
        counts[mode] = update(learner, batch)["counts"]
    assert counts["shared"]["asked"] == counts["off"]["asked"] == 40 * 4 + 24 + 2 + 42 + 34
    if "mistral" not in str(folder):
        # 0, 1, 2 and 7 share a prompt of 40 tokens, and 0 and 7 all; so do 3 and 4, and 5 and 6
        assert counts["shared"]["distinct"] == (40 + 4 + 8) + (12 + 1) + (1 + 5 + 2) + 43
    assert counts["off"]["distinct"] == counts["off"]["asked"] - 9


@pytest.mark.parametrize(("engine_differs", "passes"), [(False, 3), (True, 4)])
def test_every_pass_of_an_update_is_counted(tmp_path: Path, engine_differs: bool, passes: int) -> None:
    """Forwards, backwards as two, and once more where the engine's log-probabilities are not taken."""
    learner = make_learner(save_toy(tmp_path), packing="off", kl_beta=0.0)
    learner.policy.engine_differs = engine_differs
    batch, work = tree_batch(), work_of(learner.module["default_policy"].llm)
    flops = 0
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        read = len(prompt) + len(response) - 1
        flops += work.flops(read, read * (read + 1) // 2, len(response))
    assert update(learner, batch)["counts"]["flops"] == passes * flops


def test_sequences_longer_than_the_window_stay_apart(tmp_path: Path) -> None:
    learner = make_learner(save_toy(tmp_path, "mistral"), packing="shared")
    assert learner.policy.micro.sharing.window == 16
    rows = [row for part in learner.policy.micro.cut(tree_batch(), np.arange(9)) for row in part.rows]
    assert sorted(map(len, rows)) == [1, 1, 1, 1, 1, 2, 2]


def test_a_model_that_knows_only_places_in_a_row_does_not_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ALiBi: what a token sees depends on how far away it stands."""
    learner = make_learner(save_toy(tmp_path, "bloom"), packing="auto")
    assert learner.policy.micro.sharing.mode == "off"
    assert "cannot share rows" in caplog.text
    batch = tree_batch()
    expected = plain_gradient(learner, batch)
    assert (gradient(learner, batch) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"lora": lora_settings({"rank": 2})}])
def test_sharing_goes_with_checkpointing_and_adapters(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = save_toy(tmp_path)
    batch, found = tree_batch(), []
    for packing in ("shared", "off"):
        torch.manual_seed(0)
        found.append(gradient(make_learner(folder, packing=packing, **settings), batch))
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[1].abs().max()


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own arithmetic instead of its kernels, which compile for minutes and have no gradient on CPUs."""
    from torch.nn.attention import flex_attention as torch_flex
    from transformers.integrations import flex_attention as transformers_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)

    def plainly(*states: Any, training: bool, **how: Any) -> Any:
        return torch_flex.flex_attention(*states, **how)

    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", plainly)


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize(("kind", "checkpointing"), [("llama", False), ("qwen2", True)])
def test_flex_attention_has_the_gradient_of_unpadded_rows(tmp_path: Path, kind: str, checkpointing: bool) -> None:
    """Rows of 40 and of 200 tokens: less than one of its blocks, and two."""
    settings: dict[str, Any] = {"gradient_checkpointing": checkpointing, "attn_implementation": "flex_attention"}
    folder, batch = save_toy(tmp_path, kind), tree_batch()
    long = np.random.default_rng(1).integers(0, 256, 170).astype(np.int32)
    batch = TrainBatch(**{**vars(batch), "prompts": [np.concatenate([long, batch.prompts[0]]), *batch.prompts[1:]]})
    learner = make_learner(folder, packing="shared", **settings)
    assert (learner.policy.micro.sharing.mode, learner.policy.micro.sharing.kernel) == ("shared", "flex_attention")
    expected = gradient(make_learner(folder, packing="off"), batch)
    assert (gradient(learner, batch) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_row_costs_what_its_kernel_compares() -> None:
    """100 and 2 x 65 tokens: apart 165 x 165; a trunk of 165 and 65 under a mask 28,562; all in blocks 26,450."""
    prompts, responses = [np.arange(100, dtype=np.int32)] * 2, [np.full(66, token, np.int32) for token in (1, 2)]
    rows = {
        kernel: sum(len(part.rows) for part in plan(prompts, responses, 8192, Sharing("auto", 0.0, kernel=kernel)))
        for kernel in ("sdpa", "flex_attention")
    }
    assert rows == {"sdpa": 2, "flex_attention": 1}


def test_trying_what_a_model_takes_leaves_it_as_it_was() -> None:
    """A sparse attention that asks for its kernels by their name: 24 tokens, of which each sees four."""
    config = AutoConfig.for_model(
        "deepseek_v32", vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, index_n_heads=2, index_head_dim=16, index_topk=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        before = model(tokens).logits
        scoring.sharing_of(model, "auto")
        assert torch.equal(model(tokens).logits, before)


def test_a_trunk_is_computed_without_a_mask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before the first branch of any row of a micro-batch; the rest is compared with all of the row."""
    calls: list[tuple[int, int, bool]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Any, key: Any, value: Any, **how: Any) -> Any:
        calls.append((query.shape[2], key.shape[2], how["is_causal"]))
        assert how["is_causal"] == (how["attn_mask"] is None)
        return sdpa(query, key, value, **how)

    if folder.name.startswith("falcon"):
        pytest.skip("computes attention itself, under whole masks")
    learner = make_learner(folder, packing="shared")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    prompts, responses = [np.arange(10, dtype=np.int32)] * 3, [ids(1, 2, 3), ids(1, 4, 5, 6), ids(7, 8)]
    zeros = [np.zeros(len(response), np.float32) for response in responses]
    batch = TrainBatch(prompts, responses, zeros, np.zeros(3), np.zeros(3), np.zeros(3, np.int64))
    learner.logprobs(batch)
    # 10 + [1, 2], then [4, 5], then [7]: two layers
    assert calls == [(12, 12, True), (3, 15, False)] * 2


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor with a vocabulary's width, forwards and backwards."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()
            if shape[-1:] == (self.vocabulary,) and shape != (32, self.vocabulary):  # that is the head itself
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return out


@pytest.mark.parametrize("at_once", [4, 1 << 20])
def test_logits_are_there_for_a_piece_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """34 tokens are scored; in pieces of four, nothing of a vocabulary's width has more rows."""
    folder = save_toy(tmp_path, "qwen2")
    learner, batch = make_learner(folder, kl_beta=0.0), tree_batch()
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", at_once * 258)
    with Largest(258) as largest:
        found = gradient(learner, batch)
    assert 0 < largest.rows <= (4 if at_once == 4 else 34)
    monkeypatch.undo()
    expected = gradient(learner, batch)
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def test_a_model_that_scales_its_logits_is_not_scored_inside_its_head(tmp_path: Path) -> None:
    for kind, in_pieces in (("granite", False), ("llama", True)):
        module = make_learner(save_toy(tmp_path / kind, kind)).module["default_policy"]
        assert module.in_pieces == in_pieces


def test_a_head_is_left_as_it_was(tmp_path: Path) -> None:
    model = toy_model(toy_tokenizer())
    batch = scoring.as_tensors(
        lay_out([ids(1)], [ids(2)], Rows([[0]], "causal"), [np.ones(1, bool)]), torch.device("cpu")
    )
    response_logprobs(model, head_of(model), batch, 1.0)
    assert "forward" not in vars(head_of(model))


def test_log_probabilities_are_computed_anew_where_the_engine_differs(tmp_path: Path) -> None:
    """The first update shows that the engine's numbers are off by 0.01; the second has a ratio of 1 regardless."""
    learner = make_learner(save_toy(tmp_path), lr=0.0)
    batch = tree_batch()
    exact = learner.logprobs(batch)
    off = TrainBatch(**{**vars(batch), "logprobs": [values + 0.01 for values in exact]})
    first = update(learner, off)["rows"]["measured"]["ratio_max"]
    second = update(learner, off)["rows"]["measured"]["ratio_max"]
    assert first == pytest.approx(np.full(9, np.exp(-0.01)), rel=1e-4)
    assert second == pytest.approx(np.ones(9), rel=1e-5)
    laid = learner.policy.micro.lay_out(off, np.arange(9), learner.policy.micro.cut(off, np.arange(9))[0])
    assert (learner.policy.forward(laid, exact).importance == 1).all()  # no cap, no correction
    assert learner.get_state()["policies"]["default_policy"]["engine_differs"]
    update(learner, TrainBatch(**{**vars(off), "weights": np.zeros(9)}))
    assert learner.policy.engine_differs  # where nothing was computed, nothing was learned of the engine
    good = TrainBatch(**{**vars(batch), "logprobs": exact})
    update(learner, good)
    assert not learner.policy.engine_differs


def test_micro_batches_of_agents_with_adapters_have_one_agent(tmp_path: Path) -> None:
    batch = tree_batch()
    micro = MicroBatches(Sharing("shared"), 8192, ["a", "b"], Work(1, 1, 1), torch.device("cpu"))
    for part in micro.cut(batch, np.arange(9)):
        assert len({batch.agents[i] for i in part.sequences}) == 1


@pytest.mark.parametrize("packing", ["auto", "plain"])
def test_a_kind_of_packing_that_a_model_does_not_take_is_left(tmp_path: Path, packing: str) -> None:
    """Bloom's distances run on through a packed row, too."""
    assert make_learner(save_toy(tmp_path, "bloom"), packing=packing).policy.micro.sharing.mode == "off"


def test_work_of_models_without_a_head_size_of_their_own() -> None:
    """Embeddings 258 x 32, shared with the head; two layers of two heads of 16."""
    model = toy_model(toy_tokenizer(), "gpt2")
    work = work_of(model)
    assert (work.head, work.attention) == (258 * 32, 2 * 2 * 16)
    assert work.body == sum(p.numel() for p in model.parameters()) - 258 * 32


def test_roles_in_turn_start_from_a_ratio_of_one_where_the_engine_differs(tmp_path: Path) -> None:
    """With a rate of 0 nothing moves: the later role's advantages are its own, whatever the engine said."""
    learner = make_learner(save_toy(tmp_path), lr=0.0, kl_beta=0.0)
    batch = tree_batch()
    steps, previous = np.array([0, 1] * 4 + [0]), np.array([-1, 0, -1, 2, -1, 4, -1, 6, -1])
    off = [values + 0.05 for values in learner.logprobs(batch)]
    advantages = np.where(np.arange(9) % 4, batch.advantages, 0.0)  # some move nothing and are not computed
    chained = TrainBatch(
        **{**vars(batch), "logprobs": off, "steps": steps, "previous": previous, "advantages": advantages}
    )
    learner.policy.engine_differs = True
    seen: list[Any] = []
    accumulate = learner.accumulate
    learner.accumulate = lambda given, *rest: (seen.append(np.array(given.advantages)), accumulate(given, *rest))[1]  # type: ignore[func-returns-value,method-assign]
    update(learner, chained)
    assert seen[1] == pytest.approx(advantages, rel=1e-5)
