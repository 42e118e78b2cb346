"""Who plays which role in ``rllib evaluate``: rows beside a system, players by name, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.doctor import configurations
from rllib_mhgpo.cli.evaluate import untrained
from rllib_mhgpo.cli.roles import recast
from rllib_mhgpo.engines import Cast, Completion, Prompt, Written
from rllib_mhgpo.errors import ConfigError, ModelError
from tests.toys import PROMPTS, ScriptedEngine, save_toy, toy_tokenizer

MINIPEDIA = """
tiny-search:
  run: MHGPO
  env: search
  config: {llm: tiny, env_config: {questions: "minipedia:train", dev_questions: "minipedia:dev", prompts: minipedia}}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("yaml") / "tiny.yaml"
    path.write_text(MINIPEDIA)
    return path


@pytest.fixture
def toy_file(toy_folder: Path, toy_questions_file: Path, tmp_path: Path) -> Path:
    questions = str(toy_questions_file)
    config = {
        "llm": str(toy_folder), "max_response_tokens": 6,
        "env_config": {"questions": questions, "dev_questions": questions, "prompts": PROMPTS},
    }  # fmt: skip
    path = tmp_path / "toy.yaml"
    path.write_text(json.dumps({"toy": {"run": "MHGPO", "env": "search", "config": config}}))
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)


def test_hand_written_policies_stand_beside_the_untrained_system(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    roles = ("perfect", "first-passage", "reranker=perfect,answerer=perfect")
    result = run(file, "--limit", 40, "--out", out, *(part for role in roles for part in ("--roles", role)))
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["as it is", *roles]
    assert "F1 0.00" in lines[2]
    assert "(+" in lines[1]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    f1 = {who: sum(r["scores"]["f1"] for r in rows if r["roles"] == who) / 40 for who in ("as it is", *roles)}
    assert f1["perfect"] > 0.95
    assert f1["first-passage"] == 0 < f1["as it is"] < f1["reranker=perfect,answerer=perfect"] < f1["perfect"]


def test_identity_leaves_things_as_they_are(toy_file: Path) -> None:
    system = recast(untrained(toy_file, {}), "rewriter=identity,reranker=identity")
    ((record, *_),) = system.answers("dev", limit=2)
    assert record["queries"] == [record["question"]]
    assert record["chosen"] == [passage["id"] for passage in record["passages"]]
    with pytest.raises(ConfigError, match="only rewriters and rerankers"):
        next(recast(system, "answerer=identity").answers("dev", limit=1))


def test_other_policies_play_a_role(toy_file: Path, toy_folder: Path, tmp_path: Path) -> None:
    system = untrained(toy_file, {})
    plain = next(system.answers("dev"))
    assert next(recast(system, "reranker=base").answers("dev")) == plain
    assert next(recast(system, str(toy_folder)).answers("dev")) == plain
    other = next(recast(system, f"answerer={save_toy(tmp_path / 'other', seed=5)}").answers("dev"))
    assert [r["outputs"]["rewriter"] for r in other] == [r["outputs"]["rewriter"] for r in plain]
    assert [r["outputs"]["answerer"] for r in other] != [r["outputs"]["answerer"] for r in plain]


def gold(env: Any, agent: str) -> str:
    return str(env.unwrapped.question.answers[0])


def number(env: Any, agent: str) -> int:
    return 3


def test_a_function_of_ones_own_plays_a_role(toy_file: Path) -> None:
    system = untrained(toy_file, {})
    (records,) = recast(system, "answerer=tests.test_roles:gold").answers("dev")
    assert all(record["scores"]["f1"] == 1 for record in records)
    with pytest.raises(ConfigError, match="as agent 'answerer': expected a text, found 3"):
        next(recast(system, "answerer=tests.test_roles:number").answers("dev"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rewritter=base", "no role 'rewritter'.*Did you mean 'rewriter'"),
        ("rewriter=idendity", "no player 'idendity'.*Did you mean 'identity'"),
        ("perfekt", "Did you mean 'perfect'"),
        ("rewriter=tests.test_roles:nothing", "cannot be imported"),
        ("rewriter=os:sep", "expected a class or a function, found 'os:sep', a str"),
        ("", "no player ''"),
    ],
)
def test_unknown_roles_and_players_are_refused(toy_file: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recast(untrained(toy_file, {}), spec)


def test_a_policy_with_another_tokenizer_cannot_play(toy_file: Path) -> None:
    with pytest.raises(ConfigError, match="another tokenizer"):
        recast(untrained(toy_file, {}), str(Path(__file__).parents[1] / "rllib_mhgpo/llms/tiny"))


def test_a_policy_with_a_shorter_context_cannot_play(toy_file: Path, tmp_path: Path) -> None:
    other = save_toy(tmp_path / "other", "gpt2")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "n_positions": 10}))
    with pytest.raises(ModelError, match=r"roles: .*other' has a context of 10 tokens, expected at least the 1024"):
        recast(untrained(toy_file, {}), f"reranker={other}")


