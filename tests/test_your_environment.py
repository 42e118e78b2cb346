"""The page on one's own environment: its code has forty lines at most, passes the check and trains by its commands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.registration import ENVIRONMENTS, check_environment, make_environment
from rllib_mhgpo.cli.yaml12 import parse_yaml
from tests.toys import toy_tokenizer

PAGE = (Path(__file__).parents[1] / "docs" / "your_environment.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(COMMANDS,) = re.findall(r"```\n(rllib env check.*?)```", PAGE, re.DOTALL)


def rllib(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", "from rllib_mhgpo.cli import main; main()", *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_environment_of_the_page_is_checked_and_trained_by_its_commands(tmp_path: Path) -> None:
    lines = [line for line in CODE.splitlines() if line.strip()]
    assert len(lines) <= 40
    (tmp_path / "share_out.py").write_text(CODE)
    check, train = (shlex.split(line)[1:] for line in COMMANDS.splitlines())
    said = rllib(tmp_path, *check)
    assert said.count("ok  ") == 7
    assert re.search(r"warn  all \d+ outputs of first are illegal, such as '", said)
    limited = rllib(tmp_path, *check, "--config", '{"max_response_tokens": 1}')
    assert "outputs of first are illegal" not in limited
    out = rllib(tmp_path, *train, "--storage-path", "results", "--ray-num-cpus", "2")
    before, after = re.findall(r"dev acc ([\d.]+) -> ([\d.]+), 60 iterations", out)[0]
    assert float(before) == 0.0
    assert float(after) > 0.5


def test_yaml_of_the_page_makes_environments() -> None:
    blocks = [parse_yaml(text, "page") for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    assert len(blocks) == 2
    for block in blocks:
        pytest.importorskip("pygame")
        config = block["config"]
        check_environment(block["env"], config["env_config"])
        env = make_environment(block["env"], {"tokenizer": toy_tokenizer()}, config["env_config"])
        env.reset(options={"index": 0})
        assert len(env.observe(env.agent_selection))
        assert set(config.get("opponents", {})) < set(env.possible_agents)
        assert block["env"] in ENVIRONMENTS
    assert "opponent_refresh" in LLMConfig.__annotations__
