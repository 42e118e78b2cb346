"""The learner on a two-layer model: the gradient of the whole whatever the cut, masks, empty batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.learner.training_data import TrainingData

from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.algorithms.objective import PolicyLearner
from rllib_mhgpo.credit import token_weights
from rllib_mhgpo.modules import llm_module
from rllib_mhgpo.packing import Rows, lay_out
from rllib_mhgpo.sharding import cast_parameters
from rllib_mhgpo.train_batch import TrainBatch
from tests.toys import save_toy

LENGTHS = [(3, 2), (30, 5), (7, 1), (12, 9), (3, 4), (25, 3)]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp(request.param), request.param)


def make_learner(folder: Path, framework: dict[str, Any] | None = None, **settings: Any) -> PolicyLearner:
    config = MHGPOConfig().training(**{"llm": str(folder), "lr": 1e-2, "kl_beta": 0.04, "grad_clip": None, **settings})
    config.framework(**(framework or {}))
    learner = PolicyLearner(config=config, module_spec=multi_spec(config))
    learner.build()
    return learner


def multi_spec(config: MHGPOConfig) -> Any:
    from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec

    from rllib_mhgpo.spaces import TokenSequence

    spec = config.get_default_rl_module_spec()
    spec.observation_space = spec.action_space = TokenSequence(258, 64)
    return MultiRLModuleSpec(rl_module_specs={"default_policy": spec})


def make_batch(lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0, **changes: Any) -> TrainBatch:
    rng = np.random.default_rng(seed)
    responses = [rng.integers(0, 256, r).astype(np.int32) for _, r in lengths]
    prompts = [rng.integers(0, 256, p).astype(np.int32) for p, _ in lengths]
    first: dict[int, int] = {}  # prompts of one length are the same prompt
    prompts = [prompts[first.setdefault(len(prompt), i)] for i, prompt in enumerate(prompts)]
    agents, counts = np.arange(len(lengths)) % 2, np.array([r for _, r in lengths])
    fields: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "logprobs": [(-5 + rng.normal(size=len(r))).astype(np.float32) for r in responses],
        "advantages": rng.normal(size=len(lengths)),
        "weights": token_weights(agents, counts),
        "steps": np.zeros(len(lengths), dtype=np.int64),
    }
    return TrainBatch(**{**fields, **changes})


def gradient(learner: PolicyLearner, batch: TrainBatch, *parts: list[int]) -> torch.Tensor:
    llm = learner.module["default_policy"].llm
    llm.zero_grad(set_to_none=True)
    for part in parts or [list(range(len(batch)))]:
        learner.accumulate(batch, np.array(part, dtype=np.int64))
    return torch.cat([p.grad.flatten() for p in llm.parameters() if p.grad is not None])


def weights(learner: PolicyLearner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.module["default_policy"].llm.parameters()])


def plain_gradient(learner: PolicyLearner, batch: TrainBatch) -> torch.Tensor:
    """The objective row by row, unpadded, term by term as ALGORITHM says it, without any code of the package."""
    llm, reference, config = learner.module["default_policy"].llm, learner.policy.reference, learner.config
    llm.zero_grad(set_to_none=True)
    assert reference is not None
    for i in range(len(batch)):
        prompt, response = batch.prompts[i].astype(np.int64), torch.from_numpy(batch.responses[i].astype(np.int64))
        row = torch.cat([torch.from_numpy(prompt), response])[None]
        lines = [
            torch.log_softmax(model(row).logits[0, len(prompt) - 1 : -1], -1).gather(1, response[:, None])[:, 0]
            for model in (llm, reference)
        ]
        ratio, advantage = (lines[0] - torch.from_numpy(batch.logprobs[i])).exp(), float(batch.advantages[i])
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage)
        difference = lines[1] - lines[0]
        kl = difference.exp() - difference - 1
        (-(gain - config.kl_beta * kl).sum() * float(batch.weights[i])).backward()
    return torch.cat([p.grad.flatten() for p in llm.parameters() if p.grad is not None])


def test_the_gradient_is_the_one_of_unpadded_rows(folder: Path) -> None:
    """Identity 8 against an independent version, and G12: a short prompt beside a long one."""
    learner = make_learner(folder)
    with torch.no_grad():
        for parameter in learner.module["default_policy"].llm.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    batch = make_batch()
    expected = plain_gradient(learner, batch)
    assert torch.allclose(gradient(learner, batch), expected, atol=1e-6 + 1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_micro_batches_and_shards_change_nothing(folder: Path, max_tokens: int) -> None:
    """Identity 8: any partition sums to the gradient of the whole, to 1e-6 of its largest entry."""
    learner = make_learner(folder, max_tokens_per_microbatch=max_tokens)
    batch = make_batch()
    whole = gradient(make_learner(folder), batch)
    for parts in ([[0, 1, 2], [3, 4, 5]], [[5], [0, 2, 4], [1, 3]]):
        assert torch.allclose(gradient(learner, batch, *parts), whole, atol=1e-6 * max(1, whole.abs().max().item()))


def test_ten_tokens_in_two_unequal_parts_have_the_same_mean() -> None:
    """G8: losses 1, 1 and eight times 0: the mean is 0.2 however the tokens are cut."""
    agents, lengths = np.array([0, 0]), np.array([2, 8])
    per_token = token_weights(agents, lengths, "token_mean")
    assert per_token @ np.array([1 * 2, 0 * 8]) == pytest.approx(0.2)


def test_a_sampled_eos_counts_though_it_is_also_the_padding() -> None:
    """G14: response 5 7 2 of one row beside a response of five: mask 1 1 1 0 0."""
    responses = [np.array([5, 7, 2], np.int32), np.array([5, 7, 5, 5, 2], np.int32)]
    layout = lay_out(
        [np.array([9], np.int32)] * 2, responses, Rows([[0], [1]], "causal"), [np.ones(len(r), bool) for r in responses]
    )
    assert layout.cells.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
    assert layout.targets.tolist() == [5, 7, 2, 5, 7, 5, 5, 2]


def update(learner: PolicyLearner, batch: TrainBatch) -> dict[str, Any]:
    return learner.update(training_data=TrainingData(batch=batch))


def test_a_batch_that_carries_no_loss_changes_nothing(folder: Path) -> None:
    """G6: weights bit-equal, no number out of it."""
    learner = make_learner(folder)
    before = weights(learner)
    result = update(learner, make_batch(weights=np.zeros(len(LENGTHS))))
    assert torch.equal(weights(learner), before)
    assert result["rows"]["measured"] == {}
    assert result["skipped_steps"] == 0


@pytest.mark.parametrize("kl_beta", [0.0, 0.04])
def test_advantages_of_zero_leave_only_the_kl(folder: Path, kl_beta: float) -> None:
    """G4: at the reference itself k3 has no gradient, so nothing moves; finite either way."""
    learner = make_learner(folder, kl_beta=kl_beta)
    grad = gradient(learner, make_batch(advantages=np.zeros(len(LENGTHS))))
    assert grad.abs().max() < 1e-6
    assert (learner.policy.reference is None) == (kl_beta == 0)


def test_rows_without_advantage_are_not_computed_and_stay_in_the_denominators(folder: Path) -> None:
    advantages = np.array([0.5, 0, 0, -0.3, 0, 0.2])
    learner, other = make_learner(folder, kl_beta=0.0), make_learner(folder, kl_beta=0.0)
    batch = make_batch(advantages=advantages)
    result = update(learner, batch)
    assert result["rows"]["updated"].tolist() == (advantages != 0).tolist()
    assert torch.allclose(gradient(other, batch), gradient(other, batch, [0, 3, 5]), atol=1e-7)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(folder: Path) -> None:
    learner = make_learner(folder)
    before = weights(learner)
    batch = make_batch(advantages=np.full(len(LENGTHS), np.inf))
    assert update(learner, batch)["skipped_steps"] == 1
    assert torch.equal(weights(learner), before)


def test_minibatches_are_optimiser_steps_of_their_own(folder: Path) -> None:
    learner = make_learner(folder, num_epochs=2)
    result = update(learner, make_batch(steps=np.array([0, 0, 1, 1, 2, 2])))
    assert len(result["grad_norms"]) == 6


def test_steps_without_rows_are_none(folder: Path) -> None:
    """They have no gradient of norm 0, and do not come between steps that were skipped."""
    learner = make_learner(folder)
    changes: dict[str, Any] = {"steps": np.array([0, 0, 1, 1, 2, 2]), "weights": np.array([0, 0, 0.1, 0.1, 0, 0])}
    assert len(update(learner, make_batch(**changes))["grad_norms"]) == 1
    assert update(learner, make_batch(weights=np.zeros(6)))["grad_norms"] == []
    lost = make_batch(**changes, advantages=np.full(6, np.inf))
    assert [update(learner, lost)["skipped_in_a_row"] for _ in range(2)] == [1, 2]


def test_the_ratio_moves_when_the_weights_do(folder: Path) -> None:
    """Identity 5: recorded log-probabilities of the policy itself give ratio 1, those of a perturbed one do not."""
    learner = make_learner(folder)
    batch = make_batch()
    recorded = learner.logprobs(batch)
    fresh = make_batch(logprobs=recorded)
    result = update(learner, fresh)["rows"]["measured"]
    assert result["ratio_max"] == pytest.approx(np.ones(len(LENGTHS)), abs=1e-4)
    assert result["clip_fraction"].sum() == 0
    moved = update(learner, fresh)["rows"]["measured"]
    assert abs(moved["ratio_max"] - 1).max() > 1e-2


def test_dropout_is_off_while_training(folder: Path) -> None:
    module = make_learner(folder).module["default_policy"]
    module.train()
    assert not any(m.training for m in module.llm.modules())


def test_roles_one_after_the_other_on_a_learner_without_rows(folder: Path) -> None:
    """With fewer questions than learners one of them has none."""
    learner = make_learner(folder, sequential_updates=True)
    rows = make_batch(agents=["a", "b"] * 3, previous=np.array([-1, 0, -1, 2, -1, 4]))
    assert update(learner, rows.take(np.zeros(0, dtype=np.int64)))["grad_norms"] == []
    assert len(update(learner, rows)["grad_norms"]) == 1


def test_roles_one_after_the_other_are_weighted_by_the_earlier_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chains of two acts: the second role's advantages carry the ratio of the first role's updated response."""
    learner = make_learner(folder, kl_beta=0.0)
    lengths = [(5, 3), (9, 2), (4, 4), (8, 5)]
    batch = make_batch(lengths)
    fresh = learner.logprobs(batch)
    chained = make_batch(
        lengths, logprobs=fresh, steps=np.array([0, 1, 0, 1]), previous=np.array([-1, 0, -1, 2]),
        weights=np.array([1 / 6, 1 / 4, 1 / 8, 1 / 10]),
    )  # fmt: skip
    seen: list[np.ndarray] = []
    accumulate = learner.accumulate

    def watched(batch: TrainBatch, rows: np.ndarray, *more: Any) -> Any:
        seen.append(np.asarray(batch.advantages))
        if len(seen) == 2:
            between.append(learner.logprobs(batch))
        return accumulate(batch, rows, *more)

    between: list[Any] = []
    monkeypatch.setattr(learner, "accumulate", watched)
    update(learner, chained)
    ratios = [float(np.exp((now - old).sum())) for now, old in zip(between[0], fresh, strict=True)]
    assert seen[0] == pytest.approx(np.asarray(chained.advantages))
    assert seen[1][[1, 3]] == pytest.approx(np.asarray(chained.advantages)[[1, 3]] * np.array(ratios)[[0, 2]], rel=1e-4)
    assert max(abs(np.array(ratios)[[0, 2]] - 1)) > 1e-2


