"""Memory by formula: against worked numbers, published sizes, and the plan that a user sees."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.footprint import Shape, Sharding, activations, gathered, key_value_cache, logits, model_states
from rllib_mhgpo.llms.shape import model_shape

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def test_the_published_sizes_of_models() -> None:
    """Parameters as their model cards have them: 8.03, 1.54 and 7.62 thousand millions."""
    names = (LLAMA, "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
    assert [round(model_shape(name).parameters / 1e9, 2) for name in names] == [8.03, 1.54, 7.62]
    assert model_shape("tiny").parameters == 761_216


def test_adapters_alone_have_gradients() -> None:
    shape = model_shape("tiny", {"rank": 16, "alpha": 32, "target_modules": "all-linear", "adapters": None})
    # rank 16 on four attention matrices of 128 x 128, and on gate, up and down between 128 and 256, in four layers
    assert shape.trained == 4 * 16 * (4 * (128 + 128) + 3 * (128 + 256))


def test_zero_of_eight_thousand_million_parameters_on_eight_gpus() -> None:
    """arXiv:1910.02054, section 3: 2 + 2 + 12 bytes a parameter, over 8 learners as the stage says."""
    shape = model_shape(LLAMA)
    totals = [sum(model_states(shape, Sharding(8, stage, True)).values()) / shape.parameters for stage in (1, 2, 3)]
    assert totals == pytest.approx([2 + 2 + 12 / 8, 2 + (2 + 12) / 8, 16 / 8])
    assert key_value_cache(shape, 1, 2) == 131_072  # two times 32 layers of 8 heads of 128, two bytes each


@pytest.mark.parametrize(
    ("learners", "published"), [(4, (52.5, 41.3, 30)), (16, (35.6, 21.6, 7.5)), (64, (31.4, 16.6, 1.88))]
)
def test_model_states_are_those_of_the_article_on_zero(learners: int, published: tuple[float, ...]) -> None:
    """arXiv:1910.02054, table 1: GB a GPU of 7.5 thousand million parameters at stages 1, 2 and 3."""
    shape = Shape(7_500_000_000, 7_500_000_000, 0, 0, 0, 0, 0, 0, 0)
    found = [sum(model_states(shape, Sharding(learners, stage, True)).values()) / 1e9 for stage in (1, 2, 3)]
    assert found == pytest.approx(published, rel=0.005)


def test_zero_3_is_what_deepspeeds_own_estimator_says() -> None:
    """It counts 18 bytes a parameter where the article has 16, and the largest layer, here the embeddings, twice."""
    zero3 = pytest.importorskip("deepspeed.runtime.zero.stage3", reason="DeepSpeed is not installed")
    shape, how = model_shape(LLAMA), Sharding(8, 3, True)
    largest = shape.vocabulary * shape.width
    _, theirs, _ = zero3.estimate_zero3_model_states_mem_needs(shape.parameters, largest, 8, 1, False, False)
    mine = sum(model_states(shape, how).values())
    assert mine + 2 * shape.parameters / 8 + 4 * largest == pytest.approx(theirs, rel=1e-6)
    assert mine + gathered(shape, how) == pytest.approx(theirs, rel=0.25)


def test_peak_memory_is_what_torchtitan_measured() -> None:
    """Llama-3.1-8B on 8 GPUs, from torchtitan's docs/performance.md: GiB a GPU at its peak.

    Table 2: 32,768 tokens a GPU, every layer computed again, 83.9 (FSDP 8) and 84.2 (FSDP 4, context parallel 2). Table
    1: 16,384 tokens, some operations alone computed again, 82.4. FSDP there keeps float32 weights, gradients and Adam
    states, 16 bytes a parameter as ZeRO-3 in bfloat16 does, and all logits at once. What differs: products in float8
    and torch.compile in table 2, what its allocator reserves, and of layers gathered at most two.
    """
    shape, how = model_shape(LLAMA), Sharding(8, 3, True)

    def peak(tokens: int, checkpointing: bool) -> float:
        kept = activations(shape, tokens, 2, checkpointing) + logits(shape, tokens) + gathered(shape, how)
        return (sum(model_states(shape, how).values()) + kept) / 2**30

    assert peak(32_768, checkpointing=True) == pytest.approx(83.9, rel=0.25)
    assert peak(16_384, checkpointing=True) < 82.4 < peak(16_384, checkpointing=False)


def test_activations_and_logits_grow_with_tokens_alone() -> None:
    shape = Shape(0, 0, layers=2, width=4, inner=8, heads=2, kv_heads=1, head=2, vocabulary=10)
    assert activations(shape, 3, 4, False) == 3 * 2 * (8 * 4 + 4 * 4 + 4 * 2 + 5 * 8) * 4
    assert activations(shape, 3, 4, True) == 3 * (2 * 4 + 96) * 4
    assert logits(shape, 5) == 3 * 5 * 10 * 4


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output + (result.stderr if result.exit_code else "")


def test_the_plan_of_the_default_job() -> None:
    code, shown = plan("tuned_examples/mhgpo_hotpot.yaml")
    assert code == 0
    assert "24 questions, 288 responses of at most 32 tokens" in shown
    assert "Ray is asked for 2 CPUs" in shown


def test_every_policy_has_states_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("two: {run: MHGPO, config: {llm: tiny, num_learners: 1}}")
    _, one = plan(str(file))
    _, two = plan(
        str(file), "--set", "policies={a: {}, b: {}}", "--set", "policy_mapping={rewriter: a, reranker: a, answerer: b}"
    )

    def synced(shown: str) -> float:
        return float(re.search(r"A weight sync: ([\d.]+) GB", shown).group(1))  # type: ignore[union-attr]

    assert synced(two) == pytest.approx(2 * synced(one), abs=1e-3)
    assert "engines" not in two


def test_the_plan_counts_the_engines_of_policies(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    agents = "policy_mapping: {rewriter: a, reranker: a, answerer: b}"
    file.write_text(f"two: {{run: MHGPO, config: {{llm: tiny, engine: vllm, policies: [a, b], {agents}}}}}")
    _, shown = plan(str(file))
    assert "A runner has 2 engines, one a policy, which share its key-value cache evenly." in " ".join(shown.split())
    assert re.search(r"key-value cache\s+│\s+│\s+1.07", shown)  # 1 GiB for both


def test_prompts_that_later_ones_extend_are_in_the_plan(tmp_path: Path) -> None:
    """Of environments with stop texts alone: 32,768 tokens of 32 layers of 8 heads of 128, keys and values, 2 bytes."""
    file = tmp_path / "large.yaml"
    file.write_text(
        f"large: {{run: GRPO, env: transcript, config: {{llm: {LLAMA}, dtype: bfloat16, num_env_runners: 1, "
        "num_gpus_per_env_runner: 1, env_config: {questions: 'minipedia:train'}}}"
    )

    def kept(*changes: str) -> list[str]:
        _, shown = plan(str(file), "--gpu-gb", "141", *(part for change in changes for part in ("--set", change)))
        return [cell for line in shown.splitlines() if "kept prompts" in line for cell in re.findall(r"[\d.]+", line)]

    assert kept() == [f"{32768 * 131_072 / 1e9:.2f}"] == ["4.29"]
    assert kept("engine_config.max_batch_tokens=8192") == ["1.07"]
    assert kept("engine=vllm") == kept("env=search", "run=MHGPO") == []


def test_offloaded_inputs_of_layers_leave_the_gpu(tmp_path: Path) -> None:
    """8,192 tokens, 32 layers, 4,096 wide, 2 bytes; and ZeRO's 500 million numbers of 2 bytes."""
    file = tmp_path / "large.yaml"
    file.write_text(
        f"large: {{run: MHGPO, config: {{llm: {LLAMA}, dtype: bfloat16, num_learners: 8, num_gpus_per_learner: 1, "
        "deepspeed: {zero_stage: 3}, env_config: {questions: 'minipedia:train'}}}"
    )

    def learner(part: str, how: str) -> float:
        _, shown = plan(str(file), "--gpu-gb", "80", "--set", f"gradient_checkpointing={how}")
        (line,) = (line for line in shown.splitlines() if part in line)
        return float(re.findall(r"[\d.]+", line)[0])

    inputs = 8192 * 32 * 4096 * 2 / 1e9
    assert learner("activations", "true") - learner("activations", "offload") == pytest.approx(inputs, abs=0.02)
    assert learner("offloaded to the CPU", "offload") == pytest.approx(inputs, abs=0.02)
    assert learner("gradient bucket", "true") == 1.0


