"""The default system learns: a short run of the default job, marked slow."""

from pathlib import Path

import pytest

from rllib_mhgpo.algorithms.evaluation import mean_and_error, open_system
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.cli.experiments import load_experiments
from rllib_mhgpo.envs.minipedia import questions

EXAMPLE = Path(__file__).parent.parent / "tuned_examples" / "mhgpo_hotpot.yaml"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_f1_rises_and_answers_are_read_not_remembered(tmp_path: Path) -> None:
    """Ten iterations; then, with all facts redrawn, bridge answers follow the new facts and not the old ones."""
    (experiment,) = load_experiments(EXAMPLE).values()
    config = MHGPOConfig.check({**experiment["config"], "evaluation_interval": 10, "evaluation_questions": 200})
    algorithm = config.build_algo()
    for _ in range(10):
        result = algorithm.train()
    checkpoint = algorithm.save_to_path(tmp_path / "checkpoint")
    algorithm.stop()
    assert result["dev_start"]["f1"] < 0.35
    assert result["dev"]["f1"] > result["dev_start"]["f1"] + 0.15
    system = open_system(checkpoint, {"questions": "minipedia:test?facts_seed=7", "dev_questions": None})
    records = [record for wave in system.answers("train", limit=200) for record in wave]
    changed = [
        (record, old.answers)
        for record, old in zip(records, questions("test"), strict=False)
        if old.kind == "bridge" and record["gold"] != list(old.answers)
    ]
    follows_old = sum(record["answer"] in golds for record, golds in changed) / len(changed)
    assert mean_and_error([record for record, _ in changed])["em"][0] > 10 * max(follows_old, 0.01)
