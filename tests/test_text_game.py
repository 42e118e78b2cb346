"""Games as text: PettingZoo's own through the adapter, a Gymnasium environment as one agent, opponents."""

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Text
from pettingzoo.test import api_test, seed_test

from rllib_mhgpo.algorithms.registration import check_environment
from rllib_mhgpo.credit import propagate
from rllib_mhgpo.envs.moves import Moves, render
from rllib_mhgpo.envs.text_game import TextGame
from rllib_mhgpo.envs.text_gym import TextGym
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.sampling import ForkOnFirst, Options
from rllib_mhgpo.tree import RolloutTree, flatten
from rllib_mhgpo.waves import Play, play
from tests.toys import ScriptedEngine, toy_tokenizer

SPREAD = {"game": "mpe2.simple_spread_v3:parallel_env", "game_config": {"N": 2, "max_cycles": 3}}
GAMES: dict[str, dict[str, Any]] = {
    "tictactoe": {"game": "pettingzoo.classic.tictactoe_v3"},
    "connect four": {"game": "pettingzoo.classic.connect_four_v3"},
    "rock paper scissors": {
        "game": "pettingzoo.classic.rps_v2", "game_config": {"max_cycles": 4}, "moves": ["rock", "paper", "scissors"]
    },
    "mpe": SPREAD,
}  # fmt: skip


def make(**settings: Any) -> TextGame:
    return TextGame(tokenizer=toy_tokenizer(), **settings)


def say(env: Any, *texts: str) -> None:
    for text in texts:
        env.step(env.encode_text(text))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("game", GAMES)
def test_pettingzoo_conformance_of_every_game(game: str) -> None:
    api_test(make(**GAMES[game]), num_cycles=30)
    seed_test(lambda: make(**GAMES[game]), num_cycles=5)


def test_a_game_of_tictactoe() -> None:
    env = make()
    env.reset(options={"index": 0})
    say(env, "0", "I take 4.")
    assert env.tokenizer.decode(env.observe("player_1")) == "x . .\n. o .\n. . .\nmoves: 1 2 3 5 6 7 8\nmove:"
    say(env, "1", "5", "2")
    assert env.rewards == {"player_1": 1, "player_2": -1}
    assert env.infos["player_1"]["specific_reward"] == 0
    assert env.infos["player_1"]["scores"] == {"player_1_return": 1, "player_2_return": -1}
    assert all(env.terminations.values())


@pytest.mark.parametrize("reply", ["4", "9", "0 or 1", "", "centre"])
def test_an_illegal_move_costs_is_counted_and_a_random_legal_one_is_played(reply: str) -> None:
    env = make()
    env.reset(seed=3, options={"index": 0})
    say(env, "4", reply)
    assert env.infos["player_2"] == {"specific_reward": -1, "metrics": {"illegal": 1}}
    board = env.tokenizer.decode(env.observe("player_1"))
    assert (board.count("x"), board.count("o m"), board.count("o .") + board.count("o\n")) != (0, 0, 0)
    assert len(env.legal("player_1")) == 7
    assert make(penalties=False).penalties == {"player_1": 0, "player_2": 0}
    assert make(penalties={"player_2": -0.25}).penalties == {"player_1": -1, "player_2": -0.25}


def test_moves_of_one_cycle_are_not_seen_by_the_other() -> None:
    env = make(**GAMES["rock paper scissors"])
    env.reset(options={"index": 0})
    before = env.tokenizer.decode(env.observe("player_0"))
    say(env, "rock")
    assert env.tokenizer.decode(env.observe("player_1")) == before
    say(env, "paper")
    assert env.rewards == {"player_0": -1, "player_1": 1}


def test_what_a_parallel_game_pays_at_the_end_of_a_cycle_reaches_everyone() -> None:
    env = make(**SPREAD)
    env.reset(options={"index": 5})
    say(env, "0")
    assert env.rewards == {"agent_0": 0, "agent_1": 0}
    say(env, "0")
    assert env.rewards["agent_0"] == env.rewards["agent_1"] < 0
    again = make(**SPREAD)
    again.reset(options={"index": 5})
    say(again, "0", "0")
    assert again.rewards == env.rewards


