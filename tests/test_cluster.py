"""Two nodes on one machine: runners on each, one node lost in the middle of an iteration."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from rllib_mhgpo.algorithms.mhgpo import MHGPO
from tests.rig import row

Make = Callable[..., MHGPO]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def node_of(algorithm: MHGPO) -> dict[int, str]:
    pool = algorithm.pool
    calls = {
        index: actor.apply.remote(lambda _: ray.get_runtime_context().get_node_id())
        for index, actor in pool._active.items()
    }
    return {index: ray.get(call) for index, call in calls.items()}


def test_a_node_is_lost_in_the_middle_of_an_iteration(cluster: Cluster, make: Make) -> None:
    second = cluster.add_node(num_cpus=1)
    algorithm = make(num_env_runners=2, evaluation_interval=None)
    row(algorithm)
    assert len(set(node_of(algorithm).values())) == 2
    play = algorithm._training_play(1)
    deals = algorithm.pool.start(range(6), play)
    cluster.remove_node(second, allow_graceful=False)
    trees = [tree for part in algorithm.pool.finish(deals) for tree in part.trees]
    assert sorted(tree.root for tree in trees) == list(range(6))
    assert np.isfinite(row(algorithm)["grad_norm"])  # where the runner had answered in time, its loss is seen here
    assert algorithm.pool.num_replaced == 1
    cluster.add_node(num_cpus=1)
    for _, is_ready in list(algorithm.pool._joining.values()):
        ray.get(is_ready)
    row(algorithm)
    assert len(set(node_of(algorithm).values())) == 2
