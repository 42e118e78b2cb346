"""Loss terms against worked numbers and an independent float64 version."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_mhgpo.losses import KL_ESTIMATORS, clipped_surrogate, token_logprobs


def numpy_surrogate(logp: float, old: float, adv: float, low: float, high: float, dual: float | None) -> float:
    """The textbook sentence by sentence, one number at a time."""
    ratio = np.exp(np.float64(logp) - old)
    value = min(ratio * adv, min(max(ratio, 1 - low), 1 + high) * adv)
    return float(max(value, dual * adv) if dual is not None and adv < 0 else value)


@given(
    st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2), st.sampled_from([0.1, 0.2]), st.sampled_from([0.2, 0.28]),
    st.sampled_from([None, 3.0]),
)  # fmt: skip
def test_surrogate_equals_the_textbook(
    logp: float, old: float, adv: float, low: float, high: float, dual: float | None
) -> None:
    a, b, c = (torch.tensor([x], dtype=torch.float64) for x in (logp, old, adv))
    result = clipped_surrogate(a, b, c, low, high, dual).objective.item()
    assert result == pytest.approx(numpy_surrogate(logp, old, adv, low, high, dual), rel=1e-9, abs=1e-12)


def test_a_clipped_token_has_no_gradient() -> None:
    """Ratio 1.5 with A > 0 is beyond 1.2: flat; with A < 0 the larger loss counts: gradient is ratio * A."""
    logp = torch.tensor([np.log(1.5), np.log(1.5)], requires_grad=True)
    result = clipped_surrogate(logp, torch.zeros(2), torch.tensor([1.0, -1.0]))
    torch.autograd.backward(result.objective.sum())
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, -1.5])
    assert result.clipped.tolist() == [True, False]


def test_a_fresh_sample_has_ratio_one_and_is_not_clipped() -> None:
    """Identity 5 for the loss: the gradient of the objective is the advantage times that of logp."""
    logp = torch.tensor([-0.3, -2.0], requires_grad=True)
    result = clipped_surrogate(logp, logp.detach(), torch.tensor([0.7, -0.4]))
    torch.autograd.backward(result.objective.sum())
    assert logp.grad is not None
    assert result.ratio.tolist() == [1, 1]
    assert not result.clipped.any()
    assert logp.grad.tolist() == pytest.approx([0.7, -0.4])


def test_kl_estimators_by_hand() -> None:
    """logp = -1, ref = -2: k1 = 1, k2 = 1/2, k3 = exp(-1) + 1 - 1 = 0.3679."""
    logp, ref = torch.tensor([-1.0]), torch.tensor([-2.0])
    values = {name: estimator(logp, ref).item() for name, estimator in KL_ESTIMATORS.items()}
    assert values == pytest.approx({"k1": 1.0, "k2": 0.5, "k3": np.exp(-1)}, abs=1e-6)


def test_k1_and_k3_are_unbiased() -> None:
    """Their expectation under the policy is the exact KL of two distributions over five tokens."""
    rng = np.random.default_rng(0)
    policy, reference = (torch.log_softmax(torch.from_numpy(rng.normal(size=5)), -1) for _ in range(2))
    exact = (policy.exp() * (policy - reference)).sum().item()
    for name in ("k1", "k3"):
        assert (policy.exp() * KL_ESTIMATORS[name](policy, reference)).sum().item() == pytest.approx(exact)


def test_logprobs_at_a_temperature() -> None:
    """G9: logits [1, 0], temperature 0.5: log p(0) = -log(1 + exp(-2)) = log 0.8808; entropy from both tokens."""
    logp, entropy = token_logprobs(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), 0.5)
    p = 1 / (1 + np.exp(-2))
    assert logp.item() == pytest.approx(np.log(p), abs=1e-6)
    assert entropy.item() == pytest.approx(-(p * np.log(p) + (1 - p) * np.log(1 - p)), abs=1e-6)