def test_dev_roots_are_other_seeds() -> None:
    env = make(**SPREAD)
    boards = []
    for split in ("train", "dev"):
        env.reset(options={"index": 0, "split": split})
        boards.append(env.prompt("agent_0"))
    assert boards[0] != boards[1]
    assert env.num_roots("dev") == 100


def roll(env: Any, script: Any, group_size: int = 3) -> RolloutTree:
    how = Play(ForkOnFirst(Options(group_size, len(env.possible_agents))), 1.0, 8, (0,))
    return play(env, ScriptedEngine(env.tokenizer, script), [0], how, {})[0]


def test_each_player_is_a_team_whose_outcome_runs_back_to_its_own_moves() -> None:
    """One branch opens at 0 and plays 0 3 1 4 2, which player 1 wins; the other 8 3 0 4 1 5, which player 2 wins."""

    def script(prompt: str, sample: int) -> str:
        board, _, rest = prompt.partition("\nmoves: ")
        legal = rest.split("\n")[0].split()
        if sample == 1:
            return "8"
        wishes = "012" if board.count("x") == board.count("o") else "345"
        return next(move for move in wishes if move in legal)

    tree = roll(make(), script, 2)
    flat = flatten([tree], ["player_1", "player_2"])
    own = propagate(flat.edges, flat.shared)[np.arange(len(tree.generations)), flat.team]
    by_branch: dict[tuple[str, int], set[float]] = {}
    for generation, value in zip(tree.generations, own, strict=True):
        by_branch.setdefault((generation.agent, generation.path[0]), set()).add(float(value))
    assert by_branch == {
        ("player_1", 0): {1}, ("player_2", 0): {-1}, ("player_1", 1): {-1}, ("player_2", 1): {1}
    }  # fmt: skip
    assert {g.team for g in tree.generations} == {"player_1", "player_2"}


def test_a_fork_of_a_game_leaves_its_parent_alone() -> None:
    for settings in GAMES.values():
        env = make(**settings)
        env.reset(seed=0, options={"index": 0})
        say(env, env.legal(env.agent_selection)[0])
        before = env.observe(env.agent_selection).tolist(), env.legal(env.agent_selection)
        fork = copy.deepcopy(env)
        assert (fork.observe(fork.agent_selection).tolist(), fork.legal(fork.agent_selection)) == before
        assert fork.game.action_space(fork.agent_selection) is env.game.action_space(env.agent_selection)
        while fork.next_agent():
            say(fork, fork.random_reply(fork.agent_selection))
        assert (env.observe(env.agent_selection).tolist(), env.legal(env.agent_selection)) == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"game": "pettingzoo.classic.tictactoe_v9"}, "env_config.game: .* cannot be imported"),
        ({"game": "pettingzoo.classic"}, "expected a PettingZoo module"),
        ({"game": "builtins:dict"}, "expected a PettingZoo environment"),
        ({"game_config": {"width": 3}}, "game_config: .* refuses it"),
        ({"moves": ["a", "b"]}, "expected 9 different names for player_1"),
        ({"moves": list("aabcdefgh")}, "expected 9 different names"),
        ({"template": "{bord}"}, "env_config.template"),
        ({"teams": {"player_3": "a"}}, "no agent 'player_3'.*Did you mean 'player_"),
        ({"penalties": {"player_1": 2}}, "expected a number of at most 0, found 2"),
        ({"render": "math:tau"}, "expected a function"),
        ({"game": "mpe2.simple_spread_v3", "game_config": {"continuous_actions": True}}, "Discrete action space"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**settings)


def test_observations_as_text() -> None:
    assert render(np.int64(3)) == "3"
    assert render(np.array([-0.001, 1.5])) == "0 1.5"
    assert render(np.arange(4).reshape(2, 2)) == "0 1\n2 3"
    assert render({"a": np.array([1]), "b": "word", "action_mask": [1]}) == "a: 1\nb: word"
    with pytest.raises(ConfigError, match=r"shape \(4, 4, 3\)"):
        render(np.zeros((4, 4, 3)))


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("left", "left"),
        ("go LEFT!", "left"),
        ("left left", "left"),
        ("leftover", None),
        ("up left", None),
        ("up", None),
    ],
)
def test_a_reply_names_exactly_one_legal_move(reply: str, move: str | None) -> None:
    assert Moves(Discrete(3), ["left", "right", "up"], "x").read(reply, ["left", "right"]) == move


