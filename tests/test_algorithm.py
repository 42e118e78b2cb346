"""MHGPO as RLlib runs it: iterations, seeds, runners, checkpoints, configuration."""

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllib_mhgpo.algorithms.checkpoints import MANIFEST, POLICY
from rllib_mhgpo.algorithms.mhgpo import MHGPO, MHGPOConfig
from rllib_mhgpo.errors import CheckpointError, ConfigError, MHGPOError, ModelError
from rllib_mhgpo.tree import flatten
from tests.rig import equal, row, weights
from tests.toys import PROMPTS, save_toy, share_of_vowels

pytestmark = pytest.mark.usefixtures("ray_session")
Make = Callable[..., MHGPO]


def test_one_iteration_tells_what_it_did(make: Make) -> None:
    algorithm = make()
    before = weights(algorithm)
    result = row(algorithm)
    assert not equal(before, weights(algorithm))
    assert result["num_generations"] == 3 * 3 * 3
    assert result["num_tokens_generated"] == result["num_tokens_trained"]
    assert result["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert result["clip_fraction"] == 0
    assert result["rewriter"]["num_generations"] == 9
    for column in ("reward", "entropy", "kl", "illegal", "response_tokens"):
        assert np.isfinite(result["reranker"][column])
    assert result["dev_start"]["iteration"] == 0
    assert result["dev"] == result["dev_start"]
    second = row(algorithm)
    assert second["dev"]["iteration"] == 2
    assert second["dev_start"] == result["dev_start"]
    assert set(flat(second)) == set(flat(result))
    assert abs(second["kl"]) > 0


def flat(result: dict[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in result.items():
        if key not in ("config", "perf", "timers", "env_runners", "date", "timestamp"):
            keys += flat(value, f"{prefix}{key}/") if isinstance(value, dict) else [prefix + key]
    return keys


def test_a_seed_repeats_the_run_and_no_seed_does_not(make: Make) -> None:
    """V2 for the shared engine."""
    one, two, other, free, free_again = make(), make(), make(seed=2), make(seed=None), make(seed=None)
    trees = [algorithm.sample_trees() for algorithm in (one, two, other, free, free_again)]
    responses = [[g.response.tolist() for tree in t for g in tree.generations] for t in trees]
    assert responses[0] == responses[1]
    assert len({str(r) for r in responses}) == 4


def test_members_of_a_group_differ(make: Make) -> None:
    trees = make().sample_trees()
    for tree in trees:
        first = [tuple(g.response) for g in tree.generations if g.agent == "rewriter"]
        assert len(set(first)) == len(first) == 3


def test_credit_equals_grpo_where_there_are_no_penalties(make: Make) -> None:
    """Identities 1 and 3: every agent of a trajectory has the trajectory's GRPO advantage."""
    algorithm = make(penalties=False)
    trees = algorithm.sample_trees()
    all_generations = flatten(trees, algorithm.agents)
    advantage = algorithm.assign_credit(all_generations)["advantage"].reshape(3, 3, 3)
    for tree, question in zip(trees, advantage, strict=True):
        answers = [tree.generations[leaf] for leaf in tree.leaves()]
        rewards = np.array([g.shared.get("team", 0.0) for g in answers])
        grpo = np.zeros(3) if len(set(rewards)) == 1 else (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for agent in question:
            assert agent == pytest.approx(grpo)


def test_remote_runners_sample_what_the_local_one_does(make: Make) -> None:
    """Two runners: the same responses as one process gives, new weights after an update, one module each."""
    local, remote = make(evaluation_interval=None), make(num_env_runners=2, evaluation_interval=None)
    for _ in range(2):
        responses = [
            [g.response.tolist() for tree in a.sample_trees() for g in tree.generations] for a in (local, remote)
        ]
        assert responses[0] == responses[1]
        for algorithm in (local, remote):
            row(algorithm)
    # batches of other shapes round differently, and Adam makes full steps of gradients that are next to nothing
    apart = np.concatenate([np.abs(weights(local)[n] - weights(remote)[n]).ravel() for n in weights(local)])
    assert (apart < 1e-4).mean() > 0.99


def test_a_checkpoint_restores_with_another_number_of_runners(make: Make, tmp_path: Path) -> None:
    """R6: same weights everywhere, same answers, iteration and optimiser state kept, and the run goes on exactly."""
    first = make()
    for _ in range(3):
        row(first)
    path = first.save_to_path(tmp_path / "checkpoint")
    second = make(num_env_runners=1, seed=99)
    second.restore_from_path(path)
    assert second.iteration == 3
    assert equal(weights(first), weights(second))
    optimisers = [a.learner_group.get_state()["learner"]["optimizer"] for a in (first, second)]
    moments = [o["default_policy_default_optimizer"]["state"]["state"][0]["exp_avg"] for o in optimisers]
    assert np.array_equal(*moments)
    assert first.evaluate() == second.evaluate()
    for iteration in (4, 5, 6):
        results = [row(first), row(second)]
        assert results[0]["training_iteration"] == results[1]["training_iteration"] == iteration
    assert equal(weights(first), weights(second))


def test_from_checkpoint_builds_the_algorithm(make: Make, tmp_path: Path) -> None:
    first = make()
    row(first)
    second = MHGPO.from_checkpoint(first.save_to_path(tmp_path / "checkpoint"))
    assert equal(weights(first), weights(second))
    second.stop()


def test_the_policy_folder_is_a_plain_hugging_face_folder(make: Make, tmp_path: Path) -> None:
    algorithm = make()
    row(algorithm)
    folder = Path(algorithm.save_to_path(tmp_path / "checkpoint")) / POLICY
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert all(torch.equal(p, torch.from_numpy(weights(algorithm)[n])) for n, p in model.named_parameters())
    assert tokenizer.eos_token == "<eos>"
    assert not list(folder.glob("*.bin"))
    metadata = json.loads((tmp_path / "checkpoint" / "rllib_checkpoint.json").read_text())
    assert metadata["algorithm"] == "MHGPO"


def test_a_checkpoint_without_weights_is_refused(make: Make, tmp_path: Path) -> None:
    algorithm = make()
    path = Path(algorithm.save_to_path(tmp_path / "checkpoint"))
    (path / MANIFEST).unlink()  # as in a checkpoint that a user has put together
    for file in (path / POLICY).glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        algorithm.restore_from_path(path)
    for file in (path / POLICY).glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        algorithm.restore_from_path(path)


def test_a_file_in_the_way_of_a_checkpoint_is_kept(make: Make, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="kept as it is"):
        make().save_to_path(tmp_path / "notes")
    with pytest.raises(CheckpointError, match="kept as it is"):
        make().save_to_path(tmp_path)
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_checkpoint_is_whole_or_absent(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make()
    path = tmp_path / "checkpoint"
    algorithm.save_to_path(path)
    before = sorted(p.relative_to(path) for p in path.rglob("*"))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(algorithm.env_runner.module.llm, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="No space left"):
        algorithm.save_to_path(path)
    assert sorted(p.relative_to(path) for p in path.rglob("*")) == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("learners", [0, 2])
def test_a_full_disk_leaves_no_half_checkpoint(make: Make, tmp_path: Path, learners: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        algorithm = make(num_learners=learners, num_cpus_per_learner=0.5, evaluation_interval=None)
        with pytest.raises(CheckpointError):
            algorithm.save_to_path(disk / "checkpoint")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


calls = 0


def sometimes_nan(answer: str, golds: Any) -> float:
    global calls
    calls += 1
    return float("nan") if calls % 9 == 2 else share_of_vowels(answer, golds)


def test_a_reward_that_is_no_number_voids_its_rollout_and_nothing_else(make: Make, toy_questions_file: Path) -> None:
    """R8: counted, left out, weights stay finite."""
    env_config = {"questions": str(toy_questions_file), "dev_questions": None, "prompts": PROMPTS}
    algorithm = make(env_config={**env_config, "reward": "tests.test_algorithm:sometimes_nan"})
    for _ in range(2):
        result = row(algorithm)
        assert result["num_voided"] == 1
        assert result["num_generations"] == 3 * 8
    assert all(np.isfinite(w).all() for w in weights(algorithm).values())
    assert np.isnan(result["dev"]["f1"])


def always_nan(answer: str, golds: Any) -> float:
    return float("nan")


def test_a_run_whose_rollouts_are_all_void_stops_with_the_reason(make: Make, toy_questions_file: Path) -> None:
    env_config = {"questions": str(toy_questions_file), "dev_questions": None, "prompts": PROMPTS}
    algorithm = make(env_config={**env_config, "reward": "tests.test_algorithm:always_nan"})
    with pytest.raises(MHGPOError, match=r"every rollout was voided.*agent 'answerer'"):
        row(algorithm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_sise": 4}, "unknown key 'group_sise'. Did you mean 'group_size'"),
        ({"group_size": 1}, "group_size.*greater than or equal to 2; found 1"),
        ({"group_size": 0}, "group_size"),
        ({"rollout_strategy": "foff"}, "rollout_strategy.*Did you mean 'fof'"),
        ({"rollout_strategy": "rr", "fork_probs": [0.5, 0.1, 0.1]}, "fork_probs: expected a sum of 1, found 0.7"),
        ({"rollout_strategy": "rr", "fork_probs": [1.5, -0.5, 0]}, "fork_probs: expected no number below 0"),
        ({"rollout_strategy": "fork_counts"}, "fork_counts.*found None"),
        ({"rollout_strategy": "fork_counts", "fork_counts": [1, 1, 1]}, "one of them at least 2"),
        ({"group_key": "tests.toys:nothing"}, "group_key.*cannot be imported"),
        ({"engine": "tgi"}, "engine"),
        ({"dtype": "float16"}, "dtype"),
        ({"temperature": 0}, "temperature"),
        ({"num_learners": -1}, "num_learners"),
        ({"train_batch_size": 4000}, "no effect on MHGPO"),
        ({"minibatch_questions": 25}, "minibatch_questions"),
        ({"lr": "fast"}, "lr.*found 'fast'"),
        ({"bogus": 1}, "unknown key 'bogus'"),
        ({"grad_clip": -1}, "grad_clip.*found -1"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"evaluation_interval": "x"}, "evaluation_interval"),
        ({"env_config": None}, "env_config: expected keys and values"),
        ({"max_response_tokens": {"answerer": 0}}, "max_response_tokens.*greater than or equal to 1"),
        ({"max_response_tokens": {}}, "max_response_tokens"),
        ({"max_response_tokens": True}, "max_response_tokens"),
        ({"lr": float("inf")}, "lr.*found inf"),
        ({"kl_beta": float("inf")}, "kl_beta.*finite"),
        ({"temperature": float("inf")}, "temperature.*finite"),
        ({"penalties": {"rewriter": float("-inf")}}, "penalties.*finite"),
        ({"kl_estimator": "k1"}, "kl_estimator: k1 in the loss.*k2 or k3"),
        (
            {"overlong_penalty_tokens": 65},
            "overlong_penalty_tokens: expected at most max_response_tokens = 64, found 65",
        ),
        (
            {"overlong_penalty_tokens": 9, "max_response_tokens": {"rewriter": 8, "reranker": 9, "answerer": 9}},
            "overlong_penalty_tokens: expected at most max_response_tokens = 8, found 9",
        ),
        ({"group_key": "os:sep"}, "group_key: expected a class or a function"),
        ({"rollout_strategy": "os:sep"}, "rollout_strategy: expected a class or a function"),
        ({"env": "os:path"}, "env: expected a class, found 'os:path', a module"),
        ({"env_config": {"questons": "x"}}, "env_config.*questons.*Did you mean 'questions'"),
        ({"env_config": {"questions": 5}}, r"env_config\.questions.*found 5"),
        ({"env_config": {"corpus": 5}}, r"env_config\.corpus.*found 5"),
        ({"env_config": {"questions": "minipedia:tarin"}}, "Did you mean 'train'"),
        ({"env_config": {"retriever": None}}, r"env_config\.retriever.*found None"),
        ({"env_config": {"prompts": 3}}, r"env_config\.prompts.*found 3"),
        ({"env_config": {"prompts": {"answerer": None}}}, r"env_config\.prompts\.answerer.*found None"),
        ({"env_config": {"reward": 1}}, "reward.*found 1"),
    ],
)
def test_bad_configuration_is_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MHGPOConfig.check(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions_per_iteration": 9}, "at most the 8 questions"),
        ({"max_response_tokens": {"rewriter": 3}}, r"no number for \['reranker', 'answerer'\]"),
        (
            {"max_response_tokens": {"rewriter": 3, "reranker": 3, "answerer": 3, "riter": 3}},
            r"max_response_tokens: no agents \['riter'\]",
        ),
        ({"rollout_strategy": "rr", "fork_probs": [0.5, 0.5]}, "fork_probs: expected 3 numbers"),
        ({"rollout_strategy": "fork_counts", "fork_counts": [2, 1]}, "fork_counts: expected 3 numbers"),
        ({"train_agents": ["rewritter"]}, "train_agents: expected some of.*rewritter"),
        ({"env": "serch"}, "serch.*Did you mean 'search'"),
        ({"max_prompt_tokens": 2000}, "1024"),
    ],
)
def test_what_only_the_environment_knows_is_refused_when_it_is_built(
    make: Make, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_unknown_environment_keys_are_refused(make: Make, toy_questions_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"env_config.*questons.*Did you mean 'questions'"):
        make(env_config={"questons": str(toy_questions_file)})


def test_response_limits_by_agent(make: Make) -> None:
    algorithm = make(max_response_tokens={"rewriter": 2, "reranker": 3, "answerer": 4})
    trees = algorithm.sample_trees()
    longest = {a: max(len(g.response) for t in trees for g in t.generations if g.agent == a) for a in algorithm.agents}
    assert longest == {"rewriter": 2, "reranker": 3, "answerer": 4}


def test_a_response_limit_is_lowered_to_what_the_model_has_room_for(make: Make, tmp_path: Path) -> None:
    """V4: context 64, prompt 14, limit 60: lowered to 50, not refused; longest prompt and a limit of 100 left alone."""
    for limits in ({"max_prompt_tokens": 60, "max_response_tokens": 60}, {"max_response_tokens": 100}):
        algorithm = make(llm=str(with_context(save_toy(tmp_path / "short"), 64)), evaluation_interval=None, **limits)
        trees = algorithm.sample_trees()
        sizes = [len(g.prompt) + len(g.response) for tree in trees for g in tree.generations]
        assert max(sizes) == 64


def with_context(folder: Path, tokens: int) -> Path:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": tokens}))
    return folder


def test_passages_leave_responses_their_room(make: Make) -> None:
    """Context 1024: a response of 64 tokens, and of no more than half of it, is not lowered for a passage."""
    for response, room in ((64, 960), (1010, 512)):
        env = make(max_response_tokens=response).env_runner.env
        assert (env.longest_prompt, env.max_prompt_tokens) == (1023, room)
        assert env.observation_space("rewriter").contains(np.zeros(1023, np.int32))
    env = make(max_prompt_tokens=1000).env_runner.env
    assert (env.longest_prompt, env.max_prompt_tokens) == (1000, 1000)


def test_a_model_beside_the_policy_needs_as_long_a_context(make: Make, tmp_path: Path, toy_folder: Path) -> None:
    short = str(with_context(save_toy(tmp_path / "short"), 200))
    said = r"opponents: .*short' has a context of 200 tokens, expected at least the {} .* max_prompt_tokens"
    with pytest.raises(ModelError, match=said.format(1024)):
        make(opponents={"reranker": short})
    with pytest.raises(ModelError, match=said.format(201)):
        make(opponents={"reranker": short}, max_prompt_tokens=195)
    make(opponents={"reranker": short}, max_prompt_tokens=194)
    given = make().config.env_config
    env = make(opponents={"reranker": short}, env_config={**given, "max_prompt_tokens": 194}).env_runner.env
    assert (env.longest_prompt, env.max_prompt_tokens) == (194, 194)


def test_the_lr_may_be_a_schedule_as_in_rllib(make: Make) -> None:
    algorithm = make(lr=[[0, 1e-2], [27, 0.0]])
    for _ in range(2):
        row(algorithm)
    before = weights(algorithm)
    row(algorithm)
    assert equal(before, weights(algorithm))


def test_bfloat16_runs_under_autocast_with_float32_weights(make: Make) -> None:
    """Engine and learner round differently: the ratio of a fresh sample is 1 up to bfloat16's 8 bits."""
    algorithm = make(dtype="bfloat16", evaluation_interval=None)
    result = row(algorithm)
    assert result["ratio_mean"] == pytest.approx(1, abs=0.05)
    assert 0 < result["engine_logprob_diff"] < 0.1
    assert all(w.dtype == np.float32 and np.isfinite(w).all() for w in weights(algorithm).values())


def test_the_second_iteration_is_traced_where_asked(make: Make) -> None:
    algorithm = make(profile=True)
    folder = Path(algorithm.logdir) / "profile"
    algorithm.train()
    assert not folder.exists()
    result = algorithm.train()
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {"sample", "update", "aten::mm"} <= {event.get("name") for event in events}
    table = (folder / "phases.md").read_text()
    assert f"| update | {result['time']['update_s']:.3f} |" in table
    assert f" {result['num_tokens_computed']:,} " in table


def test_a_row_says_what_the_update_computed(make: Make) -> None:
    shared, apart = make(packing="shared").train(), make(packing="off").train()
    assert shared["num_tokens_computed"] < apart["num_tokens_computed"]
    # off: all that is left out are the last tokens of responses, one each
    tokens = apart["num_generations"] * (apart["prompt_tokens"] + apart["response_tokens"])
    assert apart["shared_token_share"] == pytest.approx(apart["num_generations"] / tokens, rel=1e-6)
    assert 0 < apart["shared_token_share"] < shared["shared_token_share"] < 1
    assert all(0 <= row["padding_share"] < 1 and row["mfu"] > 0 for row in (shared, apart))
