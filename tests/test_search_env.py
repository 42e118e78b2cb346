"""The search environment: protocol, retrieval in the step, rewards, penalties, forks."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pettingzoo.test import api_test, seed_test
from ray.rllib.env.wrappers.pettingzoo_env import PettingZooEnv

from rllib_mhgpo.algorithms.registration import check_environment
from rllib_mhgpo.data import Corpus, Passage, Question, Questions
from rllib_mhgpo.envs.search import SearchEnv, dealt
from rllib_mhgpo.errors import ConfigError, RetrievalError, RolloutError
from rllib_mhgpo.retrieval import Retriever, TfidfEncoder, save_retriever
from rllib_mhgpo.retrieval.base import passage_texts
from rllib_mhgpo.spaces import TokenSequence
from tests.toys import PROMPTS, toy_questions, toy_tokenizer

CORPUS = Corpus.from_passages([("Own", "own page")])


def make(**settings: Any) -> SearchEnv:
    questions = toy_questions()
    defaults: dict[str, Any] = {"questions": questions, "dev_questions": questions, "prompts": PROMPTS}
    return SearchEnv(tokenizer=toy_tokenizer(), **{**defaults, **settings})


def say(env: SearchEnv, text: str) -> None:
    env.step(env.encode(text))


def play(env: SearchEnv, *texts: str, index: int = 1) -> SearchEnv:
    env.reset(seed=0, options={"index": index})
    for text in texts:
        say(env, text)
    return env


def read(env: SearchEnv) -> str:
    return str(env.tokenizer.decode(env.observe(env.agent_selection)))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pettingzoo_conformance() -> None:
    api_test(make(), num_cycles=30)
    seed_test(make, num_cycles=20)


def test_spaces_are_there_before_reset_and_shared_by_all_agents() -> None:
    """R4."""
    env = make()
    spaces = [env.observation_space(agent) for agent in env.possible_agents]
    assert spaces == [TokenSequence(258, 1024)] * 3


def test_rllibs_wrapper_plays_three_whole_episodes() -> None:
    wrapped = PettingZooEnv(make())
    for episode in range(3):
        observation, _ = wrapped.reset(seed=episode)
        for turn, agent in enumerate(["rewriter", "reranker", "answerer"]):
            assert list(observation) == [agent]
            action = wrapped.action_spaces[agent].sample()
            observation, _, terminated, _, _ = wrapped.step({agent: action})
            assert terminated["__all__"] == (turn == 2)
            observation = {a: o for a, o in observation.items() if a == wrapped.env.agent_selection}


def test_a_perfect_episode() -> None:
    env = play(make(), "p1 page1")
    assert read(env) == "Document0 P1\nDocument1 Q1 for p1 page1"
    say(env, "Document0")
    assert read(env) == "P1: page1 says a1 answer what is 1?"
    say(env, "a1")
    assert env.rewards == {"rewriter": 1, "reranker": 1, "answerer": 1}
    assert env.infos["answerer"]["specific_reward"] == 0
    assert env.infos["answerer"]["scores"] == {"f1": 1, "em": 1, "acc": 1, "avg": 1}
    assert all(env.terminations.values())


def test_the_shared_reward_reaches_agents_that_acted_long_ago() -> None:
    """R1: each agent's own penalty at its turn, the answer's reward at the end, once for each."""
    env = play(make(), "page1\npage1", "Document9", "a1")
    earned: dict[str, float] = {}
    for agent in env.agent_iter():
        _, reward, terminated, _, _ = env.last()
        earned[agent] = reward
        assert terminated
        env.step(None)
    assert earned == {"rewriter": 1 - 0.5, "reranker": 1 - 1.0, "answerer": 1}


@pytest.mark.parametrize(
    ("texts", "penalties"),
    [
        (("page1", "Document0", "a1"), (0, 0, 0)),
        (("a\nb\nc\nd\ne", "", "a1"), (-0.5, 0, 0)),
        (("x" * 301, "", "a1"), (-0.5, 0, 0)),
        (("", "", "a1"), (-0.5, 0, 0)),
        (("page1", "the first", "a1"), (0, -1, 0)),
        (("page1", "Document0,Document0", "a1"), (0, -1, 0)),
        (("page1", "Document0,Document7", "a1"), (0, -1, 0)),
        (("page1", "", "word " * 31), (0, 0, -1)),
        (("page1", "", "word " * 30), (0, 0, 0)),
    ],
)
def test_penalties(texts: Sequence[str], penalties: Sequence[float]) -> None:
    env = make()
    env.reset(options={"index": 1})
    for text, penalty in zip(texts, penalties, strict=True):
        agent = env.agent_selection
        say(env, text)
        assert env.infos[agent]["specific_reward"] == penalty
        assert env.infos[agent]["metrics"]["illegal"] == (penalty < 0)


def test_penalties_can_be_off_or_set_by_role() -> None:
    assert play(make(penalties=False), "").infos["rewriter"]["specific_reward"] == 0
    assert play(make(penalties={"rewriter": -0.1}), "").infos["rewriter"]["specific_reward"] == -0.1
    with pytest.raises(ConfigError, match="Did you mean 'rewriter'"):
        make(penalties={"rewritter": -1})


def test_an_unusable_rewrite_falls_back_to_the_question() -> None:
    """S7: blank queries are dropped."""
    assert play(make(), "  \n ").queries == ["what is 1?"]


def test_legal_ids_of_an_illegal_choice_are_still_used_in_their_order() -> None:
    """S9."""
    env = play(make(), "page0 page1 page2 page3", "Document3, Document77, Document1")
    assert env.chosen == [3, 1]


def test_passages_are_dealt_over_the_queries() -> None:
    found = [[Passage(10 * q + i, "", "") for i in range(10)] for q in range(4)]
    counts = [[sum(p.id // 10 == q for p in dealt(found[:n], 10)) for q in range(n)] for n in (1, 2, 3, 4)]
    assert counts == [[10], [5, 5], [4, 3, 3], [3, 3, 2, 2]]


def test_one_retriever_call_serves_all_environments() -> None:
    env = make()
    calls: list[list[str]] = []
    search = env.retriever.search

    def counted(queries: Sequence[str], k: int) -> Any:
        calls.append(list(queries))
        return search(queries, k)

    env.retriever.search = counted  # type: ignore[method-assign]
    envs = [copy.deepcopy(env) for _ in range(3)]
    for index, other in enumerate(envs):
        other.reset(options={"index": index})
    SearchEnv.step_batch(envs, [other.encode(f"p{i}") for i, other in enumerate(envs)])
    assert calls == [["p0", "p1", "p2"]]
    assert [other.passages[0].title for other in envs] == ["P0", "P1", "P2"]


def test_one_step_is_the_batch_of_one() -> None:
    alone, batched = play(make(), "page1"), make()
    batched.reset(seed=0, options={"index": 1})
    SearchEnv.step_batch([batched], [batched.encode("page1")])
    assert read(alone) == read(batched)
    assert alone.rewards == batched.rewards


def test_a_fork_shares_resources_and_nothing_else() -> None:
    env = play(make(), "page1")
    fork = copy.deepcopy(env)
    assert fork.retriever is env.retriever
    assert fork.tokenizer is env.tokenizer
    assert fork.splits is env.splits
    before = read(env)
    say(fork, "Document0")
    say(fork, "a1")
    assert (read(env), env.agent_selection, env.outputs) == (before, "reranker", {"rewriter": "page1"})
    assert fork.np_random.bit_generator is not env.np_random.bit_generator


def test_long_prompts_lose_whole_passages_the_lowest_ranked_first() -> None:
    """ "Document0 P1\\nDocument1 Q1 for p1 page1" has 38 tokens, "Document0 P1 for p1 page1" has 25."""
    env = play(make(max_prompt_tokens=37), "p1 page1")
    assert read(env) == "Document0 P1 for p1 page1"
    say(env, "Document0,Document1")
    assert env.infos["reranker"]["metrics"]["passages_left_out"] == 1
    assert (env.chosen, env.infos["reranker"]["metrics"]["illegal"]) == ([0], 1)


def test_a_prompt_that_cannot_be_shortened_voids_the_rollout() -> None:
    env = make(max_prompt_tokens=5)
    env.reset(options={"index": 1})
    with pytest.raises(RolloutError, match="14 tokens, the limit is 5"):
        env.observe("rewriter")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("penalties", "no", "penalties: expected true or false or keys and values, found 'no'"),
        ("max_prompt_tokens", "no", "max_prompt_tokens: expected a whole number of at least 1, found 'no'"),
        ("max_response_tokens", 1e2, "max_response_tokens: expected a whole number of at least 1, found 100.0"),
        ("top_k", 1e2, "top_k: expected a whole number of at least 1, found 100.0"),
        ("prompts", {"reranker": {"passage_chars": 1e2}}, "reranker.passage_chars: expected a whole number or null"),
        (
            "prompts",
            {"reranker": {"passage_chars": 0}},
            "reranker.passage_chars: expected a whole number of at least 1",
        ),
        ("prompts", {"answerer": {"system": False}}, "answerer.system: expected a text, found False"),
        ("prompts", {"answerer": {"examples": ["ab"]}}, r"answerer.examples: expected pairs .*found 'ab'"),
    ],
)
def test_values_of_another_kind_are_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**{key: value})
    if key != "penalties" and "tokens" not in key:  # known before anything is built, in other words
        with pytest.raises(ConfigError, match=rf"env_config\.{key}.*expected "):
            check_environment("search", {key: value})


def test_the_turn_order_holds() -> None:
    """R2: an action for an agent that is not selected is refused and changes nothing."""
    env = play(make(), "page1")
    with pytest.raises(ValueError, match="turn of 'reranker'"):
        env.step({"answerer": env.encode("a1")})
    with pytest.raises(ValueError, match="expected token ids"):
        env.step([999_999])
    assert env.agent_selection == "reranker"
    env.step({"reranker": env.encode("Document0")})
    assert env.agent_selection == "answerer"


def test_sampled_ids_stay_and_text_is_made_only_for_the_next_prompt() -> None:
    """G16: "page1" as single bytes or otherwise, the next agent reads the same text."""
    env = make()
    env.reset(options={"index": 1})
    ids = np.array([*env.encode("page1"), env.tokenizer.eos_token_id], dtype=np.int32)
    env.step(ids)
    assert read(env).endswith("for page1")


def nan_reward(answer: str, golds: Sequence[str]) -> float:
    return float("nan")


def length_reward(answer: str, golds: Sequence[str]) -> float:
    return len(answer) / 10


def test_rewards_of_other_kinds() -> None:
    assert play(make(reward="em"), "page1", "Document0", "a1 indeed").rewards["answerer"] == 0
    assert play(make(reward="acc"), "page1", "Document0", "a1 indeed").rewards["answerer"] == 1
    assert play(make(reward="tests.test_search_env:length_reward"), "page1", "", "12345").rewards["answerer"] == 0.5


def test_a_reward_that_is_no_number_names_question_and_agent() -> None:
    """R8."""
    with pytest.raises(RolloutError, match=r"question 'q1', agent 'answerer'.*nan"):
        play(make(reward="tests.test_search_env:nan_reward"), "page1", "Document0", "a1")


def test_recall_is_told_after_each_role() -> None:
    env = play(make(), "p1 page1")
    assert env.infos["rewriter"]["metrics"]["recall"] == 1
    say(env, "Document1")
    assert env.infos["reranker"]["metrics"]["recall"] == 0


def test_recall_tells_namesakes_apart() -> None:
    """Two of the question's passages bear one title: only the one that supports counts."""
    context = (("P", ("right page",)), ("P", ("other page",)), ("Q", ("another page",)))
    question = Question("q", "what?", ("a",), context=context, evidence=(0, 2))
    questions = Questions([question], "made")
    env = make(questions=questions, dev_questions=questions)
    play(env, "other page", index=0)
    assert env.infos["rewriter"]["metrics"]["recall"] == 1
    say(env, f"Document{[p.text for p in env.passages].index('other page')}")
    assert env.infos["reranker"]["metrics"]["recall"] == 0


