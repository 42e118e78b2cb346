"""The env runner: owns an environment, the policy and an engine, and turns root inputs into rollout trees.

Without remote runners and learners it shares the learner's module, so that weights are never copied.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ray
import torch
from pettingzoo import AECEnv
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils import force_list
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from torch import Tensor

from rllib_mhgpo.engines import HFEngine, Placement, Probe, VLLMEngine
from rllib_mhgpo.llms import eos_ids, load_tokenizer, resolve_llm
from rllib_mhgpo.modules import LLMRLModule
from rllib_mhgpo.modules.llm_module import to_tensor
from rllib_mhgpo.sharding import cast_parameters
from rllib_mhgpo.tree import RolloutTree
from rllib_mhgpo.waves import Play, play


class Rollouts:
    """What one runner brings back.

    Attributes:
        trees: one a root, in the order asked.
        seconds: by phase: ``generate``, ``step``, those of :data:`IN_STEP`, ``total``.
        weights_seq_no: which weights sampled them.
        logged: what callbacks have logged, for RLlib's metrics.
    """

    def __init__(
        self, trees: list[RolloutTree], seconds: dict[str, float], weights_seq_no: int, logged: dict[str, Any]
    ) -> None:
        self.trees, self.seconds, self.weights_seq_no, self.logged = trees, seconds, weights_seq_no, logged


IN_STEP = ("retrieve", "encode", "search")
"""Parts of ``step`` that an environment times: retrieval in all, and in it making vectors and searching."""


@dataclass(frozen=True)
class Published:
    """Weights on their way from the learners to the runners.

    Attributes:
        refs: by policy, of dictionaries of arrays by name, in Ray's object store.
        version: number of updates that made them.
        probes: what the learners say of fixed sequences under these weights.
        transferred: they have already come another way.
    """

    refs: Mapping[str, Sequence[ray.ObjectRef]]
    version: int
    probes: Sequence[Probe] = ()
    transferred: bool = False

    def weights(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        """Yields a policy's weights by name, fetched a few layers at a time."""
        for ref in self.refs[policy]:
            for name, array in ray.get(ref).items():
                yield name, to_tensor(array)