class Guess(gymnasium.Env[str, str]):
    """A text environment: the word is said in the observation."""

    observation_space, action_space = Text(40), Text(8, charset="abcdefghijklmnopqrstuvwxyz ")

    def __init__(self, words: Sequence[str] = ("cat", "dog")) -> None:
        self.words = words

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word, self.tries = self.words[int(self.np_random.integers(len(self.words)))], 0
        return f"say {self.word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.tries += 1
        return "again", float(action == self.word), action == self.word, self.tries == 3, {}


def test_a_text_environment_of_gymnasium_is_one_agent() -> None:
    env = TextGym(Guess, tokenizer=toy_tokenizer(), config={"words": ["fox"]})
    env.reset(options={"index": 0})
    assert env.tokenizer.decode(env.observe("agent")) == "say fox"
    say(env, "WRONG")
    assert env.infos["agent"] == {"specific_reward": -1, "metrics": {"illegal": 1}}
    say(env, "fox")
    assert env.rewards == {"agent": 1}
    assert env.terminations == {"agent": True}
    assert env.infos["agent"]["scores"] == {"return": 1}


class Corridor(gymnasium.Env[Any, int]):
    observation_space, action_space = Box(0, 3, (1,)), Discrete(2, start=1)  # type: ignore[var-annotated]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return np.zeros(1), {"action_mask": np.array([0, 1], np.int8)}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += (-1, 1)[action - 1]
        return np.array([float(self.place)]), -1.0, self.place == 3, False, {}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_discrete_actions_have_names_in_gymnasium_too() -> None:
    env = TextGym(Corridor, tokenizer=toy_tokenizer(), moves=["back", "on"], template="{board} {moves}:")
    env.reset(options={"index": 0})
    assert env.tokenizer.decode(env.observe("agent")) == "0 on:"
    say(env, "on")
    assert env.tokenizer.decode(env.observe("agent")) == "1 back on:"
    say(env, "back", "on", "on", "on")
    assert env.terminations == {"agent": True}
    assert env.infos["agent"]["scores"] == {"return": -5}
    api_test(TextGym("CartPole-v1", tokenizer=toy_tokenizer()), num_cycles=20)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("dev_roots", 1e2, "a whole number, found 100.0"),
        ("dev_roots", "no", "a whole number, found 'no'"),
        ("max_turns", "no", "a whole number, found 'no'"),
        ("max_turns", True, "a whole number, found True"),
        ("penalties", "no", "true or false or keys and values, found 'no'"),
        ("moves", "abc", "a list or null, found 'abc'"),
    ],
)
@pytest.mark.parametrize("env", ["text_game", "text_gym"])
def test_values_of_another_kind_are_refused(env: str, key: str, value: Any, said: str) -> None:
    """R10: words stay words, so the environment's annotations say what a number or a switch is."""
    with pytest.raises(ConfigError, match=f"env_config.{key}: expected {said}"):
        check_environment(env, {key: value})


def test_numbers_out_of_range_are_refused_by_the_environment() -> None:
    with pytest.raises(ConfigError, match="dev_roots: expected a whole number of at least 0, found -1"):
        TextGym(Guess, tokenizer=toy_tokenizer(), dev_roots=-1)
    with pytest.raises(ConfigError, match="penalties: expected true or false or keys and values, found 'no'"):
        TextGym(Guess, tokenizer=toy_tokenizer(), penalties="no")  # type: ignore[arg-type]


def test_what_is_no_gymnasium_environment_is_refused() -> None:
    for env in ("CartPole-v77", "math:floor", "tests.toys:nothing"):
        with pytest.raises(ConfigError, match="env_config"):
            TextGym(env, tokenizer=toy_tokenizer())
