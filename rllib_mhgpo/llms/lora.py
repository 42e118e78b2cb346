"""Low-rank adapters on a frozen model (LoRA, arXiv:2106.09685), through peft."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_mhgpo.errors import CheckpointError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

DEFAULTS: dict[str, Any] = {
    "rank": 16, "alpha": 32.0, "target_modules": "all-linear", "adapters": None, "send": "adapters",
}  # fmt: skip
"""Rank and scale of the adapters, which layers have one, which agents have one of their own (null: all share one).

``send``: what engines get, the ``adapters`` or, where all share one, the model's weights with it ``merged``.
"""
SHARED = "shared"
FOLDER = "adapter"


def lora_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with defaults for what is not given.

    Raises:
        ConfigError: an unknown key or a value of another kind; peft is not installed.
    """
    for key in given:
        if key not in DEFAULTS:
            hint = " Did you mean 'rank'?" if key == "r" else did_you_mean(key, DEFAULTS)
            raise ConfigError(f"config: lora: expected keys of {list(DEFAULTS)}, found {key!r}.{hint}")
    settings = {**DEFAULTS, **given}
    rank, alpha, adapters = settings["rank"], settings["alpha"], settings["adapters"]
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"config: lora.rank: expected a whole number of at least 1, found {rank!r}.")
    if not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
        raise ConfigError(f"config: lora.alpha: expected a number above 0, found {alpha!r}.")
    if adapters is not None and (not isinstance(adapters, list) or not adapters or len(set(adapters)) < len(adapters)):
        raise ConfigError(f"config: lora.adapters: expected a list of different agents or null, found {adapters!r}.")
    if settings["send"] not in ("adapters", "merged") or (settings["send"] == "merged" and adapters):
        raise ConfigError(
            f"config: lora.send: expected adapters, or merged where all agents share one; found {settings['send']!r}."
        )
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ConfigError(
            "config: lora: expected the package peft, found none; pip install 'rllib-mhgpo[lora]'."
        ) from None
    return settings


def adapter_names(settings: Mapping[str, Any]) -> list[str]:
    """The adapters' names: agents, or the one that all share."""
    return list(settings["adapters"] or [SHARED])


def add_adapters(model: "PreTrainedModel", settings: Mapping[str, Any]) -> Any:
    """Returns the model with fresh adapters, which change nothing yet, and all else frozen.

    Raises:
        ConfigError: layers that are not there, or that cannot have one.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is words.weight
    first, *others = adapter_names(settings)
    config = LoraConfig(
        r=settings["rank"], lora_alpha=settings["alpha"], lora_dropout=0.0, target_modules=settings["target_modules"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same in every process
        try:
            adapted = get_peft_model(model, config, adapter_name=first)
        except ValueError as error:
            raise ConfigError(f"config: lora.target_modules: {error}") from error
        if model.get_input_embeddings() is not words or (is_tied and model.get_output_embeddings() is not head):
            raise ConfigError(
                "config: lora.target_modules: expected no input embedding, and no head that is tied to it, since a "
                f"plain model has one table for both; found {settings['target_modules']!r}."
            )
        for name in others:
            adapted.add_adapter(name, config)
    activate(adapted, first)
    adapted.train(False)
    return adapted


def activate(model: Any, adapter: str) -> None:
    """Makes the model compute with this adapter; all stay trainable."""
    model.set_adapter(adapter)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(True)


def merging(model: Any) -> Iterator[tuple[str, "Tensor", Any]]:
    """Yields the frozen model's parameters by its own names, and beside each the layer whose adapter changes it."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            layer, is_adapted, _ = name.rpartition(".base_layer.weight")
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            yield plain, parameter, model.get_submodule(layer) if is_adapted else None


def save_adapted(
    model: "PreTrainedModel", settings: Mapping[str, Any], weights: Mapping[str, "Tensor"], folder: Path
) -> None:
    """Writes a model folder with the adapters beside it, in peft's layout.

    Args:
        model: the frozen model, fresh from its files; it is changed.
        weights: of the adapters, by name.

    One shared adapter is merged into the model's weights; agents' own are not.
    """
    adapted = _with(model, settings, weights)
    adapted.save_pretrained(folder / FOLDER, save_embedding_layers=False)  # "auto" adds the frozen head
    plain = adapted.unload() if settings["adapters"] else adapted.merge_and_unload()
    plain.save_pretrained(folder)


def load_adapters(model: "PreTrainedModel", settings: Mapping[str, Any], folder: Path) -> Any:
    """Returns the frozen model with the adapters of a folder that :func:`save_adapted` wrote."""
    return _with(model, settings, read_adapters(folder, adapter_names(settings)))


def _with(model: "PreTrainedModel", settings: Mapping[str, Any], weights: Mapping[str, "Tensor"]) -> Any:
    import torch

    adapted = add_adapters(model, settings)
    named = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            named[name].copy_(tensor)
    return adapted


def read_adapters(folder: Path, names: Sequence[str]) -> dict[str, "Tensor"]:
    """Reads what :func:`save_adapted` wrote beside a model, by the names of the model's parameters.

    Raises:
        CheckpointError: an adapter is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for adapter in names:
        file = folder / FOLDER / adapter / "adapter_model.safetensors"
        try:
            found = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: the adapter cannot be read: {error}.") from error
        for name, tensor in found.items():
            if ".lora_" not in name:  # a frozen table, which earlier versions wrote beside them
                continue
            weights[re.sub(r"\.(lora_\w+)\.weight$", rf".\1.{adapter}.weight", name)] = tensor
    return weights