def numpy_loss(learner: PolicyLearner, batch: TrainBatch) -> float:
    """The negated objective in float64 NumPy, from logits alone, row by row."""
    config, total = learner.config, 0.0
    for i in range(len(batch)):
        prompt, response = batch.prompts[i].astype(np.int64), batch.responses[i].astype(np.int64)
        row = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logps = []
        models: list[Any] = [learner.module["default_policy"].llm, learner.policy.reference]
        for model in models:
            with torch.no_grad():
                logits = model(row).logits[0, len(prompt) - 1 : -1].double().numpy()
            shifted = logits - logits.max(1, keepdims=True)
            logps.append((shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))[np.arange(len(response)), response])
        logp, ref = logps
        ratio, advantage = np.exp(logp - batch.logprobs[i].astype(np.float64)), float(np.asarray(batch.advantages)[i])
        gain = np.minimum(ratio * advantage, np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage)
        kl = np.exp(ref - logp) - (ref - logp) - 1
        total -= float(batch.weights[i]) * float((gain - config.kl_beta * kl).sum())
    return total


def test_the_loss_is_that_of_an_independent_float64_version(folder: Path) -> None:
    learner = make_learner(folder, clip_high=0.28)
    with torch.no_grad():
        for parameter in learner.module["default_policy"].llm.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    batch = make_batch(logprobs=learner.logprobs(make_batch()))
    with torch.no_grad():
        for parameter in learner.module["default_policy"].llm.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    everyone, loss = np.arange(len(batch)), 0.0
    for part in learner.policy.micro.cut(batch, everyone):
        micro = learner.policy.forward(learner.policy.micro.lay_out(batch, everyone, part), batch.logprobs)
        found, _ = learner.compute_loss_for_module(
            module_id="default_policy", config=learner.config, batch=micro, fwd_out={}
        )
        loss += float(found.detach())
    assert abs(numpy_loss(learner, batch)) > 1e-3
    assert loss == pytest.approx(numpy_loss(learner, batch), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("how", [True, "offload"])
def test_gradient_checkpointing_computes_layers_twice_and_changes_nothing(folder: Path, how: Any) -> None:
    batch = make_batch()
    expected = gradient(make_learner(folder), batch)
    learner = make_learner(folder, gradient_checkpointing=how)
    llm = learner.module["default_policy"].llm
    passes: list[int] = []
    layer = next(module for module in llm.modules() if type(module).__name__ in ("LlamaMLP", "GPT2MLP"))
    layer.register_forward_pre_hook(lambda *_: passes.append(1))
    found = gradient(learner, batch)
    with torch.no_grad():
        learner.logprobs(batch)
    # for each micro-batch: the policy, again in the backward pass, and for its log-probabilities
    assert len(passes) == 3 * len(learner.policy.micro.cut(batch, np.arange(len(batch))))
    assert torch.allclose(found, expected, atol=1e-6 * max(1, expected.abs().max().item()))
    assert not any(module.training for module in llm.modules())


def test_offloading_keeps_the_inputs_of_layers_and_nothing_else_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, ...]] = []

    def on_cpu(pin_memory: bool) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t)  # type: ignore[func-returns-value]

    monkeypatch.setattr(llm_module, "save_on_cpu", on_cpu)
    learner, batch = (
        make_learner(folder, gradient_checkpointing="offload", max_tokens_per_microbatch=10**6),
        make_batch(),
    )
    gradient(learner, batch)
    layers, width = learner.module["default_policy"].llm.config.num_hidden_layers, 32
    inputs = [shape for shape in kept if shape[-1:] == (width,)]
    assert len(inputs) == layers * len(learner.policy.micro.cut(batch, np.arange(len(batch))))
    assert sum(np.prod(shape) for shape in kept if shape not in inputs) < sum(map(np.prod, inputs)) / 10


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_have_the_same_gradient(folder: Path, checkpointing: bool) -> None:
    """RLlib's key, on a backend that traces and generates no code."""
    batch = make_batch()
    expected = gradient(make_learner(folder), batch)
    framework = {"torch_compile_learner": True, "torch_compile_learner_dynamo_backend": "eager"}
    compiled = make_learner(folder, framework, gradient_checkpointing=checkpointing)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = gradient(compiled, batch)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert torch.allclose(found, expected, atol=1e-6 * max(1, expected.abs().max().item()))


def test_bfloat16_leaves_positions_as_they_are(folder: Path) -> None:
    model = make_learner(folder).module["default_policy"].llm
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cast_parameters(model, torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
