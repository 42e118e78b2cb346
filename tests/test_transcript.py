"""The single context: rounds, masks against a hand-made transcript, bounds, and GRPO on it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pettingzoo.test import api_test, seed_test

from rllib_mhgpo.algorithms.grpo import GRPO, GRPOConfig, joined
from rllib_mhgpo.algorithms.rewards import charge_overlong
from rllib_mhgpo.envs.minipedia.perfect import PERFECT
from rllib_mhgpo.envs.search_o1 import SearchO1Env
from rllib_mhgpo.envs.token_env import Messages, TokenEnv
from rllib_mhgpo.envs.transcript import TranscriptEnv
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.sampling import ForkOnFirst, Options
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.tree import Generation, RolloutTree
from rllib_mhgpo.waves import Play, play
from tests.rig import equal, row, weights
from tests.toys import ScriptedEngine, share_of_vowels, toy_questions, toy_tokenizer

SEARCHER = {
    "base": "hotpot",
    "searcher": {"template": "Q {question}", "system": "", "examples": [], "passage": "{text}"},
}


def make_env(**changes: Any) -> TranscriptEnv:
    settings: dict[str, Any] = {
        "questions": toy_questions(), "dev_questions": None, "prompts": SEARCHER, "top_k": 1, "max_rounds": 3,
        "max_response_tokens": 200,
    }  # fmt: skip
    return TranscriptEnv(toy_tokenizer(), **{**settings, **changes})


def run(env: TranscriptEnv, script: Callable[[str, int], str], group: int = 1) -> RolloutTree:
    strategy = ForkOnFirst(Options(group_size=group, num_agents=1))
    how = Play(strategy, 1.0, 200, (0,), keep_records=True)
    (tree,) = play(env, ScriptedEngine(env.tokenizer, script), [2], how, {})
    return tree


def searches_once(prompt: str, sample: int) -> str:
    return "<answer> a2 </answer>" if "<information>" in prompt else "<search> page2 a2 </search>"


def test_a_hand_made_transcript_token_by_token() -> None:
    """What the policy said, what was found, and which of it carries loss."""
    tree = run(make_env(), searches_once)
    (whole,) = joined(tree).generations
    texts = [
        "<search> page2 a2 </search><eos>",
        "\n<information>\npage2 says a2\n</information>\n",
        "<answer> a2 </answer><eos>",
    ]
    decode = toy_tokenizer().decode
    assert decode(whole.prompt) == "Q what is 2?"
    assert decode(whole.response) == "".join(texts)
    lengths = [len(text.replace("<eos>", "E")) for text in texts]
    assert whole.said is not None
    assert whole.said.tolist() == [True] * lengths[0] + [False] * lengths[1] + [True] * lengths[2]
    assert whole.num_tokens == lengths[0] + lengths[2]
    assert (whole.logprobs[~whole.said] == 0).all()
    assert (whole.logprobs[whole.said] == -1).all()
    assert whole.shared == {"team": 1.0}
    assert whole.specific == 0
    assert whole.scores is not None
    assert whole.scores["f1"] == 1
    assert whole.metrics["searches"] == 1


def test_nothing_is_tokenized_twice() -> None:
    tree = run(make_env(), searches_once, group=3)
    for leaf in tree.leaves():
        first, second = (tree.generations[i] for i in tree.trajectory(leaf))
        start = np.concatenate([first.prompt, first.response])
        assert np.array_equal(second.prompt[: len(start)], start)


@pytest.mark.parametrize(
    ("said", "illegal", "searches"),
    [
        ("<search> page2", 3, 0),  # never closed
        ("page2", 3, 0),
        ("<search></search>", 3, 0),
        ("<search> a </search><search> b </search>", 3, 2),  # the first is used
        ("<search> page2 </search>", 0, 2),  # searches for ever; the last round cannot look any more
        ("I think <answer> a2 </answer>", 0, 0),
        ("<answer> a2", 3, 0),
    ],
)
def test_rounds_out_of_form_are_counted_and_the_episode_ends(said: str, illegal: int, searches: int) -> None:
    tree = run(make_env(), lambda prompt, sample: said)
    (leaf,) = tree.leaves()
    rounds = [tree.generations[i] for i in tree.trajectory(leaf)]
    assert len(rounds) <= 3
    assert sum(g.metrics["illegal"] for g in rounds) == illegal
    assert sum(g.specific for g in rounds) == -0.5 * illegal
    assert rounds[-1].metrics["searches"] == searches
    answered = "</answer>" in said
    assert rounds[-1].metrics["unanswered"] == float(not answered)
    assert rounds[-1].scores == pytest.approx(dict.fromkeys(("acc", "em", "f1", "avg"), float(answered)))


def test_what_does_not_fit_the_context_is_left_out() -> None:
    env = make_env(max_prompt_tokens=60)
    tree = run(env, lambda prompt, sample: "<search> page2 </search>")
    (leaf,) = tree.leaves()
    rounds = [tree.generations[i] for i in tree.trajectory(leaf)]
    assert rounds[0].metrics["passages_left_out"] == 1
    assert all(len(g.prompt) <= 60 for g in rounds)


def test_it_is_a_pettingzoo_environment() -> None:
    api_test(make_env(), num_cycles=30)
    seed_test(make_env, num_cycles=20)


def test_the_perfect_policy_answers_in_one_context() -> None:
    env = TranscriptEnv("tiny", top_k=5)
    scores = []
    for index in range(60):
        env.reset(seed=0, options={"index": index, "split": "dev"})
        while env.agents and not env.terminations["searcher"]:
            env.step(env.encode_text(PERFECT["searcher"](*env.told("searcher"))))
        scores.append(env.infos["searcher"]["scores"]["f1"])
    assert np.mean(scores) > 0.9


@pytest.mark.parametrize("max_rounds", [0, True, "3", None])
def test_rounds_must_be_a_number(max_rounds: Any) -> None:
    with pytest.raises(ConfigError, match=r"env_config\.max_rounds"):
        make_env(max_rounds=max_rounds)


# --- GRPO --------------------------------------------------------------------------------------------------------


@pytest.fixture
def grpo(
    config: Callable[..., Any], request: pytest.FixtureRequest, toy_questions_file: Any, ray_session: None
) -> Callable[..., GRPO]:
    def build(**changes: Any) -> GRPO:
        questions = str(toy_questions_file)
        env_config = {
            "questions": questions, "dev_questions": questions, "prompts": SEARCHER, "max_rounds": 2,
            "reward": "tests.toys:share_of_vowels",
        }  # fmt: skip
        settings = {**config().to_dict(), "env": "transcript", "env_config": env_config, "max_response_tokens": 12}
        kept = {key: settings[key] for key in ("llm", "questions_per_iteration", "group_size", "lr", "seed", "env")}
        made = GRPOConfig().update_from_dict({**kept, "env_config": env_config, "max_response_tokens": 12, **changes})
        algorithm: GRPO = made.build_algo()
        request.addfinalizer(algorithm.stop)
        return algorithm

    return build


def test_grpo_trains_transcripts(grpo: Callable[..., GRPO]) -> None:
    algorithm = grpo()
    result = row(algorithm)
    assert result["num_generations"] == 9  # one a transcript
    assert result["searcher"]["illegal"] == 1  # a random model knows no tags
    growing = grpo(env="tests.test_transcript:Growing", env_config={})
    before = weights(growing)
    result = row(growing)
    assert result["num_generations"] == 9
    assert result["advantage_std"] > 0
    assert result["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert not equal(before, weights(growing))


def test_a_transcript_is_trained_as_its_first_round_is(grpo: Callable[..., GRPO]) -> None:
    """Identity 3: with one agent every strategy draws and trains G; `is` draws later rounds for the reward alone."""
    found = [row(grpo(env="tests.test_transcript:Growing", env_config={}, rollout_strategy=s)) for s in ("is", "fof")]
    for column in ("num_generations", "advantage_std", "grad_norm", "ratio_max"):
        assert found[0][column] == pytest.approx(found[1][column])
    assert found[0]["grad_norm"] > 0


def test_a_round_is_charged_for_its_own_length(grpo: Callable[..., GRPO]) -> None:
    """Limit 64, of which the last 16 cost: 30 and 30 tokens nothing, though together they are near it; 56 a half."""
    tree, prompt = RolloutTree(0), np.zeros(1, np.int32)
    for act, length in enumerate((30, 30, 56)):
        said = np.ones(length, np.int32)
        previous = act - 1 if act else None
        tree.add(Generation("searcher", prompt, said, np.zeros(length, np.float32), False, previous, act=act))
        prompt = np.concatenate([prompt, said])
    tree.generations[-1].scores = {}
    charge_overlong([tree], GRPOConfig().update_from_dict({"max_response_tokens": 64, "overlong_penalty_tokens": 16}))
    assert [g.specific for g in tree.generations] == [0, 0, -0.5]
    assert joined(tree).generations[0].specific == -0.5
    growing = grpo(env="tests.test_transcript:Growing", env_config={}, overlong_penalty_tokens=12)
    free = grpo(env="tests.test_transcript:Growing", env_config={})
    cost = [
        generation.specific - other.specific + generation.num_tokens / 12
        for tree, same in zip(growing.sample_trees(), free.sample_trees(), strict=True)
        for generation, other in zip(tree.generations, same.generations, strict=True)
    ]
    assert cost == pytest.approx(np.zeros(9))


def test_retrieved_tokens_have_no_gradient(grpo: Callable[..., GRPO]) -> None:
    """Garbage in the recorded log-probabilities of inserted tokens changes no gradient; their weights are 0."""
    import torch

    from rllib_mhgpo.train_batch import TrainBatch

    algorithm = grpo(kl_beta=0.1)
    learner = algorithm.learner_group._learner
    llm = learner.module["default_policy"].llm
    (whole,) = joined(run(make_env(), searches_once)).generations
    one = np.ones(1)

    def gradient() -> torch.Tensor:
        llm.zero_grad(set_to_none=True)
        batch = TrainBatch.of([whole], one, one / whole.num_tokens, np.zeros(1, dtype=np.int64))
        learner.accumulate(batch, np.array([0]))
        return torch.cat([p.grad.flatten() for p in llm.parameters()])

    assert whole.said is not None
    whole.logprobs = np.where(whole.said, -4.0, 0.0).astype(np.float32)
    clean = gradient()
    whole.logprobs = np.where(whole.said, -4.0, -77.0).astype(np.float32)
    assert torch.equal(clean, gradient())
    batch, first = TrainBatch.of([whole], one, one, np.zeros(1, dtype=np.int64)), np.array([0])
    (part,) = learner.policy.micro.cut(batch, first)
    micro = learner.policy.forward(learner.policy.micro.lay_out(batch, first, part), [whole.logprobs])
    assert (micro.weight[0] != 0).tolist() == whole.said.tolist()


def test_grpo_refuses_several_agents_and_contexts_that_do_not_grow(grpo: Callable[..., GRPO]) -> None:
    with pytest.raises(ConfigError, match="GRPO trains one agent"):
        grpo(env="search", env_config={"prompts": "hotpot"})
    algorithm = grpo(env="tests.test_transcript:TwoPrompts", env_config={})
    with pytest.raises(ConfigError, match=r"question \d+, agent 'alone'.*does not go on"):
        row(algorithm)


class Growing(TokenEnv):
    """One agent that says twice what earns by its vowels; its second prompt goes on from the first."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(["alone"], tokenizer)

    def start(self, index: int, split: str) -> None:
        self.said: list[str] = []
        self.context = self.encode(f"question {index}")

    def read(self, agent: str) -> Tokens:
        return self.context

    def act(self, agent: str, text: str) -> None:
        self.said.append(text)
        self.context = np.concatenate([self.context, self.response, self.encode_text(" and ")])
        if len(self.said) == 2:
            self.reward_all(share_of_vowels("".join(self.said), None))

    def next_agent(self) -> str | None:
        return "alone" if len(self.said) < 2 else None


