"""Any causal language model of transformers as an RLModule.

The module knows tokens and log-probabilities; sampling belongs to engines, losses to algorithms. Its checkpoint folder
is also a plain Hugging Face model folder.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.util.debug import log_once
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from transformers.modeling_layers import GradientCheckpointingLayer

from rllib_mhgpo.errors import CheckpointError
from rllib_mhgpo.llms import eos_ids, load_model, load_tokenizer
from rllib_mhgpo.llms.lora import SHARED, activate, adapter_names, add_adapters, merging, read_adapters, save_adapted
from rllib_mhgpo.modules.scoring import head_of, is_head_last, response_logprobs, sharing_of
from rllib_mhgpo.packing import Sharing
from rllib_mhgpo.sharding import is_sharded, whole

WEIGHTS = "*.safetensors"
log_once("RLModule(config=[RLModuleConfig object])")  # RLlib makes the object that it warns of for every module, itself


class LLMRLModule(TorchRLModule):
    """One language model; ``model_config`` holds ``llm``, ``dtype``, ``temperature`` and ``attn_implementation``.

    Weights are float32; ``dtype: bfloat16`` runs forward passes under autocast. Dropout is off in training too, since
    otherwise a fresh sample's ratio would not be 1.

    With ``lora`` in ``model_config`` only adapters are trained, sent and restored.

    Attributes:
        llm: the transformers model, with its adapters.
        tokenizer: its tokenizer.
        eos_ids: ids that end a response.
        forward_through: what runs the model when it is trained: DeepSpeed's engine, which counts micro-batches there.
        in_pieces: whether the head's logits can be scored a piece at a time; see :meth:`sharing`.
    """

    forward_through: Callable[..., Any] | None = None
    in_pieces: bool = True

    def setup(self) -> None:
        """Loads model and tokenizer."""
        name = self.model_config["llm"]
        self.tokenizer = load_tokenizer(name)
        self.llm = load_model(name, attention=self.model_config.get("attn_implementation"))
        self.eos_ids = eos_ids(self.llm, self.tokenizer)
        self.lora = self.model_config.get("lora")
        if self.lora is not None:
            self.llm = add_adapters(self.llm, self.lora)
        self.dtype = getattr(torch, self.model_config.get("dtype", "float32"))
        self.temperature = float(self.model_config.get("temperature", 1.0))
        self.gathered: dict[str, NDArray[Any]] = {}
        self.recomputed: list[torch.nn.Module] = []

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

    def _forward_train(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        """Log-probabilities of responses; the head runs before response tokens only.

        Args:
            batch: a :class:`rllib_mhgpo.packing.Layout` as tensors, by its fields; ``entropy_grad`` keeps the
                gradient of the entropy.

        Returns:
            ``logp`` and ``entropy``, (b, R), 0 past a response's end.
        """
        with self.recomputing():
            logp, entropy = self.logprobs(self.llm, batch, self.forward_through)
        return {"logp": logp, "entropy": entropy}

    def logprobs(
        self, llm: torch.nn.Module, batch: Mapping[str, Any], through: Callable[..., Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns what this model, or another of its architecture, says of responses; see ``_forward_train``."""
        with self.precision():
            return response_logprobs(
                through or llm, head_of(llm), batch, self.temperature, batch.get("entropy_grad", False), self.in_pieces
            )

    def sharing(self, mode: str) -> Sharing:
        """Finds out how responses can be scored, before the model is sharded; returns when they share rows."""
        self.in_pieces = is_head_last(self.llm)
        return sharing_of(self.llm, mode)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which forward passes run."""
        if self.dtype == torch.float32 or self.llm.dtype == self.dtype:
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
        """Returns the weights by name, tied ones once; of a sharded model what was gathered last, or nothing."""
        if is_sharded(self.llm):
            return self.gathered
        return {name: to_array(tensor) for name, tensor in self._named().items()}

    def weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yields the weights by name, tied ones once; those of a sharded model are gathered one by one, collectively.

        bfloat16 stays two bytes a number: its bits as uint16. Where an adapter is to be sent merged, they are those of
        the plain model that it makes.
        """
        if self.lora is not None and self.lora["send"] == "merged":
            yield from self._merged()
            return
        for name, tensor in self._named().items():
            with whole(tensor):
                yield name, to_array(tensor.to(self.dtype) if tensor.is_floating_point() else tensor)

    def _merged(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for name, tensor, layer in merging(self.llm):
            adapter = [] if layer is None else [p for key, p in layer.named_parameters() if "lora_" in key]
            with contextlib.ExitStack() as gathered, torch.no_grad():
                for part in (tensor, *adapter):
                    gathered.enter_context(whole(part))
                change = 0.0 if layer is None else layer.get_delta_weight(SHARED).float()
                yield name, to_array((tensor.float() + change).to(self.dtype))

    def gather(self, keep: bool) -> None:
        """Gathers the weights of a sharded model in :attr:`gathered`, where they are to be kept; collective."""
        self.gathered = {}
        for name, tensor in self._named().items() if is_sharded(self.llm) else ():
            with whole(tensor):
                if keep:
                    self.gathered[name] = to_array(tensor)

    def act_as(self, agent: str) -> None:
        """Computes with an agent's own adapter from now on, where it has one."""
        if self.lora is not None and self.lora["adapters"]:
            activate(self.llm, agent)

    def without_adapters(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the model is the frozen one."""
        context: contextlib.AbstractContextManager[Any] = self.llm.disable_adapter()
        return context

    def compile(self, compile_config: Any) -> None:
        """Compiles the layers, which are alike, one by one, where RLlib would compile whole forward passes.

        Args:
            compile_config: what ``torch_compile_learner`` and the keys beside it say.
        """
        for layer in self._layers():
            layer.compile(
                backend=compile_config.torch_dynamo_backend, mode=compile_config.torch_dynamo_mode, dynamic=True
            )

    def _layers(self) -> list[torch.nn.Module]:
        return [layer for layer in self.llm.modules() if isinstance(layer, GradientCheckpointingLayer)]

    def checkpoint_gradients(self, offload: bool = False) -> None:
        """Keeps no activations inside layers, which are computed again in the backward pass.

        Args:
            offload: keep the layers' inputs in the CPU's memory.
        """
        self.llm.gradient_checkpointing_enable({"use_reentrant": False})
        self.recomputed = self._layers()
        for layer in self.recomputed if offload else ():
            function: Any = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = _keeping_inputs_on_cpu(function)  # type: ignore[assignment]

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """The context of a forward pass with a gradient: transformers computes again what is in training mode alone.

        The layers' own flag is all that changes; what is inside them stays in evaluation mode.
        """
        layers = self.recomputed if torch.is_grad_enabled() else []
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False

    def _named(self) -> dict[str, Tensor]:
        """What is trained, sent and restored: the adapters, or all parameters and buffers, tied ones once."""
        if self.lora is not None:
            return {name: parameter for name, parameter in self.llm.named_parameters() if ".lora_" in name}
        named = {**dict(self.llm.named_parameters()), **dict(self.llm.named_buffers())}
        return {name: named[name] for name in self.llm.state_dict() if name in named}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes the weights of :meth:`get_state`; a state of another architecture is refused.

        Where the model is sharded, all learners do so together.
        """
        if not state:
            return
        mine, given = set(self._named()), set(state)
        if mine != given:
            raise CheckpointError(
                f"weights do not fit the model {self.model_config['llm']!r}: missing {sorted(mine - given)[:3]}, "
                f"unexpected {sorted(given - mine)[:3]}."
            )
        self.take_weights(state)

    def take_weights(self, weights: Mapping[str, Any]) -> None:
        """Copies some of the weights, arrays or tensors by name, into the model.

        Those of :meth:`weights` are taken too: merged ones go into the frozen model below the adapters.
        """
        named = self._named()
        if self.lora is not None and self.lora["send"] == "merged":
            named |= {name: tensor for name, tensor, _ in merging(self.llm)}
        with torch.no_grad():
            for name, given in weights.items():
                with whole(named[name], writer=0):
                    named[name].copy_(to_tensor(given))

    def save_to_path(self, path: str | Path | None = None, *, state: Any = None, **kwargs: Any) -> str:
        """Writes RLlib's small files and a Hugging Face folder (safetensors, tokenizer) beside them."""
        folder = Path(super().save_to_path(path, state={"weights": WEIGHTS}, **kwargs))
        given = {name: to_tensor(array) for name, array in self.gathered.items()}
        if self.lora is not None:
            weights = given or {name: tensor.detach() for name, tensor in self._named().items()}
            save_adapted(load_model(self.model_config["llm"]), self.lora, weights, folder)
        else:
            self.llm.save_pretrained(folder, **({"state_dict": given} if given else {}))
        self.tokenizer.save_pretrained(folder)
        return str(folder)

    def restore_from_path(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Takes the weights of a folder written by :meth:`save_to_path`."""
        if self.lora is not None:
            self.set_state(read_adapters(Path(path), adapter_names(self.lora)))
            return
        files = sorted(Path(path).glob(WEIGHTS))
        if not files:
            raise CheckpointError(f"{path}: expected weights ({WEIGHTS}), found none; the checkpoint is incomplete.")
        try:
            self.set_state({name: tensor for file in files for name, tensor in load_file(file).items()})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: the weights cannot be read: {error}.") from error


def _keeping_inputs_on_cpu(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Makes what a checkpoint saves, its inputs, be saved in the CPU's memory."""

    def run(layer: Callable[..., Any], *inputs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(layer, *inputs)

    return run


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Copies a tensor into an array, bfloat16 as its bits in uint16."""
    tensor = tensor.detach().to("cpu", copy=True)
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(given: Any) -> Tensor:
    """The tensor of an array of :func:`to_array`; a tensor is returned as it is."""
    if isinstance(given, Tensor):
        return given
    # arrays from Ray's object store are read-only, which from_numpy warns about
    tensor = torch.from_numpy(np.require(given, requirements="W"))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
