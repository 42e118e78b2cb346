"""RLlib's callbacks fire when its users expect it, with rollout trees for episodes; what they log is a column."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_mhgpo.algorithms.guards import warn_of_silent_callbacks
from rllib_mhgpo.algorithms.mhgpo import MHGPO, MHGPOConfig
from rllib_mhgpo.tree import RolloutTree
from tests.rig import row


class Noted(RLlibCallback):
    """Writes down what was called."""

    calls: ClassVar[list[str]] = []

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        self.calls.append("init")

    def on_environment_created(self, *, env: Any, **kwargs: Any) -> None:
        self.calls.append(f"environment of {len(env.possible_agents)} agents")

    def on_sample_end(self, *, samples: list[RolloutTree], **kwargs: Any) -> None:
        self.calls.append(f"{len(samples)} trees")

    def on_episode_end(self, *, episode: Any, metrics_logger: Any = None, **kwargs: Any) -> None:
        assert isinstance(episode, RolloutTree)
        self.calls.append("episode")
        metrics_logger.log_value("generations_a_tree", len(episode.generations), reduce="mean")

    def on_evaluate_end(self, *, evaluation_metrics: dict[str, Any], **kwargs: Any) -> None:
        self.calls.append(f"evaluated {evaluation_metrics['questions']}")

    def on_train_result(self, *, result: dict[str, Any], **kwargs: Any) -> None:
        self.calls.append(f"result {result['training_iteration']}")
        result["mine"] = result["num_generations"] + 1

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        self.calls.append("loaded")


@pytest.mark.usefixtures("ray_session")
def test_callbacks_see_trees_results_and_checkpoints(make: Callable[..., MHGPO], tmp_path: Path) -> None:
    Noted.calls.clear()
    algorithm = make(callbacks_class=Noted, evaluation_interval=1)
    result = row(algorithm)
    assert Noted.calls == [
        "environment of 3 agents", "init", "evaluated 8", "3 trees", *["episode"] * 3, "evaluated 8", "result 1"
    ]  # fmt: skip
    assert result["mine"] == result["num_generations"] + 1
    assert result["env_runners"]["generations_a_tree"] == 9
    algorithm.load_checkpoint(algorithm.save_to_path(tmp_path / "checkpoint"))
    assert Noted.calls[-1] == "loaded"


def test_methods_that_never_fire_are_named(
    config: Callable[..., MHGPOConfig], caplog: pytest.LogCaptureFixture
) -> None:
    class Stepwise(Noted):
        def on_episode_step(self, **kwargs: Any) -> None:
            raise AssertionError

    warn_of_silent_callbacks(config(callbacks_class=[Noted, Stepwise]))
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "Stepwise: on_episode_step never fire"
    ]


@pytest.mark.usefixtures("ray_session")
def test_functions_are_called_too(make: Callable[..., MHGPO]) -> None:
    seen: list[int] = []
    algorithm = make(callbacks_on_episode_end=lambda *, episode, **kwargs: seen.append(episode.root))
    row(algorithm)
    assert len(set(seen)) == 3
