"""HFEngine against plain forward passes of transformers."""

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rllib_mhgpo.engines import Completion, HFEngine, Prompt
from rllib_mhgpo.engines.hf import draw
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
