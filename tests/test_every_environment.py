"""What ``rllib env check`` says of every environment of the package: PettingZoo's own tests, forks, tokens, rewards."""

from pathlib import Path
from typing import Any

import pytest

from rllib_mhgpo.algorithms.evaluation import assemble
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.algorithms.registration import ENVIRONMENTS
from rllib_mhgpo.cli.env_checks import run_checks

SEARCHING = ("search", "parallel_search", "transcript", "search_o1")
SETTINGS: dict[str, dict[str, Any]] = {
    "solver_verifier": {"llm": "mini", "max_response_tokens": 4},
    "text_game": {"llm": "mini", "max_response_tokens": 4},
    "text_gym": {"env_config": {"env": "FrozenLake-v1", "max_turns": 4}, "max_response_tokens": 4},
    **{name: {"llm": "tiny", "max_response_tokens": 8} for name in SEARCHING},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_environment_passes_every_check(name: str, toy_folder: Path) -> None:
    config = MHGPOConfig.check({"llm": str(toy_folder), "env": name, **SETTINGS[name]})
    findings = list(run_checks(assemble(config, config.llms, config.env_config), [0]))
    assert {"PettingZoo api_test", "PettingZoo seed_test", "forks"} <= {finding.name for finding in findings}
    assert [finding for finding in findings if not finding.passed] == []
