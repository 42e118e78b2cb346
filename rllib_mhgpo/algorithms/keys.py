"""Keys of a configuration, read off its class: annotations, defaults, and the table of docs/configuration.md.

Not what any key means. The one idea: a key is written once, as an annotated class attribute.
"""

import json
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from pydantic import ConfigDict, Field
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

USED_RLLIB_KEYS = {
    "env", "env_config", "lr", "grad_clip", "num_epochs", "seed", "callbacks", "callbacks_class", "num_env_runners",
    "num_cpus_per_env_runner", "num_gpus_per_env_runner", "custom_resources_per_env_runner", "sample_timeout_s",
    "num_learners", "num_cpus_per_learner", "num_gpus_per_learner", "custom_resources_per_learner",
    "num_cpus_for_main_process", "placement_strategy", "evaluation_interval", "log_level", "framework", "framework_str",
    "callbacks_on_algorithm_init", "callbacks_on_environment_created", "callbacks_on_sample_end",
    "callbacks_on_episode_end", "callbacks_on_train_result", "callbacks_on_evaluate_start",
    "callbacks_on_evaluate_end", "callbacks_on_checkpoint_loaded", "policy_mapping_fn", "torch_compile_learner",
    "torch_compile_learner_dynamo_backend", "torch_compile_learner_dynamo_mode",
}  # fmt: skip

Tokens = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]

FINITE = ConfigDict(allow_inf_nan=False)

RLLIB_TYPES: dict[str, Any] = {
    "env_config": dict[str, Any],
    "grad_clip": Number | None,
    "num_epochs": Tokens,
    "seed": Count | None,
    "num_env_runners": Count,
    "num_learners": Count,
    "sample_timeout_s": Number,
    "evaluation_interval": Count | None,
    "num_cpus_for_main_process": Number,
    "num_gpus_per_env_runner": Share,
    "num_gpus_per_learner": Share,
    "num_cpus_per_env_runner": Share,
    "torch_compile_learner": bool,
    "torch_compile_learner_dynamo_mode": Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ]
    | None,
}
"""What RLlib's keys must be; RLlib itself takes anything."""


def annotations(config_class: type) -> dict[str, Any]:
    """Returns the annotations of all keys of this package that a config class has, those of its bases first."""
    chain = [base for base in reversed(config_class.__mro__) if issubclass(base, AlgorithmConfig)]
    chain.remove(AlgorithmConfig)
    return {key: value for base in chain for key, value in vars(base).get("__annotations__", {}).items()}


def own_keys(config_class: type) -> dict[str, Any]:
    """Returns the defaults of all keys of this package that a config class has."""
    return {key: getattr(config_class, key) for key in annotations(config_class)}


def plain(value: Any) -> Any:
    """Returns a value with NumPy's numbers, as some search algorithms draw them, made Python's.

    >>> plain({"group_size": np.int64(8), "lr": [np.float64(0.5)]})
    {'group_size': 8, 'lr': [0.5]}
    """
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value.item() if isinstance(value, np.generic) else value


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal, of whatever kind they are."""
    try:
        return bool(value == other)
    except Exception:
        return value is other


def describe(config_class: type, beside: type | None = None) -> str:
    """Returns the keys of a config class, or those that another lacks, as a table: key, default, type, what it is."""
    known = annotations(beside) if beside else {}
    lines = ["| key | default | type | what it is |", "|---|---|---|---|"]
    for key, annotation in annotations(config_class).items():
        if key in known:
            continue
        kind, (field,) = annotation.__origin__, annotation.__metadata__
        cells = (f"`{key}`", f"`{json.dumps(getattr(config_class, key))}`", _type_name(kind), field.description)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _type_name(kind: Any) -> str:
    """A type without the bounds inside it."""
    if hasattr(kind, "__metadata__"):
        return _type_name(kind.__origin__)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(repr(value) if isinstance(value, str) else json.dumps(value) for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in inner)
    name = "null" if kind is type(None) else getattr(origin or kind, "__name__", str(kind))
    parts = ", ".join("..." if part is ... else _type_name(part) for part in inner)
    return f"{name}[{parts}]" if parts else name