def test_what_does_not_fit_is_said_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_text(
        "large: {run: MHGPO, config: {llm: meta-llama/Llama-3.1-8B-Instruct, dtype: bfloat16, num_learners: 8, "
        "num_gpus_per_learner: 1, num_env_runners: 8, num_gpus_per_env_runner: 1, deepspeed: {zero_stage: 1}, "
        "env_config: {questions: 'minipedia:train'}}}"
    )
    code, shown = plan(str(file), "--gpu-gb", "24")
    assert code == 1
    assert "a learner needs" in shown.replace("\n", " ")
    assert "zero_stage" in shown
    code, shown = plan(str(file), "--gpu-gb", "24", "--set", "deepspeed.zero_stage=3", "--set", "kl_beta=0",
                       "--set", "gradient_checkpointing=true", "--set", "max_tokens_per_microbatch=2048")  # fmt: skip
    assert code == 0, shown
    assert plan("tuned_examples/ppo_cartpole.py")[0] == 1


def test_of_a_sweep_the_combination_that_needs_most_is_shown(tmp_path: Path) -> None:
    """Llama beside tiny, 8,192 tokens of a forward pass beside 1,024; also where they are only drawn from."""
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"sweep: {{run: MHGPO, config: {{llm: {{grid_search: [tiny, {LLAMA}]}}, num_learners: 1, "
        "lr: {uniform: [0, 1]}, max_tokens_per_microbatch: {choice: [1024, 8192]}, num_gpus_per_learner: 1, "
        "env_config: {questions: 'minipedia:train'}}}"
    )
    code, shown = plan(str(file), "--gpu-gb", "80")
    heading = shown.splitlines()[0]
    assert heading.startswith("sweep [")
    assert f"llm={LLAMA}" in heading
    assert "max_tokens_per_microbatch=8192" in heading
    assert heading.endswith("], the most of 4 combinations: memory of a process, GB")
    assert code == 1
    assert shown.count("does not fit:") == 2  # with 1,024 tokens too
    code, shown = plan(str(file), "--gpu-gb", "80", "--set", "llm=tiny")
    assert code == 0, shown
