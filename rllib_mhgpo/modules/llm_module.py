"""Any causal language model of transformers as an RLModule.

The module knows tokens and log-probabilities; sampling belongs to engines, losses to algorithms. Its checkpoint folder
is also a plain Hugging Face model folder.
"""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.numpy import convert_to_numpy
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rllib_mhgpo.errors import CheckpointError
from rllib_mhgpo.llms import eos_ids, load_model, load_tokenizer
from rllib_mhgpo.losses import token_logprobs

WEIGHTS = "*.safetensors"


class LLMRLModule(TorchRLModule):
    """One language model; ``model_config`` holds ``llm``, ``dtype`` and ``temperature``.

    Weights are float32; ``dtype: bfloat16`` runs forward passes under autocast. Dropout is off in training too, since
    otherwise a fresh sample's ratio would not be 1.

    Attributes:
        llm: the transformers model.
        tokenizer: its tokenizer.
        eos_ids: ids that end a response.
    """

    def setup(self) -> None:
        """Loads model and tokenizer."""
        name = self.model_config["llm"]
        self.tokenizer = load_tokenizer(name)
        self.llm = load_model(name)
        self.eos_ids = eos_ids(self.llm, self.tokenizer)
        self.dtype = getattr(torch, self.model_config.get("dtype", "float32"))
        self.temperature = float(self.model_config.get("temperature", 1.0))

    def train(self, mode: bool = True) -> "LLMRLModule":
        """Keeps the language model in evaluation mode."""
        super().train(mode)
        self.llm.eval()
        return self

    def _forward(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        """Next-token logits of prompts: ``obs`` (B, P) ids without padding -> ``action_dist_inputs`` (B, V)."""
        with self.precision():
            logits = self.llm(input_ids=batch[Columns.OBS], logits_to_keep=1).logits[:, -1]
        return {Columns.ACTION_DIST_INPUTS: logits / self.temperature}

    def _forward_train(self, batch: Mapping[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        """Log-probabilities of responses; the head runs on response positions only.

        Args:
            batch: a :class:`rllib_mhgpo.packing.Rectangle` as tensors, by its fields; ``entropy_grad`` keeps the
                gradient of the entropy.

        Returns:
            ``logp`` and ``entropy``, (B, R); columns past a response's end are meaningless.
        """
        return response_logprobs(self.llm, batch, self.temperature, self.precision())

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which forward passes run."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.llm.device.type, dtype=self.dtype)

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the weights by name, tied ones once."""
        return dict(convert_to_numpy(self._once()))

    def _once(self) -> dict[str, Tensor]:
        names = {name for name, _ in self.llm.named_parameters()} | {name for name, _ in self.llm.named_buffers()}
        return {name: tensor for name, tensor in self.llm.state_dict().items() if name in names}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes the weights of :meth:`get_state`; a state of another architecture is refused."""
        if not state:
            return
        mine, given = set(self._once()), set(state)
        if mine != given:
            raise CheckpointError(
                f"weights do not fit the model {self.model_config['llm']!r}: missing {sorted(mine - given)[:3]}, "
                f"unexpected {sorted(given - mine)[:3]}."
            )
        with torch.no_grad():
            for name, target in self._once().items():
                # arrays from Ray's object store are read-only, which from_numpy warns about
                target.copy_(torch.from_numpy(np.require(state[name], requirements="W")))

    def save_to_path(self, path: str | Path | None = None, *, state: Any = None, **kwargs: Any) -> str:
        """Writes RLlib's small files and a Hugging Face folder (safetensors, tokenizer) beside them."""
        folder = Path(super().save_to_path(path, state={"weights": WEIGHTS}, **kwargs))
        self.llm.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return str(folder)

    def restore_from_path(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Takes the weights of a folder written by :meth:`save_to_path`."""
        files = sorted(Path(path).glob(WEIGHTS))
        if not files:
            raise CheckpointError(f"{path}: expected weights ({WEIGHTS}), found none; the checkpoint is incomplete.")
        try:
            self.set_state({name: tensor for file in files for name, tensor in load_file(file).items()})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: the weights cannot be read: {error}.") from error


def response_logprobs(
    llm: torch.nn.Module,
    batch: Mapping[str, Tensor],
    temperature: float,
    precision: contextlib.AbstractContextManager[Any],
) -> dict[str, Tensor]:
    """See :meth:`LLMRLModule._forward_train`."""
    tokens, width = batch["tokens"], int(batch["prompt_width"])
    keep = torch.arange(width - 1, tokens.shape[1] - 1, device=tokens.device)
    with precision:
        logits = llm(
            input_ids=tokens,
            attention_mask=batch["attention"],
            position_ids=batch["positions"],
            logits_to_keep=keep,
            use_cache=False,
        ).logits
    logp, entropy = token_logprobs(logits, tokens[:, width:], temperature, bool(batch.get("entropy_grad", False)))
    return {"logp": logp, "entropy": entropy}