def test_cache_hits_and_seconds_are_told() -> None:
    env = make()
    assert play(env, "p1\npage1").infos["rewriter"]["metrics"]["cache_hits"] == 0
    assert play(env, "p1\npage2").infos["rewriter"]["metrics"]["cache_hits"] == 0.5
    assert 0 < env.timings["search_s"] + env.timings["encode_s"] <= env.timings["retrieve_s"]


def test_an_index_brings_its_own_passages(tmp_path: Path) -> None:
    save_retriever(Retriever.build(CORPUS, TfidfEncoder.fit(passage_texts(CORPUS))), tmp_path / "ix")
    alone = tmp_path / "q.jsonl"
    alone.write_text("\n".join(json.dumps({"question": f"what is {i}?", "answer": f"a{i}"}) for i in range(9)))
    spec = {"file": str(alone), "limit": 3, "shuffle": 1}
    env = make(questions=spec, dev_questions=None, retriever=str(tmp_path / "ix"))
    assert env.num_roots() == 3
    assert [passage.title for passage in play(env, "own").passages] == ["Own"]
    with pytest.raises(RetrievalError, match="holds 1 vectors"):
        make(retriever=str(tmp_path / "ix"), corpus=Corpus.from_passages([("A", "a"), ("B", "b")]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"file": "x", "limt": 3}, "Did you mean 'limit'"),
        ({"file": "x", "limit": 0}, "questions.limit: expected a whole number, found 0"),
        ({"file": "x", "shuffle": True}, "questions.shuffle"),
        ({"limit": 3}, "questions.file: expected a question file, found None"),
        ({"file": "minipedia:train"}, "questions.file: expected a question file"),
    ],
)
def test_refused_parts_of_question_files(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchEnv.check({"questions": spec})


def test_a_failing_retriever_stops_the_run() -> None:
    env = make(retriever="http://127.0.0.1:9/retrieve")
    with pytest.raises(RetrievalError, match=r"127\.0\.0\.1:9/retrieve: no answer after 3 tries"):
        play(env, "p1")


def test_an_index_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 3"):
        make().reset(options={"index": 4})


def test_prompts_are_replaced_from_configuration() -> None:
    for prompts, message in [
        ({"rewritr": {}}, "Did you mean 'rewriter'"),
        ({"rewriter": {"templte": ""}}, "Did you mean 'template'"),
        ({"rewriter": {"parser": "querys"}}, "Did you mean 'queries'"),
        ("hotpt", "Did you mean 'hotpot'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make(prompts=prompts)


def failing_reward(answer: str, golds: Sequence[str]) -> float:
    raise KeyError("oops")


def text_reward(answer: str, golds: Sequence[str]) -> float:
    return "0.5"  # type: ignore[return-value]


def as_said(text: str, *passages: Any) -> tuple[Any, bool]:
    return json.loads(text), True


@pytest.mark.parametrize("said", ["[-1, -2]", "[99]", '["0"]', "[true]", "0", "null"])
def test_what_a_parser_of_ones_own_must_return(said: str) -> None:
    """S9: positions of passages that are there; neither the last ones by numbers below 0, nor letters of a text."""
    own = {role: {**PROMPTS[role], "parser": "tests.test_search_env:as_said"} for role in ("reranker", "rewriter")}
    env = play(make(prompts={**PROMPTS, **own}), '["page1"]')
    with pytest.raises(ConfigError, match=r"'tests.test_search_env:as_said' of the reranker: .* positions below 2, fo"):
        say(env, said)
    with pytest.raises(ConfigError, match=r"of the rewriter: expected a list of queries, found 'page1'"):
        play(make(prompts={**PROMPTS, **own}), '"page1"')


def failing_parser(text: str) -> tuple[list[str], bool]:
    raise KeyError("oops")


def test_a_users_function_that_fails_is_named() -> None:
    with pytest.raises(ConfigError, match=r"reward: the function failed on question 'q1': KeyError"):
        play(make(reward="tests.test_search_env:failing_reward"), "p1", "Document0", "a1")
    with pytest.raises(ConfigError, match=r"reward: expected a number for question 'q1', found '0.5'"):
        play(make(reward="tests.test_search_env:text_reward"), "p1", "Document0", "a1")
    prompts = {**PROMPTS, "rewriter": {**PROMPTS["rewriter"], "parser": "tests.test_search_env:failing_parser"}}
    with pytest.raises(ConfigError, match=r"parser 'tests.test_search_env:failing_parser' failed"):
        play(make(prompts=prompts), "p1")


@pytest.mark.parametrize("top_k", [0, -1, 1.5, "x", True])
def test_top_k_is_a_positive_number(top_k: Any) -> None:
    with pytest.raises(ConfigError, match="top_k"):
        make(top_k=top_k)


@pytest.mark.parametrize("template", ["", None, "{queston}"])
def test_a_template_that_cannot_be_meant_is_refused(template: Any) -> None:
    with pytest.raises(ConfigError, match=r"env_config.prompts.answerer.template"):
        make(prompts={**PROMPTS, "answerer": {"template": template}})
