"""Arithmetic in two rounds, and the small policy that ships for it."""

from pathlib import Path

import pytest
from pettingzoo.test import api_test, seed_test

from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.cli.experiments import load_experiments
from rllib_mhgpo.envs.mini import NUMBERS, batch, build_tokenizer
from rllib_mhgpo.envs.solver_verifier import SPLITS, SolverVerifierEnv, sums
from rllib_mhgpo.envs.text_game import TextGame
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.llms import load_model, load_tokenizer

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"


def play(*texts: str, penalties: bool = True) -> SolverVerifierEnv:
    env = SolverVerifierEnv(penalties=penalties)
    env.reset(options={"index": 0})
    env.digits = (3, 4, 5)
    for text in texts:
        env.step(env.encode_text(text))
    return env


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pettingzoo_conformance() -> None:
    api_test(SolverVerifierEnv(), num_cycles=30)
    seed_test(SolverVerifierEnv, num_cycles=10)


def test_the_last_answer_pays_both() -> None:
    env = play("7", "wrong", "12")
    assert env.rewards == {"solver": 1, "verifier": 1}
    assert env.infos["solver"]["specific_reward"] == 0
    assert env.infos["solver"]["scores"] == {"acc": 1, "first": 0}
    assert play("12", "right", "7").infos["solver"]["scores"] == {"acc": 0, "first": 1}
    assert env.summary() == {"question": "3 + 4 + 5 =", "said": ["7", "wrong", "12"], "gold": "12"}


def test_each_reads_what_was_said_and_a_reply_without_form_costs() -> None:
    env = play("7")
    assert env.infos["solver"]["metrics"] == {"illegal": 0, "correct": 0}
    assert env.decode(env.observe("verifier")) == "3 + 4 + 5 = 7 ?"
    env.step(env.encode_text("12"))
    assert env.rewards == {"solver": 0, "verifier": -0.5}
    assert env.decode(env.observe("solver")) == "3 + 4 + 5 = 7 ? ? ; ="
    assert play("7", "12", penalties=False).rewards == {"solver": 0, "verifier": 0}
    assert play("7", "wrong").infos["verifier"]["metrics"] == {"illegal": 0, "correct": 1}
    assert play("12", "wrong").infos["verifier"]["metrics"] == {"illegal": 0, "correct": 0}
    with pytest.raises(ConfigError, match="true or false"):
        SolverVerifierEnv(penalties=-1)  # type: ignore[arg-type]


def test_no_sum_is_in_two_splits() -> None:
    dealt = [digits for split in SPLITS for digits in sums(split)]
    assert len(dealt) == len(set(dealt)) == 1000


def test_the_shipped_policy_has_the_vocabulary_that_its_build_gives_it() -> None:
    tokenizer = load_tokenizer("mini")
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert load_model("mini").config.vocab_size == len(tokenizer)
    game = TextGame(tokenizer=tokenizer)
    game.reset(options={"index": 0})
    for env in (game, play("7", "wrong")):
        assert tokenizer.unk_token_id not in env.observe(env.agent_selection)
    assert all(len(tokenizer.encode(number)) == 1 for number in NUMBERS)


def test_what_is_read_carries_no_loss_in_the_build() -> None:
    tokenizer = build_tokenizer()
    ids, targets = batch([("3 + 4 =", "7"), ("3 =", "3")], tokenizer)
    assert tokenizer.decode(ids[0]) == "3 + 4 = 7 <eos>"
    assert [tokenizer.decode(row[row >= 0]) for row in targets] == ["7 <eos>", "3 <eos>"]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("example", "score", "least"), [("solver_verifier", "acc", 0.2), ("tictactoe", "player_1_return", 0.1)]
)
def test_the_examples_learn(example: str, score: str, least: float) -> None:
    """Ten iterations of each; solver and verifier went from 0.15 to 0.64, tictactoe from 0.36 to 0.69."""
    (experiment,) = load_experiments(EXAMPLES / f"mhgpo_{example}.yaml").values()
    algorithm = MHGPOConfig.check({**experiment["config"], "evaluation_interval": 10}).build_algo()
    for _ in range(10):
        result = algorithm.train()
    algorithm.stop()
    assert result["dev"][score] > result["dev_start"][score] + least
