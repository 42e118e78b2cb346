"""``rllib env check``: what it says of good environments, and that each fault is found and named."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rllib_mhgpo.algorithms.evaluation import System, assemble
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.env_checks import Finding, groups, run_checks
from rllib_mhgpo.envs.token_env import TokenEnv


class Good(TokenEnv):
    """Two agents say something; the second's length decides."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(["one", "two"], **limits)

    def start(self, index: int, split: str) -> None:
        self.index, self.said = index, list[str]()

    def prompt(self, agent: str) -> str:
        return f"{agent} {self.index} {len(self.said)}"

    def act(self, agent: str, text: str) -> None:
        self.said.append(text)
        self.reward(agent, -0.5 * (len(text) % 2))
        if self.next_agent() is None:
            self.reward_all(float(len(self.said[-1])))

    def next_agent(self) -> str | None:
        return ("one", "two", None)[len(self.said)]


class Leaky(Good):
    """Keeps what was said where copies share it."""

    shared = (*TokenEnv.shared, "said")

    def next_agent(self) -> str | None:
        return ("one", "two", None)[min(2, len(self.said))]


class Unseeded(Good):
    def prompt(self, agent: str) -> str:
        return f"{agent} {random.random()}"


class Endless(Good):
    max_turns = 10**9

    def next_agent(self) -> str | None:
        return "one"


class Unequal(Good):
    def reward_all(self, shared: float) -> None:
        super().reward_all(1.0)
        self.rewards["one"] += 2.0


class Infinite(Good):
    def reward_all(self, shared: float) -> None:
        super().reward_all(float("inf"))


class Wordy(Good):
    def prompt(self, agent: str) -> str:
        return "hello"[:3] * 300


class Odd(Good):
    def prompt(self, agent: str) -> str:
        return "0 1 zebra 2" if self.said else "0 1"


class Faulty(Good):
    def act(self, agent: str, text: str) -> None:
        raise KeyError("score")


class OddAndFaulty(Faulty, Odd):
    pass


def system(env: type, llm: str, **changes: Any) -> System:
    config = MHGPOConfig.check({"env": env, "llm": llm, "max_response_tokens": 5, "max_turns": 20, **changes})
    return assemble(config, config.llms, {})


def found(env: type, llm: Path, **changes: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in run_checks(system(env, str(llm), **changes), [0, 1])}


def test_a_good_environment_passes_every_check(toy_folder: Path) -> None:
    findings = found(Good, toy_folder)
    assert all(finding.passed for finding in findings.values()), findings
    assert findings["episodes end"].said == "after 2, 2 acts"
    assert findings["forks"].said.startswith("2 forks")
    assert findings["prompt limits"].said == "longest prompts one 7, two 7 of 1019 tokens"


@pytest.mark.parametrize(
    ("env", "check", "said"),
    [
        (Leaky, "forks", "playing a fork changed its parent"),
        (Unseeded, "PettingZoo seed_test", "Incorrect observation"),
        (Endless, "episodes end", "not ended after max_turns = 20"),
        (Unequal, "rewards", "'one' earned .* in all, and is credited with"),
        (Infinite, "rewards", "earns inf"),
        (Wordy, "prompt limits", "the prompt has 900 tokens, the limit is 200"),
        (Faulty, "episodes end", r"KeyError: 'score' \(.*test_env_check.py, line \d+"),
    ],
)
def test_each_fault_is_named(env: type, check: str, said: str, toy_folder: Path) -> None:
    changes = {"max_prompt_tokens": 200} if env is Wordy else {}
    finding = found(env, toy_folder, **changes)[check]
    assert not finding.passed
    assert re.search(said, finding.said), finding.said


def test_groups_are_what_training_makes_of_the_roots(toy_folder: Path) -> None:
    made, trees = groups(system(Good, str(toy_folder), group_size=3), [4, 5])
    assert [(g.root, g.agent, g.act, g.team) for g in made] == [
        (root, agent, 0, "team") for root in (4, 5) for agent in ("one", "two")
    ]
    assert [len(tree.generations) for tree in trees] == [6, 6]
    for one, two in zip(made[::2], made[1::2], strict=True):
        assert one.prompts == two.prompts == 1
        assert one.shared == two.shared
        assert all(-0.5 <= value <= 0 for value in one.specific)


def test_the_command_prints_a_report_and_fails_where_a_check_fails(
    toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllib_mhgpo.cli.launch.prepare", lambda _: None)

    def check(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["env", "check", *arguments, "--llm", str(toy_folder)])

    good = check("tests.test_env_check:Good", "--roots", "2")
    assert good.exit_code == 0, good.output
    assert good.stdout.count("ok  ") == 7
    assert "What MHGPO will see" in good.stdout
    assert "groups have different rewards" in good.stdout
    bad = check("tests.test_env_check:Unseeded")
    assert bad.exit_code == 1
    assert "FAIL  PettingZoo seed_test" in bad.stdout
    assert "error: env check: " in bad.stderr
    assert "takes no 'sise'" in check("text_game", "--env-config", '{"sise": 3}').stderr
    assert "game: pettingzoo.classic.rps_v2}" in check("pettingzoo.classic.rps_v2:env").stderr


def test_train_warns_once_of_words_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllib_mhgpo.cli.launch.prepare", lambda _: None)
    monkeypatch.setattr("rllib_mhgpo.cli.launch.launch", lambda *_: 0)

    def warned(env: str, **config: Any) -> list[str]:
        given = json.dumps({"llm": "mini", "max_response_tokens": 2, **config})
        told = CliRunner().invoke(app, ["train", "--algo", "MHGPO", "--env", env, "--config", given])
        assert told.exit_code == 0, told.output
        return [line for line in told.stderr.splitlines() if line.startswith("warning")]

    said = "agent 'two' reads words that the tokenizer of 'mini' does not know: zebra"
    assert warned("tests.test_env_check:Odd") == [f"warning: MHGPO_tests.test_env_check-Odd: {said}."]
    assert warned("solver_verifier") == []
    assert warned("tests.test_env_check:OddAndFaulty") == []  # the run says it
