"""Two searchers side by side: what is read, what is paid, and the graph of the tree."""

from typing import Any

import numpy as np
import pytest
from pettingzoo.test import api_test

from rllib_mhgpo.credit import propagate
from rllib_mhgpo.envs.parallel_search import ParallelSearchEnv
from rllib_mhgpo.sampling import ForkOnFirst, Options
from rllib_mhgpo.tree import flatten
from rllib_mhgpo.waves import Play, play
from tests.toys import PROMPTS, ScriptedEngine, toy_questions, toy_tokenizer

ROLES = {
    **{name: role for name, role in PROMPTS.items() if name != "rewriter"},
    "searcher_0": {**PROMPTS["rewriter"], "template": "first {question}"},
    "searcher_1": {**PROMPTS["rewriter"], "template": "second {question}"},
}


def make(**settings: Any) -> ParallelSearchEnv:
    return ParallelSearchEnv(
        tokenizer=toy_tokenizer(), questions=toy_questions(), dev_questions=None, prompts=ROLES, **settings
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pettingzoo_conformance() -> None:
    api_test(make(), num_cycles=30)


def test_searchers_do_not_read_each_other_and_the_reranker_reads_both() -> None:
    env = make(top_k=2)
    env.reset(options={"index": 1})
    prompts = []
    for text in ("p1", "p2", "Document0", "a1"):
        prompts.append(env.tokenizer.decode(env.observe(env.agent_selection)))
        env.step(env.encode(text))
    assert prompts == [
        "first what is 1?",
        "second what is 1?",
        "Document0 P1\nDocument1 P2 for p1\np2",
        "P1: page1 says a1 answer what is 1?",
    ]
    assert env.rewards == dict.fromkeys(env.possible_agents, 1.0)


def test_both_searchers_are_paid_by_the_answer() -> None:
    """FoF on the graph: four trajectories, of which the ones whose first searcher finds the page are right."""

    def script(prompt: str, sample: int) -> str:
        if prompt.startswith("first"):
            return f"p{sample}"
        if prompt.startswith("second"):
            return "p3"
        if " for " in prompt:
            return "Document0"
        return "a1" if prompt.startswith("P1") else "a0"

    env = make()
    how = Play(ForkOnFirst(Options(4, 4)), 1.0, 8, (0,))
    (tree,) = play(env, ScriptedEngine(env.tokenizer, script), [1], how, {})
    assert [g.parents for g in tree.generations] == [()] * 8 + [(i, 4 + i) for i in range(4)] + [
        (8 + i,) for i in range(4)
    ]
    flat = flatten([tree], env.possible_agents)
    shared = propagate(flat.edges, flat.shared)[:, 0].reshape(4, 4)
    assert (shared == np.array([0, 1, 0, 0])).all()
