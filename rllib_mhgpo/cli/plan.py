"""``rllib plan``: what an experiment needs of memory, wire and Ray, before anything is started."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rllib_mhgpo.cli.experiments import change, load_experiments
from rllib_mhgpo.errors import ConfigError, ModelError

EXAMPLES = """
[bold]Examples[/bold]

  rllib plan tuned_examples/mhgpo_hotpot.yaml

  rllib plan tuned_examples/mhgpo_hotpot_llama31_8b.yaml --gpu-gb 80
"""
PROCESS = 0.65e9
"""What Python, torch, transformers and Ray take by themselves."""


@dataclass(frozen=True)
class Process:
    """One kind of process.

    Attributes:
        name, count: what it is and how many there are.
        gpus: that each asks Ray for.
        parts: bytes by what they are for, in its GPU's memory or, without one, in the CPU's.
        offloaded: bytes in the CPU's memory beside them.
    """

    name: str
    count: int
    gpus: float
    parts: dict[str, float]
    offloaded: float = 0.0

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.parts.values())


def plan(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A .yaml file of experiments, or a .py file.")],
    gpu_gb: Annotated[float, typer.Option(help="Memory of one GPU in GB; that of this machine's by default.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change one setting. Repeatable.")
    ] = None,
) -> None:
    """Show memory by process, what travels, and what Ray is asked for; say what does not fit."""
    from rllib_mhgpo.cli.checks import check, is_own
    from rllib_mhgpo.cli.launch import prepare

    prepare(0)
    console = Console()
    fits = True
    for name, experiment in load_experiments(path).items():
        for assignment in set_ or []:
            change(experiment, assignment)
        algorithm: Any = check(name, experiment)
        if not is_own(algorithm):
            raise ConfigError(f"plan: {name} runs {algorithm.__name__}; expected an algorithm of this package.")
        fits &= show(console, name, algorithm, experiment["config"], gpu_gb * 1e9 or gpu_memory())
    raise typer.Exit(0 if fits else 1)


def show_plan(name: str, algorithm: Any, config: Mapping[str, Any]) -> None:
    """Prints what an experiment needs on stderr."""
    from rllib_mhgpo.cli.checks import is_own

    console = Console(stderr=True)
    if not is_own(algorithm):
        return
    try:
        show(console, name, algorithm, config, gpu_memory())
    except ModelError as error:  # a model of another build trains all the same
        console.print(f"no plan of memory: {error}")


def show(console: Console, name: str, algorithm: Any, searched: Mapping[str, Any], gpu_bytes: float) -> bool:
    """Prints the plan of one experiment, of a sweep's combination that needs most; returns whether all of them fit."""
    plans = list(combinations(algorithm, searched))
    label, settings, config, found = max(
        plans, key=lambda each: sum(p.count * (p.total + p.offloaded) for p in each[3])
    )
    which = f" [{label}], the most of {len(plans)} combinations" if len(plans) > 1 else ""
    console.print(f"{name}{which}: memory of a process, GB", markup=False, soft_wrap=True)
    table = Table()
    table.add_column()
    for process in found:
        table.add_column(f"{process.name} x {process.count}", justify="right")
    for part in dict.fromkeys(part for process in found for part in process.parts):
        table.add_row(part, *(_gb(process.parts[part]) if part in process.parts else "" for process in found))
    table.add_row("all", *(_gb(process.total) for process in found), style="bold")
    if any(process.offloaded for process in found):
        table.add_row("offloaded to the CPU", *(_gb(process.offloaded) for process in found))
    table.add_row("GPUs", *(f"{process.gpus:g}" for process in found))
    console.print(table)
    for line in (*traffic(config), requested(algorithm, settings)):
        console.print(line)
    faults = {fault: each[0] for each in plans for fault in misfits(each[3], gpu_bytes)}
    for fault, where in faults.items():
        console.print("[bold red]does not fit:[/]", Text(f"{where}: {fault}" if where else fault))
    return not faults