class LLMEnvRunner(EnvRunner, Checkpointable):
    """Plays any AEC environment whose agents read and write tokens; knows no strategy."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.modules: dict[str, LLMRLModule] = {}
        self.engines: dict[str, HFEngine | VLLMEngine] = {}
        self.published: Published | None = None
        self.weights_seq_no = 0
        self.callbacks = [callback() for callback in force_list(config.callbacks_class)]
        self.make_env()
        if not config.shares_module:
            self.make_policies()

    def make_env(self) -> None:
        """Builds the environment with the policies' tokenizer."""
        self.context = self.config.context
        self.env: AECEnv = self.config.make_env(load_tokenizer(self.config.llm), self.context)
        self._call("on_environment_created", env=self.env, env_context=self.config.env_config)

    def _call(self, name: str, **given: Any) -> None:
        """Calls RLlib's callbacks of this name; in the place of an episode they are given a rollout tree."""
        functions = getattr(self.config, f"callbacks_{name}")
        given |= {"env_runner": self, "metrics_logger": self.metrics}
        make_callback(name, self.callbacks, functions, kwargs=given)

    @property
    def engine(self) -> HFEngine | VLLMEngine:
        """What samples from the policy that all agents share, or from the first of several."""
        return next(iter(self.engines.values()))

    @property
    def module(self) -> LLMRLModule | None:
        """That policy's module, where the engine has one."""
        return next(iter(self.modules.values()), None)

    def make_policies(self) -> None:
        """Builds own copies of the policies, for sampling alone: their weights have the size of ``dtype``."""
        if self.config.engine == "vllm":
            self.sample_from({name: self._vllm_engine(name) for name in self.config.policy_names})
            return
        self.share_modules({name: self._new_module(name) for name in self.config.policy_names})

    def _new_module(self, name: str, **changes: Any) -> LLMRLModule:
        """Builds a policy as it begins, with changes of its model's settings."""
        spec = self.config.get_multi_rl_module_spec(spaces=self.get_spaces()).rl_module_specs[name]
        spec.model_config = {**spec.model_config, **changes}
        module: LLMRLModule = spec.build()
        cast_parameters(module.llm, module.dtype)
        return module

    def _vllm_engine(self, name: str) -> VLLMEngine:
        its, seed = self.config.get_config_for_module(name), (self.config.seed or 0) + self.worker_index
        place = Placement(self.config.num_gpus_per_env_runner, seed, len(self.config.policy_names))
        adapters = its.lora if its.lora is not None and its.lora["send"] == "adapters" else None
        return vllm_engine(its, its.llm, place, adapters)

    def share_modules(self, modules: Mapping[str, LLMRLModule]) -> None:
        """Samples from these modules from now on."""
        self.modules = dict(modules)
        self.sample_from({name: self._engine(name, module) for name, module in modules.items()})

    def _engine(self, name: str, module: LLMRLModule) -> HFEngine:
        settings = {"tokenizer": module.tokenizer, **self.config.engine_config}
        if (self.config.get_config_for_module(name).lora or {}).get("adapters"):
            settings["act_as"] = module.act_as
        return HFEngine(module.llm, module.eos_ids, module.dtype, **settings)

    def sample_from(self, engines: Mapping[str, HFEngine | VLLMEngine]) -> None:
        """Samples the policies' responses from these engines."""
        self.engines = dict(engines)

    @cached_property
    def opponents(self) -> Any:
        """Who plays: the policies, and others in the places of some agents."""
        return self.config.cast(self.engines, self.env.possible_agents, self.context, self._present)

    def _present(self, agent: str) -> HFEngine:
        """Builds the policy that an agent follows, with the weights that its engine has now, on the CPU.

        Its adapters are fresh where the weights have them merged, so that they change nothing.
        """
        name = self.config.policy_of(agent)
        module = self._new_module(name, attn_implementation=None)  # kernels of updates may have no cache
        for weight, tensor in self.published.weights(name) if self.published else ():
            module.take_weights({weight: tensor})
        return HFEngine(module.llm, module.eos_ids, module.dtype, tokenizer=module.tokenizer)

    def rollout(self, roots: Sequence[int], how: Play) -> Rollouts:
        """Plays the roots and returns their trees."""
        assert self.engines, "the runner has no policy yet"
        engine = self.opponents.at(how.seed[-1])
        seconds: dict[str, float] = {}
        timings = getattr(self.env, "timings", {})
        before, started = dict(timings), time.perf_counter()
        trees = play(self.env, engine, roots, replace(how, context=self.context), seconds)
        for phase in IN_STEP:
            seconds[phase] = timings.get(f"{phase}_s", 0.0) - before.get(f"{phase}_s", 0.0)
        if how.split == "train":
            self._call("on_sample_end", samples=trees)
            for index, tree in enumerate(trees):
                self._call("on_episode_end", episode=tree, env_index=index, env=self.env, rl_module=self.module)
        seconds["total"] = time.perf_counter() - started
        return Rollouts(trees, seconds, self.weights_seq_no, self.metrics.reduce())

    def receive(self, published: Published) -> float:
        """Takes new weights, a few layers at a time; returns how far the engine is from the learner, a token.

        Raises:
            SyncError: too far.
        """
        self.published = published  # past policies are made of it
        for name, engine in self.engines.items():
            if isinstance(engine, VLLMEngine) and published.transferred:
                engine.settle()
            elif isinstance(engine, VLLMEngine):
                engine.load_weights(published.weights(name))
            else:
                for weight, tensor in published.weights(name):
                    self.modules[name].take_weights({weight: tensor})
        self.weights_seq_no = published.version
        return max((probe.check(self._scorer(probe)) for probe in published.probes), default=0.0)

    def _scorer(self, probe: Probe) -> HFEngine | VLLMEngine:
        return self.engines[self.config.policy_of(probe.agent)]

    def sleep(self) -> None:
        """Gives the GPU's memory to a learner that shares it, until the next weights."""
        for engine in self.engines.values():
            if isinstance(engine, VLLMEngine):
                engine.sleep()

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function with this runner; an error reaches the caller, where RLlib would end the process."""
        return func(self, *args, **kwargs)

    def num_roots(self, split: str) -> int:
        """Returns how many root inputs a split has; without a word, many train roots and no others."""
        if hasattr(self.env, "num_roots"):
            return int(self.env.num_roots(split))
        return 1_000_000 if split == "train" else 0

    def sample(self, **kwargs: Any) -> Rollouts:
        """Plays ``roots`` as ``how`` says; see :meth:`rollout`."""
        return self.rollout(kwargs["roots"], kwargs["how"])

    def get_spaces(self) -> dict[str, Any]:
        """Returns the spaces that all agents share, for every policy."""
        agent = self.env.possible_agents[0]
        spaces = (self.env.observation_space(agent), self.env.action_space(agent))
        return {INPUT_ENV_SPACES: spaces, **dict.fromkeys([DEFAULT_MODULE_ID, *self.config.policy_names], spaces)}

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns nothing but the weights' number: weights are the learner's, questions are dealt by the driver."""
        return {WEIGHTS_SEQ_NO: self.weights_seq_no}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes new weights, unless they are shared anyway."""
        if COMPONENT_RL_MODULE in state and self.modules and not self.config.shares_module:
            weights = state[COMPONENT_RL_MODULE]
            weights = ray.get(weights) if isinstance(weights, ray.ObjectRef) else weights
            for name, module in self.modules.items():
                module.set_state(weights[name])
        self.weights_seq_no = state.get(WEIGHTS_SEQ_NO, self.weights_seq_no)

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns how to build the runner again."""
        return (), {"config": self.config, "worker_index": self.worker_index, "num_workers": self.num_workers}

    def get_metrics(self) -> dict[str, Any]:
        """Returns nothing: all numbers are in the trees."""
        return {}

    def assert_healthy(self) -> None:
        """Fails when the environment is missing."""
        assert self.env is not None

    def stop(self) -> None:
        """Closes the environment."""
        self.env.close()


def vllm_engine(config: Any, llm: str, place: Placement, lora: Mapping[str, Any] | None) -> VLLMEngine:
    """Returns the engine of a configuration for a model, which may be another than the configuration's."""
    tokenizer, transfer = load_tokenizer(llm), {}
    if config.weight_sync != "store":
        transfer = {"weight_transfer_config": {"backend": config.weight_sync}}
    return VLLMEngine(
        resolve_llm(llm), eos_ids(llm, tokenizer), getattr(torch, config.dtype), config.context_of(llm), tokenizer,
        place, lora, {**config.engine_config, **transfer}, patience_s=config.sample_timeout_s,
    )  # fmt: skip