def test_only_one_experiment_of_this_package_is_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(MINIPEDIA + MINIPEDIA.replace("tiny-search", "other"))
    assert "expected one experiment" in run(path).stderr
    path.write_text("ppo: {run: PPO, env: CartPole-v1}")
    assert "expected an algorithm of this package" in run(path).stderr


def test_an_experiment_that_searches_is_not_evaluated_by_its_first_combination(toy_file: Path, tmp_path: Path) -> None:
    """R9: the places are named; what the command line chooses is no longer searched."""
    experiment = json.loads(toy_file.read_text())["toy"]
    config, path = experiment["config"], tmp_path / "grid.yaml"

    def searching(**changes: Any) -> Path:
        config["env_config"] |= {"reward": {"grid_search": ["f1", "em"]}}
        path.write_text(json.dumps({"toy": {**experiment, "config": {**config, **changes}}}))
        return path

    said = "expected one configuration, found a search over {}; write one value of each"
    lr = {"loguniform": [1e-6, 1e-4]}
    assert said.format("env_config/reward, lr") in " ".join(run(searching(lr=lr)).stderr.split())
    assert said.format("lr") in " ".join(run(searching(lr={"choice": [1e-6]}), "--set", "reward=em").stderr.split())
    assert untrained(searching(lr={"grid_search": [1e-6]}), {"reward": "em"}).config.lr == 1e-6
    with pytest.raises(ConfigError, match=r"found a search over env_config/reward, lr; .* --set lr=1e-5"):
        list(configurations(searching(lr=lr), []))
    (one,) = configurations(path, ["lr=1e-5", "env_config.reward=em"])
    assert (one.lr, one.env_config["reward"]) == (1e-5, "em")


def test_voided_questions_are_named(toy_file: Path, tmp_path: Path) -> None:
    """M7: by their ids, on the terminal and in the file."""
    out = tmp_path / "rows.jsonl"
    shown = run(toy_file, "--limit", 3, "--out", out, "--set", "reward=tests.test_roles:nan_for_q1").stdout
    assert "3 questions | 1 voided, counted 0: q1" in shown
    (row,) = [row for row in map(json.loads, out.read_text().splitlines()) if "void" in row]
    assert (row["id"], row["root"]) == ("q1", 1)


def nan_for_q1(answer: str, golds: Any) -> float:
    return float("nan") if "a1" in golds else 0.0


def test_a_cast_calls_each_engine_once() -> None:
    tokenizer = toy_tokenizer()
    one, two = ScriptedEngine(tokenizer, lambda *_: "a"), ScriptedEngine(tokenizer, lambda *_: "b")
    prompts = [Prompt(tokenizer("x")["input_ids"], [0], 5, agent=agent) for agent in ("p", "q", "p", "r")]
    said = Cast(one, {"q": two}).generate(prompts, 1.0)
    assert [tokenizer.decode(c.ids[:-1]) for (c,) in said] == ["a", "b", "a", "a"]
    assert (one.calls, two.calls) == (1, 1)
    assert isinstance(said[0][0], Completion)


def test_a_written_policy_that_fails_is_named() -> None:
    def fail(env: Any, agent: str) -> str:
        raise ZeroDivisionError

    with pytest.raises(ConfigError, match=r"'mine' failed as agent 'p'.*ZeroDivisionError"):
        Written(fail, "mine").generate([Prompt(toy_tokenizer()("x")["input_ids"], [0], 5, agent="p")], 1.0)
