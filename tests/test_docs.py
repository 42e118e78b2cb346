"""What the documentation says of the code is what the code says."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllib_mhgpo.alerts import RULES, numbers_by_path
from rllib_mhgpo.algorithms.grpo import GRPOConfig
from rllib_mhgpo.algorithms.keys import annotations, describe
from rllib_mhgpo.algorithms.mappo import MAPPOConfig
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.cli.stops import COLUMNS
from rllib_mhgpo.credit import group_advantages, propagate
from rllib_mhgpo.records import SCHEMA
from rllib_mhgpo.sampling import Visit

DOCS = Path(__file__).parent.parent / "docs"


def test_every_key_is_documented_with_its_default() -> None:
    page = (DOCS / "configuration.md").read_text()
    assert describe(MHGPOConfig) in page
    assert describe(MAPPOConfig, beside=MHGPOConfig) in page
    assert annotations(GRPOConfig) == annotations(MHGPOConfig)
    only = [f"`{key}`" for key in annotations(MHGPOConfig) if key not in annotations(MAPPOConfig)]
    assert ", ".join(only) in page


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("config_class", [MHGPOConfig, MAPPOConfig])
def test_every_column_is_documented(make: Any, config_class: Any) -> None:
    page = (DOCS / "metrics.md").read_text()
    policies = {"policies": ["one"], "policy_mapping": dict.fromkeys(["rewriter", "reranker", "answerer"], "one")}
    algorithm = make(config_class=config_class, evaluation_interval=1, **policies)
    row = algorithm.train()
    own = set(numbers_by_path({**algorithm._iteration_results, "dev": row["dev"], "dev_start": row["dev_start"]}))
    assert own <= set(numbers_by_path(row))
    assert {"dev/f1", "rewriter/queries", "policies/one/grad_norm", "time/total_s", "staleness"} <= own
    missing = {path for path in own if not re.search(rf"`[^`\n]*\b{path.split('/')[-1]}`", page)}
    assert missing == set()
    assert {path for path in numbers_by_path(row) if "/" not in path} - {"pid"} <= set(COLUMNS)


QUIET = """
from rllib_mhgpo import MHGPOConfig
from rllib_mhgpo.modules import LLMRLModule

MHGPOConfig().environment("search").validate()
LLMRLModule(model_config={"llm": "mini"}, observation_space=None, action_space=None)
"""


def test_from_python_rllib_gives_no_warning_that_nobody_can_heed() -> None:
    run = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=240, check=True)
    assert "WARNING" not in run.stderr, run.stderr


def chain_edges(*parents: int) -> np.ndarray:
    return np.array([(p, child) for child, p in enumerate(parents) if p >= 0], dtype=np.int64).reshape(-1, 2)


def test_the_worked_example_of_fork_on_first() -> None:
    edges = chain_edges(-1, -1, -1, -1, *range(8))
    earned = np.zeros((12, 1))
    earned[8:, 0] = [1, 0, 0.5, 0]
    specific = np.zeros(12)
    specific[5] = -1
    reward = propagate(edges, earned)[:, 0] + specific
    values = group_advantages(reward, np.repeat([0, 1, 2], 4)).values.round(4).tolist()
    assert values[:4] == values[8:] == [1.3056, -0.7833, 0.2611, -0.7833]
    assert values[4:8] == [1.0247, -1.3175, 0.4392, -0.1464]


def test_the_worked_example_of_oversampling() -> None:
    edges = chain_edges(-1, -1, -1, -1, 0, 1, 2, 3, *np.repeat([4, 5, 6, 7], 4))
    earned = np.zeros((24, 1))
    earned[8:, 0] = [1, 1, 0, 0, 0, 0, 0, 0, 1, 0.5, 0.5, 0, 0, 0, 0, 1]
    shared = propagate(edges, earned)[:, 0]
    assert shared[:8].tolist() == [0.5, 0, 0.5, 0.25] * 2
    values = group_advantages(shared, [0] * 4 + [1] * 4 + [2] * 16).values.round(4)
    assert values[:4].tolist() == [0.7833, -1.3056, 0.7833, -0.2611]
    assert (values[8], values[10]) == (1.5536, -0.7062)


def test_what_the_algorithm_page_says_can_be_replaced_runs() -> None:
    page = (DOCS / "algorithm.md").read_text()
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, scope)
    assert scope["TwoEach"](None)(Visit(0, "a", 0, 1, 0, (), ())) == (True, True)


def test_every_column_of_the_records_and_every_alert_is_documented() -> None:
    page = (DOCS / "seeing.md").read_text()
    table = page.partition("| column |")[2].partition("## Trees")[0]
    assert set(re.findall(r"`(\w+)`(?=[^|]*\| [^|]+ \|[^|]*\|\n)", table)) == set(SCHEMA.names)
    alerts = page.partition("| alert |")[2]
    assert [rule.__name__.replace("_", " ") for rule in RULES] == re.findall(
        r"^\| ([a-z][^|]+) \|", alerts.lower(), re.M
    )
