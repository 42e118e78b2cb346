"""Adapters on their way into vLLM: one folder in peft's layout each, written anew at every sync.

The frozen model is never touched, so a sync moves megabytes, and agents with adapters of their own share one engine.
"""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rllib_mhgpo.llms.lora import adapter_names

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank."""


class AdapterFolders:
    """The adapters of a run as vLLM reads them; before the first weights there are none, and none are needed.

    Args:
        settings: of :func:`rllib_mhgpo.llms.lora.lora_settings`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings, self.names = settings, adapter_names(settings)
        self.place = tempfile.TemporaryDirectory(prefix="adapters_")
        self.version = 0

    def engine_settings(self) -> dict[str, Any]:
        """Returns what the engine must be told at its start."""
        rank = next(largest for largest in RANKS if largest >= self.settings["rank"])
        return {"enable_lora": True, "max_loras": len(self.names), "max_lora_rank": rank}

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Writes a new version, and removes the one before."""
        given = dict(weights)
        old, self.version = self.place, self.version + 1
        self.place = tempfile.TemporaryDirectory(prefix="adapters_")
        for name in self.names:
            ending = f".{name}.weight"
            mine = {key.removesuffix(ending) + ".weight": t for key, t in given.items() if key.endswith(ending)}
            self._write_one(Path(self.place.name) / name, mine)
        old.cleanup()

    def _write_one(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        folder.mkdir()
        modules = sorted({re.sub(r".*\.([^.]+)\.lora_\w+\.weight$", r"\1", key) for key in weights})
        config = {
            "peft_type": "LORA", "r": self.settings["rank"], "lora_alpha": self.settings["alpha"],
            "target_modules": modules, "bias": "none",
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {key: tensor.detach().to("cpu", torch.float32).contiguous() for key, tensor in weights.items()}
        save_file(tensors, folder / "adapter_model.safetensors")

    def request(self, agent: str) -> Any:
        """Returns vLLM's request for the adapter that an agent acts with, None for the bare model."""
        if not self.version:
            return None
        from vllm.lora.request import LoRARequest

        place = self.names.index(agent) if agent in self.names else 0
        name = self.names[place]
        # numbers are never used again: vLLM keeps adapters, and caches prefixes, by them
        number = self.version * len(self.names) + place
        return LoRARequest(f"{name}-{self.version}", number, str(Path(self.place.name) / name))