def combinations(
    algorithm: Any, searched: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any], Any, list[Process]]]:
    """Yields each combination of a sweep: its values in words, its settings, its configuration and its processes."""
    from rllib_mhgpo.cli.checks import named_variants

    for label, settings in named_variants(_chosen(searched)):
        config = algorithm.get_default_config().update_from_dict(settings)
        config.validate()
        yield label, settings, config, list(processes(config))


def _chosen(value: Any) -> Any:
    """Makes every ``choice`` a grid: what any of its values needs counts."""
    if isinstance(value, list):
        return [_chosen(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {"grid_search" if [*value] == ["choice"] else key: _chosen(inner) for key, inner in value.items()}


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}" if size >= 1e8 else f"{size / 1e9:.3f}"


def processes(config: Any) -> Iterator[Process]:
    """Yields the processes of a run with their memory."""
    from rllib_mhgpo import footprint
    from rllib_mhgpo.llms.shape import model_shape
    from rllib_mhgpo.modules.scoring import LOGITS_AT_ONCE

    policies = [config.get_config_for_module(name) for name in config.policy_names]
    shapes = [model_shape(policy.llm, policy.lora) for policy in policies]
    deepspeed = config.deepspeed or {}
    zero = (deepspeed.get("config") or {}).get("zero_optimization", {})
    how = footprint.Sharding(
        max(1, config.num_learners), config.zero_stage, bool(config.zero_stage) and config.dtype == "bfloat16",
        bool(deepspeed.get("offload_optimizer")), bool(deepspeed.get("offload_param")),
        int(zero.get("reduce_bucket_size", footprint.REDUCE_BUCKET)),
    )  # fmt: skip
    number = footprint.BFLOAT16 if config.dtype == "bfloat16" else footprint.FLOAT32
    tokens = config.max_tokens_per_microbatch
    parts: dict[str, float] = defaultdict(float)
    for policy, shape in zip(policies, shapes, strict=True):
        copied = policy.uses_reference and policy.lora is None
        reference = {"reference": footprint.frozen_weights(shape, how)} if copied else {}
        for part, size in {**footprint.model_states(shape, how), **reference}.items():
            parts[part] += size
    largest = max(shapes, key=lambda shape: shape.parameters)  # one policy computes at a time
    trained = list(shapes)
    if hasattr(config, "critic_lr"):
        trained.append(model_shape(config.critic_llm or config.llm))
        parts["critic"] = sum(footprint.model_states(trained[-1], how).values())
    parts["activations"] = footprint.activations(largest, tokens, number, bool(config.gradient_checkpointing))
    parts["logits"] = footprint.logits(largest, min(tokens // 2, max(1, LOGITS_AT_ONCE // largest.vocabulary)))
    if how.stage:
        buckets = [footprint.reduce_bucket(shape, how) for shape in trained]
        parts["gradient bucket"] = sum(buckets) if how.stage == 3 else max(buckets)  # stage 3 keeps them
    if how.stage == 3:
        parts["layers gathered"] = footprint.gathered(largest, how)
    moved = [name for name, off in (("optimizer", how.offload_optimizer), ("weights", how.offload_param)) if off]
    offloaded = sum(parts.pop(name) for name in moved)
    if config.gradient_checkpointing == "offload":
        inputs = footprint.layer_inputs(largest, tokens, number)
        parts["activations"], offloaded = parts["activations"] - inputs, offloaded + inputs
    caches = _caches(config, largest, number)
    if config.shares_module:
        yield Process("all in one", 1, 0, {**parts, **caches, "process": PROCESS}, offloaded)
        return
    gpus = config.num_gpus_per_learner if config.num_learners else 0
    yield Process("learner", max(1, config.num_learners), gpus, parts | _process(gpus), offloaded)
    gpus = config.num_gpus_per_env_runner
    weights = float(sum(shape.parameters for shape in shapes) * number)
    yield Process("env runner", max(1, config.num_env_runners), gpus, {"weights": weights, **caches, **_process(gpus)})


def _caches(config: Any, largest: Any, number: int) -> dict[str, float]:
    """What an engine keeps of tokens: those at work and, where stop texts end responses, prompts that others extend."""
    from rllib_mhgpo import footprint
    from rllib_mhgpo.algorithms.registration import environment_class
    from rllib_mhgpo.engines.vllm import CPU_CACHE_BYTES

    name = "key-value cache"
    if config.engine == "vllm":  # on a GPU it fills what gpu_memory_utilization leaves
        given = 0 if config.num_gpus_per_env_runner else CPU_CACHE_BYTES
        return {name: float(config.engine_config.get("kv_cache_memory_bytes", given))}
    cache = footprint.key_value_cache(largest, config.engine_config.get("max_batch_tokens", 32768), number)
    return {name: cache, "kept prompts": cache} if getattr(environment_class(config.env), "stop", ()) else {name: cache}


def _process(gpus: float) -> dict[str, float]:
    return {} if gpus else {"process": PROCESS}


def traffic(config: Any) -> Iterator[str]:
    """Yields what an iteration makes and sends."""
    from rllib_mhgpo import footprint
    from rllib_mhgpo.llms.shape import model_shape

    limits, questions = config.max_response_tokens, config.questions_per_iteration
    if isinstance(limits, dict):
        each = footprint.generations(
            config.rollout_strategy, len(limits), config.group_size, tuple(config.fork_probs), config.fork_counts
        )
        said = f"{each * questions:,.0f} responses" if each == each else "responses as the strategy says"
        yield f"An iteration: {questions:,} questions, {said} of at most {max(limits.values())} tokens."
    else:
        yield f"An iteration: {questions:,} questions; name agents in max_response_tokens to see how many responses."
    if not config.shares_module:
        policies = [config.get_config_for_module(name) for name in config.policy_names]
        number = footprint.BFLOAT16 if config.dtype == "bfloat16" else footprint.FLOAT32
        shapes = [(model_shape(its.llm, its.lora), (its.lora or {}).get("send") == "merged") for its in policies]
        size = sum(shape.parameters if merged else shape.trained for shape, merged in shapes) * number / 1e9
        yield f"A weight sync: {size:.3f} GB to each of {max(1, config.num_env_runners)} runners."
    if config.engine == "vllm" and len(config.policies) > 1:
        share = "GPU memory" if config.num_gpus_per_env_runner else "key-value cache"
        yield f"A runner has {len(config.policies)} engines, one a policy, which share its {share} evenly."


def requested(algorithm: Any, settings: Mapping[str, Any]) -> str:
    """Says what Ray is asked for."""
    request = algorithm.default_resource_request(dict(settings))
    asked = request.required_resources if request else {}
    return "Ray is asked for " + ", ".join(f"{amount:g} {kind}s" for kind, amount in sorted(asked.items())) + "."


def misfits(found: list[Process], gpu_bytes: float) -> Iterator[str]:
    """Yields what is larger than the memory that is there, with what would make it smaller."""
    remedy = "a higher zero_stage, offloading, lora, gradient_checkpointing or a lower max_tokens_per_microbatch"
    for process in found:
        if process.gpus and gpu_bytes and process.total > gpu_bytes * min(1.0, process.gpus):
            yield (
                f"a {process.name} needs {process.total / 1e9:.1f} GB, a GPU has {gpu_bytes / 1e9:.1f} GB "
                f"of which it asks {min(1.0, process.gpus):g}; {remedy}."
            )
    on_cpu = sum(p.count * (p.offloaded + (0.0 if p.gpus else p.total)) for p in found)
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if on_cpu > here and not any(process.gpus for process in found):
        yield f"{on_cpu / 1e9:.1f} GB of memory in all, this machine has {here / 1e9:.1f} GB; {remedy}."


def gpu_memory() -> float:
    """Bytes of this machine's first GPU, 0 without one."""
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0.0
