"""Where all agents read the whole transcript, several agents are one: MHGPO-FoF equals GRPO on the transcript."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rllib_mhgpo.credit import gae, group_advantages, propagate
from rllib_mhgpo.envs.token_env import Messages, TokenEnv
from rllib_mhgpo.sampling import ForkOnFirst, Options
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.tree import flatten
from rllib_mhgpo.waves import Play, play
from tests.test_learner import make_learner
from tests.toys import EOS, ScriptedEngine, save_toy, toy_tokenizer

AGENTS = ("first", "second", "third")


class Transcript(TokenEnv):
    """Every prompt is all that was read and said so far, EOS included; the environment says a word in between."""

    def __init__(self) -> None:
        super().__init__(AGENTS, toy_tokenizer())

    def start(self, index: int, split: str) -> None:
        self.said: list[str] = []
        self.transcript = f"question {index}:"

    def prompt(self, agent: str) -> Messages:
        return self.transcript

    def act(self, agent: str, text: str) -> None:
        self.said.append(text)
        self.transcript += f"{text}{EOS} then "
        if self.next_agent() is None:
            self.reward_all(float(len(set("".join(self.said)))))

    def next_agent(self) -> str | None:
        return AGENTS[len(self.said)] if len(self.said) < 3 else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy"))


def words(prompt: str, sample: int) -> str:
    """ASCII that depends on what was read, so that the tokenizer makes the sampled ids of it again."""
    return "abcdefgh"[(len(prompt) + sample) % 5 : (len(prompt) * (sample + 1)) % 7 + 2]


def plain_logp(llm: Any, transcript: np.ndarray, start: int) -> np.ndarray:
    """Log-probabilities of a transcript's tokens from ``start`` on, in one unpadded pass."""
    tokens = torch.from_numpy(transcript.astype(np.int64))
    with torch.no_grad():
        logp = torch.log_softmax(llm(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
    return np.asarray(logp[start - 1 :])


def test_single_context_equivalence(folder: Path) -> None:
    """Identity 6: advantages, and per-token ratios after the weights have moved, agree."""
    env, learner = Transcript(), make_learner(folder, kl_beta=0.0)
    trees = play(env, ScriptedEngine(env.tokenizer, words), [0, 1], Play(ForkOnFirst(Options(4, 3)), 1.0, 9, (0,)), {})
    flat = flatten(trees, AGENTS)
    mhgpo = group_advantages(propagate(flat.edges, flat.shared)[:, 0], flat.tree * 3 + flat.agent).values
    ends = [tree.generations[leaf].shared["team"] for tree in trees for leaf in tree.leaves()]
    grpo = group_advantages(np.array(ends), np.repeat([0, 1], 4)).values
    assert np.abs(grpo).max() > 0
    for agent in range(3):
        assert mhgpo[flat.agent == agent] == pytest.approx(grpo)

    llm, ones = learner.module["default_policy"].llm, np.ones(len(flat.generations))
    batch = TrainBatch.of(flat.generations, ones, ones, np.zeros(len(ones), dtype=np.int64))
    paths = [(tree, tree.trajectory(leaf)) for tree in trees for leaf in tree.leaves()]
    transcripts = [np.concatenate([t.generations[p[-1]].prompt, t.generations[p[-1]].response]) for t, p in paths]
    starts = [len(tree.generations[path[0]].prompt) for tree, path in paths]
    old, old_single = learner.logprobs(batch), [plain_logp(llm, t, s) for t, s in zip(transcripts, starts, strict=True)]
    with torch.no_grad():
        for parameter in llm.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    new, new_single = learner.logprobs(batch), [plain_logp(llm, t, s) for t, s in zip(transcripts, starts, strict=True)]
    ratios = {id(g): np.exp(n - o) for g, n, o in zip(flat.generations, new, old, strict=True)}
    for (tree, path), transcript, start, before, after in zip(
        paths, transcripts, starts, old_single, new_single, strict=True
    ):
        single = np.exp(after - before)
        for generation in (tree.generations[i] for i in path):
            begin, count = len(generation.prompt), len(generation.response)
            assert transcript[begin : begin + count].tolist() == generation.response.tolist()
            assert ratios[id(generation)] == pytest.approx(single[begin - start : begin - start + count], abs=1e-3)


def test_gae_equals_rllibs() -> None:
    """Several responses one after the other, each an episode of its own."""
    from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets

    rng = np.random.default_rng(0)
    lengths = [5, 1, 8]
    values, rewards = ([rng.normal(size=n) for n in lengths] for _ in range(2))
    for gamma, lambda_ in ((1.0, 1.0), (0.9, 0.95), (1.0, 0.0)):
        for value, reward in zip(values, rewards, strict=True):
            ended = np.arange(len(value)) == len(value) - 1
            target = compute_value_targets(value, reward, ended, np.zeros(len(value)), gamma, lambda_)
            assert gae(reward, value, gamma, lambda_) + value == pytest.approx(target, abs=1e-6)