class TwoPrompts(TokenEnv):
    """One agent that reads a new prompt at each of two acts."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(["alone"], tokenizer)

    def start(self, index: int, split: str) -> None:
        self.acts = 0

    def prompt(self, agent: str) -> Messages:
        return f"act {self.acts}"

    def act(self, agent: str, text: str) -> None:
        self.acts += 1
        if self.acts == 2:
            self.reward_all(1.0)

    def next_agent(self) -> str | None:
        return "alone" if self.acts < 2 else None


# --- a reader between search and context -------------------------------------------------------------------------


def test_a_reader_condenses_each_document_before_it_enters_the_context() -> None:
    prompts = {**SEARCHER, "reader": {"template": "READ {passages}", "passage": "{text}", "system": "", "examples": []}}
    env = SearchO1Env(
        toy_tokenizer(), questions=toy_questions(), dev_questions=None, prompts=prompts, top_k=2, max_rounds=3,
        max_response_tokens=200,
    )  # fmt: skip

    def script(prompt: str, sample: int) -> str:
        if prompt.startswith("READ"):
            return f"note of {prompt[5:]}"
        return searches_once(prompt, sample)

    strategy = ForkOnFirst(Options(group_size=2, num_agents=2))
    (tree,) = play(
        env, ScriptedEngine(env.tokenizer, script), [2], Play(strategy, 1.0, 200, (0,), keep_records=True), {}
    )
    decode = env.tokenizer.decode
    for leaf in tree.leaves():
        acts = [tree.generations[i] for i in tree.trajectory(leaf)]
        assert [g.agent for g in acts] == ["searcher", "reader", "reader", "searcher"]
        read = [decode(g.prompt) for g in acts[1:3]]
        assert sorted(read) == ["READ page2 says a2", "READ page2 says nothing"]
        notes = "\n".join(f"note of {text[5:]}" for text in read)
        assert decode(acts[3].prompt).endswith(f"\n<information>\n{notes}\n</information>\n")
        assert acts[3].scores is not None
        assert acts[3].scores["f1"] == 1
    env.reset(seed=0, options={"index": 2})
    env.step(env.encode_text("<search> page2 a2 </search>"))
    assert env.agent_selection == "reader"
    assert env.identity("reader") == "page2 says a2"
