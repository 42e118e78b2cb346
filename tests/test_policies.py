"""Policies of their own in whole runs: weights, adapters, learning rates apart; groups and credit as before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.policy.policy import PolicySpec
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rllib_mhgpo.algorithms.checkpoints import MODULES
from rllib_mhgpo.algorithms.evaluation import open_system
from rllib_mhgpo.algorithms.llm_algorithm import LLMAlgorithm
from rllib_mhgpo.algorithms.mappo import MAPPOConfig
from rllib_mhgpo.algorithms.mhgpo import MHGPO, MHGPOConfig
from rllib_mhgpo.errors import CheckpointError, ConfigError
from tests.rig import row
from tests.toys import save_toy

pytestmark = pytest.mark.usefixtures("ray_session")
Make = Callable[..., MHGPO]
Arrays = dict[str, np.ndarray]
AGENTS = ["rewriter", "reranker", "answerer"]
TWO: dict[str, Any] = {
    "policies": ["finder", "answerer"],
    "policy_mapping": {"rewriter": "finder", "reranker": "finder", "answerer": "answerer"},
}
SMALL = {"num_cpus_for_main_process": 0.1, "num_cpus_per_learner": 0.1, "num_cpus_per_env_runner": 0.1}
SAME_AS_SHARED = ("reward", "advantage_std", "entropy", "ratio_max", "num_tokens_trained", "num_generations", "kl")


def weights(algorithm: LLMAlgorithm) -> dict[str, Arrays]:
    """Of every module, by name."""
    state = algorithm.learner_group.get_state(components="learner/rl_module")["learner"]["rl_module"]
    return {
        module: {name: np.array(values) for name, values in arrays.items()}
        for module, arrays in state.items()
        if arrays and isinstance(arrays, dict) and not module.startswith("_")
    }


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("config_class", [MHGPOConfig, MAPPOConfig])
def test_policies_that_begin_alike_and_do_not_learn_are_the_shared_run(make: Make, config_class: Any) -> None:
    """The same trees, groups, credit and columns, whoever follows which policy."""
    shared, apart = (make(lr=0.0, config_class=config_class, **how) for how in ({}, TWO))
    for _ in range(2):
        one, other = row(shared), row(apart)
        for name in SAME_AS_SHARED:
            assert other[name] == pytest.approx(one[name], rel=1e-5, nan_ok=True), name
        for agent in AGENTS:
            assert other[agent]["reward"] == one[agent]["reward"]
            assert other["policies"]["finder"]["num_generations"] == 2 * one["answerer"]["num_generations"]
    assert other["dev"] == one["dev"]
    assert "policies" not in one


def test_policies_learn_apart_and_their_columns_say_so(make: Make) -> None:
    algorithm = make(**{**TWO, "policies": {"finder": {"lr": 0.0}, "answerer": {}}})
    before = weights(algorithm)
    result = row(algorithm)
    after = weights(algorithm)
    assert set(after) == {"finder", "answerer"}
    assert same(before["finder"], after["finder"])
    assert not same(before["answerer"], after["answerer"])
    assert result["policies"]["answerer"]["grad_norm"] > 0
    assert result["policies"]["answerer"]["reward"] == result["answerer"]["reward"]
    assert set(result["policies"]["finder"]) == set(result["policies"]["answerer"])


def test_every_policys_own_first_step_says_how_far_its_engine_is(make: Make) -> None:
    """Three questions, each a step of every role in turn: only what was measured before a policy moved counts."""
    algorithm = make(**TWO, sequential_updates=True, minibatch_questions=1)
    sample = algorithm.sample_trees
    apart = {"rewriter": 0.25, "reranker": 0.25, "answerer": 0.5}

    def from_other_engines() -> Any:
        trees = sample()
        for tree in trees:
            for act in tree.generations:
                act.logprobs = act.logprobs - np.float32(apart[act.agent])
        return trees

    algorithm.sample_trees = from_other_engines  # type: ignore[method-assign]
    result = row(algorithm)
    finder, answerer = result["policies"]["finder"], result["policies"]["answerer"]
    for number in ("engine_logprob_diff", "engine_logprob_diff_max"):
        assert (finder[number], answerer[number]) == pytest.approx((0.25, 0.5), abs=1e-4)
    assert answerer["engine_kl"] == pytest.approx(np.exp(0.5) - 0.5 - 1, abs=1e-4)  # k3
    assert 0.26 < result["engine_logprob_diff"] < 0.49
    assert result["engine_logprob_diff_max"] == pytest.approx(0.5, abs=1e-4)
    assert result["answerer"]["engine_logprob_diff"] == answerer["engine_logprob_diff"]


def test_training_one_role_leaves_the_policy_of_the_others_alone(make: Make) -> None:
    algorithm = make(**TWO, train_agents=["reranker"], kl_beta=0.0)
    before = weights(algorithm)
    row(algorithm)
    after = weights(algorithm)
    assert same(before["answerer"], after["answerer"])
    assert not same(before["finder"], after["finder"])


@pytest.mark.parametrize(
    "changes",
    [{"reference_refresh": 2}, {"sequential_updates": True, "lora": {"rank": 2}, "kl_in_reward": True}],
    ids=["moving reference", "adapters in turn"],
)
def test_three_iterations_and_three_after_a_restore_are_six(make: Make, tmp_path: Path, changes: Any) -> None:
    whole, first = (make(**TWO, **changes) for _ in range(2))
    for _ in range(6):
        expected = row(whole)
    for _ in range(3):
        row(first)
    second = make(**TWO, **changes)
    second.restore_from_path(first.save_to_path(tmp_path / "checkpoint"))
    for _ in range(3):
        result = row(second)
    for name, arrays in weights(whole).items():
        assert same(arrays, weights(second)[name]), name
    assert result["reward"] == expected["reward"]
    assert result["dev"] == expected["dev"]
    assert not all(same(arrays, weights(first)[name]) for name, arrays in weights(whole).items())


def test_remote_runners_and_learners_make_the_same_run(make: Make) -> None:
    near = make(**TWO)
    far = make(**TWO, num_env_runners=1, num_learners=2, **SMALL)
    one, other = row(near), row(far)
    assert other["reward"] == pytest.approx(one["reward"])
    assert other["sync_logprob_diff"] < 1e-3
    assert other["sync_mb"] == pytest.approx(2 * sum(array.nbytes for array in weights(near)["finder"].values()) / 1e6)
    for name, arrays in weights(near).items():
        for key, array in weights(far)[name].items():
            assert array == pytest.approx(arrays[key], abs=2e-4), (name, key)


@pytest.mark.slow
def test_sharded_policies_train_as_whole_ones_do(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="ZeRO needs the package deepspeed")
    plain, sharded = make(**TWO), make(**TWO, num_learners=2, deepspeed={"zero_stage": 3}, **SMALL)
    for _ in range(2):
        one, other = row(plain), row(sharded)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    path = sharded.save_to_path(tmp_path / "checkpoint")
    for name, arrays in weights(plain).items():
        its = load_file(Path(path) / MODULES / name / "model.safetensors")
        for key in its:
            assert its[key].numpy() == pytest.approx(arrays[key], abs=1e-4), (name, key)


def test_a_checkpoint_answers_as_the_run_did_and_every_policy_is_a_model_folder(
    make: Make, tmp_path: Path, toy_folder: Path
) -> None:
    algorithm = make(**TWO)
    for _ in range(2):
        row(algorithm)
    expected = algorithm.evaluate()
    path = Path(algorithm.save_to_path(tmp_path / "checkpoint"))
    system = open_system(path, {})
    records = [record for wave in system.answers("dev") for record in wave]
    assert np.mean([record["scores"]["f1"] for record in records]) == pytest.approx(expected["f1"])
    for name, arrays in weights(algorithm).items():
        model = AutoModelForCausalLM.from_pretrained(path / MODULES / name)
        assert all(np.array_equal(model.state_dict()[key].numpy(), arrays[key]) for key in arrays)
    players = {agent: system.player(str(path), agent) for agent in AGENTS}
    assert players["rewriter"] is players["reranker"]
    again = [record for wave in system.cast(players).answers("dev") for record in wave]
    assert again == records


def test_a_policys_past_and_a_checkpoints_policy_are_opponents(make: Make, tmp_path: Path) -> None:
    first = make(**TWO)
    row(first)
    path = first.save_to_path(tmp_path / "checkpoint")
    algorithm = make(
        policies=["answerer"], policy_mapping={"reranker": "answerer", "answerer": "answerer"},
        opponents={"reranker": "past", "rewriter": str(path)}, opponent_refresh=5,
    )  # fmt: skip
    runner: Any = algorithm.env_runner
    row(algorithm)
    cast = runner.opponents.engine.others
    start = {name: tensor.numpy() for name, tensor in cast["reranker"].model.state_dict().items()}
    assert not same(start, weights(algorithm)["answerer"])
    written = load_file(Path(path) / MODULES / "finder" / "model.safetensors")
    assert all(torch.equal(cast["rewriter"].model.state_dict()[name], written[name]) for name in written)


def says_nothing(env: Any, agent: str) -> str:
    return ""


def test_an_opponent_needs_no_policy(make: Make) -> None:
    algorithm = make(
        policies=["rewriter", "answerer"], opponents={"reranker": "tests.test_policies:says_nothing"}, kl_in_reward=True
    )
    before = weights(algorithm)
    result = row(algorithm)
    assert set(result["policies"]) == {"rewriter", "answerer"}
    assert all(not same(arrays, weights(algorithm)[name]) for name, arrays in before.items())


# --- what is asked for ----------------------------------------------------------------------------------------------


def test_rllibs_own_ways_of_asking(config: Callable[..., MHGPOConfig], tmp_path: Path) -> None:
    """A list is each agent's own; PolicySpec's config and a mapping function mean what they mean in RLlib."""
    plain = config(policies=AGENTS)
    plain.validate()
    assert [plain.policy_of(agent) for agent in AGENTS] == AGENTS == plain.policy_names
    made = config().multi_agent(
        policies={"slow": PolicySpec(config={"lr": 1e-5}), "fast": PolicySpec()},
        policy_mapping_fn=lambda agent, episode, **kwargs: "slow" if agent == "answerer" else "fast",
    )
    made.validate()
    assert [made.policy_of(agent) for agent in AGENTS] == ["fast", "fast", "slow"]
    assert [made.get_config_for_module(name).lr for name in ("slow", "fast")] == [1e-5, 1e-2]
    with pytest.raises(ConfigError, match=r"\['policies_to_train'\] have no effect on MHGPO; train_agents"):
        config().multi_agent(policies_to_train=["slow"])
    algorithm = made.build_algo()
    try:
        row(algorithm)
        path = algorithm.save_to_path(tmp_path / "checkpoint")
        expected = algorithm.evaluate()["f1"]
    finally:
        algorithm.stop()
    records = [record for wave in open_system(path, {}).answers("dev") for record in wave]
    assert np.mean([record["scores"]["f1"] for record in records]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": ["a b"]}, "policies.a b: expected a name of letters"),
        ({"policies": ["critic"]}, "policies.critic: expected a name"),
        ({"policies": {"a": {"Lr": 1}}}, "a policy may have its own llm, lora, lr, found 'Lr'.*Did you mean 'lr'"),
        ({"policies": {"a": {"lr": -1}}}, "policies.a: lr: expected a number of at least 0"),
        ({"policies": {"a": {"lora": {"r": 4}}}}, "lora: expected keys of"),
        ({"policies": {"a": {"lora": {"adapters": ["x"]}}}}, "adapters of roles belong to one policy"),
        ({"policies": {"a": {"llm": "tiny"}}}, "policies.a: llm: 'tiny' has another tokenizer"),
        ({"policies": {"a": 3}}, "policies: .* found"),
        ({"policies": ["a"], "policy_mapping": {"rewriter": "b"}}, r"rewriter follows 'b', but policies has \['a'\]"),
        ({"policy_mapping": {"rewriter": "b"}}, r"rewriter follows 'b', but policies has \[\]"),
        ({"policies": {"a": {"lora": True}}}, "policies.a: lora: expected keys and values, or null, found True"),
        ({"policies": {"a": {"llm": None}}}, "policies.a: llm: expected a name or folder, found None"),
        ({"policies": {"a": {"lora": {"send": "merged"}}}}, "policies.a: lora.send: merged needs engine: vllm"),
        ({"policy_mapping_fn": str}, "policy_mapping_fn: found beside no policies"),
        ({"policies": ["a"], "policy_mapping": {"x": "a"}, "policy_mapping_fn": str}, "beside policy_mapping"),
        ({"policies": {"a": PolicySpec(policy_class=str)}}, r"policies.a: .* found \['policy_class'\]"),
        (
            {"policies": ["a", "b"], "policy_mapping": {"b": "a", "x": "b", "y": "a"}, "opponents": {"x": "past"}},
            r"policies: \['b'\] would never be trained: only the opponents \['x'\] follow them",
        ),
        (
            {**TWO, "max_response_tokens": dict.fromkeys(AGENTS, 6), "opponents": {"answerer": "past"}},
            r"policies: \['answerer'\] would never be trained: .* Take one of these agents out",
        ),
    ],
)
def test_policies_that_cannot_be_are_refused(config: Callable[..., MHGPOConfig], changes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**changes).validate()


def test_a_mapping_must_fit_the_agents(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"rewriter follows 'rewriter', but policies has \['a'\]; name the policy of"):
        make(policies=["a"])
    with pytest.raises(ConfigError, match=r"policies: no agent follows \['idle'\]"):
        make(policies=["a", "idle"], policy_mapping=dict.fromkeys(AGENTS, "a"))
    with pytest.raises(ConfigError, match=r"policies: \['finder'\] would never be trained: only the opponents"):
        make(**TWO, opponents={"rewriter": "past", "reranker": "past"})
    with pytest.raises(ConfigError, match=r"policy_mapping: no agents \['writer'\]"):
        make(policies=["a"], policy_mapping={**dict.fromkeys(AGENTS, "a"), "writer": "a"})
    turns = iter("ab" * 1000)
    with pytest.raises(ConfigError, match=r"policy_mapping_fn: names other policies for .*when asked again"):
        make(policies=["a", "b"], policy_mapping_fn=lambda agent, episode: next(turns))


def test_a_checkpoint_of_other_policies_is_refused(make: Make, tmp_path: Path) -> None:
    path = make().save_to_path(tmp_path / "checkpoint")
    with pytest.raises(
        CheckpointError, match=r"of the policies \['answerer', 'reranker', 'rewriter'\], found \['default_p"
    ):
        make(policies=AGENTS).restore_from_path(path)


def test_one_critic_reads_what_all_policies_read(config: Callable[..., Any], toy_folder: Path, tmp_path: Path) -> None:
    gpt2 = save_toy(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match=r"critic_llm: expected the policy's architecture.*gpt2.*\(answerer\)"):
        MAPPOConfig.check(
            {"llm": str(toy_folder), "policies": {"answerer": {"llm": str(gpt2)}, "finder": {}}, "env": "search"}
        )
