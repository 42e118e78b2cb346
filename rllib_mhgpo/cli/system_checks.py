"""What a configuration does on this machine, tried out: prompts, engine against learner, a push of weights.

Nothing of Ray is started: environment, policy and engine are built in this process as a runner and a learner would.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rllib_mhgpo import footprint
from rllib_mhgpo.algorithms.guards import check_agents
from rllib_mhgpo.algorithms.opponents import PAST, Opponents, random_reply
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.algorithms.scale_checks import longest_sequence, prompt_limits
from rllib_mhgpo.cli.index_checks import index_checks, search_check
from rllib_mhgpo.cli.machine_checks import Finding, asked_gpus, disk, gpus, shared_memory
from rllib_mhgpo.engines import Engine, HFEngine, Placement, Probe, VLLMEngine, Written
from rllib_mhgpo.engines.probe import TOLERANCE, fixed_sequence
from rllib_mhgpo.engines.settings import RESHAPING
from rllib_mhgpo.engines.vllm import require_vllm
from rllib_mhgpo.envs.search import SearchEnv
from rllib_mhgpo.errors import ConfigError, EngineError, MHGPOError, SyncError
from rllib_mhgpo.llms import load_tokenizer
from rllib_mhgpo.llms.folders import generation_config
from rllib_mhgpo.llms.shape import model_shape
from rllib_mhgpo.modules import LLMRLModule
from rllib_mhgpo.runner import vllm_engine
from rllib_mhgpo.sampling import ONE_TRAJECTORY, STRATEGIES, Options, Strategy
from rllib_mhgpo.tree import Generation
from rllib_mhgpo.waves import Play, play

QUESTIONS, ROOTS = 50, 2
LARGE = 1_000_000_000
"""Parameters above which nothing is computed on a CPU."""
NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0, "min_p": None}
"""What transformers takes for no setting at all; its top-k of 50 is a default of its own."""


@dataclass
class Bench:
    """A system put together for trial.

    Attributes:
        config: the experiment's.
        env: its environment.
        context: most tokens of prompt and response together.
        agents: who acts.
    """

    config: Any
    env: Any
    context: int

    @property
    def agents(self) -> list[str]:
        """Who acts."""
        return list(self.env.possible_agents)

    @property
    def num_roots(self) -> int:
        """How many training roots there are; an environment that does not say has as many as one asks for."""
        return int(self.env.num_roots("train")) if hasattr(self.env, "num_roots") else 1_000_000

    def play(self, engine: Engine, count: int, strategy: Strategy = ONE_TRAJECTORY) -> list[Any]:
        """Plays the first training questions."""
        how = Play(
            strategy, self.config.temperature, self.config.max_response_tokens, (0, 0), context=self.context,
            void_errors=True, max_turns=self.config.max_turns,
        )  # fmt: skip
        return play(self.env, engine, range(min(count, self.num_roots)), how, {})


def system_checks(config: Any) -> Iterator[Finding]:
    """Yields what can be said of a configuration, in the order in which it would go wrong."""
    policies = [config.get_config_for_module(name) for name in config.policy_names]
    trained = sum(model_shape(its.llm, its.lora).trained for its in policies)
    number = footprint.BFLOAT16 if config.dtype == "bfloat16" else footprint.FLOAT32
    yield gpus(asked_gpus(config))
    yield shared_memory(0 if config.shares_module else trained * number)
    yield disk(12 * trained)
    for its, whose in _models(config):
        yield sampler(its, whose)
        if its.llm != config.llm:
            yield chat_template(its, whose, config.llm)
    yield from index_checks(config)
    try:
        bench = Bench(config, config.make_env(load_tokenizer(config.llm), config.context), config.context)
        check_agents(config, bench.agents)
    except MHGPOError as error:
        yield Finding("environment", "fail", str(error), "the message says what")
        return
    yield data(bench)
    if isinstance(bench.env.unwrapped, SearchEnv):
        yield search_check(bench.env.unwrapped)
    if config.opponents:
        yield opponents_check(bench)
    yield groups(bench)
    yield from prompts(bench)
    for its, whose in _models(config):
        yield from engine_checks(replace(bench, config=its), whose)


def opponents_check(bench: "Bench") -> Finding:
    """Lets the opponents play a question, beside a policy that is not trained."""
    config = bench.config
    players = {agent: who for agent, who in config.opponents.items() if who != PAST}
    if model_shape(config.llm).parameters > LARGE:
        return Finding("opponents", "warn", "not tried beside a model of this size", "they are built when a run starts")
    try:
        module = LLMRLModule(model_config={"llm": config.llm, "lora": None}, observation_space=None, action_space=None)
        own = HFEngine(module.llm, module.eos_ids, tokenizer=module.tokenizer)
        cast = Opponents(
            dict.fromkeys(bench.agents, own), players, config.opponent_refresh, longest_sequence(config, bench.context)
        )
        bench.play(cast.at(0), 1)
    except MHGPOError as error:
        return Finding("opponents", "fail", str(error), "the message says what")
    return Finding("opponents", "ok", ", ".join(f"{agent}: {who}" for agent, who in config.opponents.items()))


def _models(config: Any) -> Iterator[tuple[Any, str]]:
    """Yields a configuration for each model that is trained, and which policies begin with it, for a line's name."""
    beginning: dict[str, list[str]] = defaultdict(list)
    for name, llm in config.llms.items():
        beginning[llm].append(name)
    for names in beginning.values():
        yield config.get_config_for_module(names[0]), f" of {', '.join(names)}" if config.policies else ""


def sampler(config: Any, whose: str = "") -> Finding:
    """Names sampler settings that a model folder brings, and that are left aside."""
    found = generation_config(config.llm)
    settings = {key: getattr(found, key, None) for key in RESHAPING}
    left = {key: value for key, value in settings.items() if value not in (None, NEUTRAL.get(key), 0, 0.0, [], "")}
    seen = f"temperature {config.temperature:g} alone shapes samples, for engine and learner"
    if left:
        seen += f"; left aside from generation_config.json: {', '.join(f'{k} {v}' for k, v in left.items())}"
    return Finding(f"sampler{whose}", "ok", seen)


def chat_template(config: Any, whose: str, llm: str) -> Finding:
    """Compares the chat template of a policy's own model with that of ``llm``, which makes all prompts."""
    mine, usual = (load_tokenizer(name).chat_template for name in (config.llm, llm))
    if mine == usual:
        return Finding(f"chat template{whose}", "ok", f"that of llm, {llm!r}, by which all prompts are made")
    return Finding(
        f"chat template{whose}", "warn",
        f"{config.llm!r} has {'another than' if mine else 'none, unlike'} llm, {llm!r}, by which all prompts are made",
        "set llm to a model whose template this policy knows, or train it long enough to learn this one",
    )  # fmt: skip


def data(bench: Bench) -> Finding:
    """Shows the fingerprints of questions, corpus and index."""
    prints = dict(getattr(bench.env.unwrapped, "fingerprints", {}))
    seen = ", ".join(f"{name} {value}" for name, value in prints.items()) or "none: no questions or corpus of its own"
    count, wanted = bench.num_roots, bench.config.questions_per_iteration
    if count < wanted:
        remedy = f"lower questions_per_iteration to {count}, or give more questions"
        return Finding("questions and corpus", "fail", f"{count} questions, {wanted} an iteration; {seen}", remedy)
    return Finding("questions and corpus", "ok", f"{count} training questions; {seen}")


def groups(bench: Bench) -> Finding:
    """Counts what one question's groups hold."""
    sizes = _group_sizes(bench)
    seen = ", ".join(f"{agent} {size}" for agent, size in sizes.items())
    alone = [agent for agent, size in sizes.items() if size == 1]
    if alone and bench.config.rollout_strategy != "rr":
        return Finding(
            "groups", "warn", f"of one for {', '.join(alone)} ({seen} responses a question)",
            "alone of their question they are compared with other questions': another rollout_strategy",
        )  # fmt: skip
    return Finding("groups", "ok", f"responses a question: {seen}")


def _strategy(bench: Bench) -> Strategy:
    config = bench.config
    counts = None if config.fork_counts is None else tuple(config.fork_counts)
    options = Options(config.group_size, len(bench.agents), tuple(config.fork_probs), counts, seed=(0, 0))
    strategy: Strategy = import_named("rollout_strategy", config.rollout_strategy, STRATEGIES)(options)
    return strategy


def _group_sizes(bench: Bench) -> dict[str, int]:
    (tree,) = bench.play(_without_a_model(bench), 1, _strategy(bench))
    trained = [generation.agent for generation in tree.generations if generation.trained]
    return {agent: trained.count(agent) for agent in bench.agents}


def _without_a_model(bench: Bench) -> Written:
    """Plays at once: leaves things as they are where the environment tells how, else at random, else with a word."""

    def write(env: Any, agent: str) -> str:
        if hasattr(env.unwrapped, "identity"):
            with suppress(ConfigError):  # an answerer has nothing to leave as it is
                return str(env.unwrapped.identity(agent))
        return random_reply(env, agent) if hasattr(env.unwrapped, "random_reply") else "none"

    return Written(write, "doctor", bench.env.unwrapped.tokenizer)


def prompts(bench: Bench) -> Iterator[Finding]:
    """Yields how long prompts are on real questions, against their limits."""
    trees = bench.play(_without_a_model(bench), QUESTIONS)
    voids = [reason for tree in trees for reason in tree.void]
    acts: list[Generation] = [generation for tree in trees for generation in tree.generations]
    for agent in bench.agents:
        mine = [act for act in acts if act.agent == agent]
        if not mine:
            continue
        lengths = np.array([len(act.prompt) for act in mine])
        left = float(np.mean([act.metrics.get("passages_left_out", 0.0) for act in mine]))
        _, limit = prompt_limits(bench.config, bench.context)
        seen = f"median {np.median(lengths):.0f}, longest {lengths.max()} of {limit} tokens, {len(mine)} prompts"
        if left > 0:
            remedy = "raise max_prompt_tokens, or lower env_config.top_k or the length of passages"
            yield Finding(f"prompts of {agent}", "warn", f"{seen}; {left:.1f} passages a prompt left out", remedy)
        else:
            yield Finding(f"prompts of {agent}", "ok", seen)
    if voids:
        yield Finding("prompts", "warn", f"{len(voids)} of {len(trees)} rollouts voided: {voids[0]}", "see the message")


def engine_checks(bench: Bench, whose: str = "") -> Iterator[Finding]:
    """Yields the engine against the learner before, under and after other weights."""
    parameters = model_shape(bench.config.llm).parameters
    if parameters > LARGE and not torch.cuda.is_available():
        yield Finding(
            f"engine{whose}", "warn", f"not tried: {parameters / 1e9:.1f} billion parameters and no GPU",
            "run rllib doctor on the machine that trains",
        )  # fmt: skip
        return
    try:
        module, engine = _policy(bench.config)
    except MHGPOError as error:
        yield Finding(f"engine{whose}", "fail", str(error), "see docs/models.md")
        return
    try:
        yield from _compared(bench, module, engine, whose)
    finally:
        engine.close()


def _compared(bench: Bench, module: LLMRLModule, engine: HFEngine | VLLMEngine, whose: str) -> Iterator[Finding]:
    learner = HFEngine(module.llm, module.eos_ids, module.dtype)
    try:
        first = _first_batch(bench, engine, learner)
    except MHGPOError as error:
        yield Finding(f"engine{whose}", "fail", str(error), "see docs/models.md")
        return
    yield replace(first, name=f"engine{whose}")
    pushes: Iterable[Finding] = [
        Finding("weight push", "ok", "the engine shares the learner's weights, or takes adapters beside its own")
    ]
    if isinstance(engine, VLLMEngine) and (bench.config.lora or {}).get("send") != "adapters":
        pushes = _canary(bench.config, engine, learner, module)
    for found in pushes:
        yield replace(found, name=f"weight push{whose}")


def _policy(config: Any) -> tuple[LLMRLModule, HFEngine | VLLMEngine]:
    gpu = torch.cuda.is_available()
    keys = ("llm", "dtype", "temperature", "attn_implementation")
    settings: dict[str, Any] = {**{key: config[key] for key in keys}, "lora": None}
    module = LLMRLModule(model_config=settings, observation_space=None, action_space=None)
    # beside an engine that takes most of its GPU the learner has another one, or none
    others = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    module.llm.to("cpu" if not gpu else "cuda" if config.engine == "hf" else others)
    if config.engine == "hf":
        settings = {"tokenizer": module.tokenizer, **config.engine_config}
        return module, HFEngine(module.llm, module.eos_ids, module.dtype, **settings)
    require_vllm()
    place = Placement(config.num_gpus_per_env_runner if gpu else 0.0, engines=len(config.policy_names))
    return module, vllm_engine(config, config.llm, place, None)


def _first_batch(bench: Bench, engine: HFEngine | VLLMEngine, learner: HFEngine) -> Finding:
    """Samples a first batch and lets the learner score it: the ratio must be 1."""
    trees = bench.play(engine, ROOTS, _strategy(bench))
    acts = [act for tree in trees for act in tree.generations if act.said is None][:32]
    if not acts:
        return Finding("engine", "fail", f"no response to {ROOTS} questions: {trees[0].void[:1]}", "see the message")
    found = [learner.score(act.prompt, act.response, bench.config.temperature, act.agent) for act in acts]
    apart = np.concatenate([mine - act.logprobs for mine, act in zip(found, acts, strict=True)])
    ratio, mean, most = np.exp(apart), float(np.abs(apart).mean()), float(np.abs(apart).max())
    seen = (
        f"{bench.config.engine} against the learner on {len(apart)} sampled tokens: log-probabilities differ by "
        f"{mean:.2g} in the mean, {most:.2g} at most; ratio {ratio.min():.5f} to {ratio.max():.5f}"
    )
    if mean > TOLERANCE[bench.config.dtype]:
        remedy = "try dtype: float32; if it stays, report it: engine and learner compute different models"
        return Finding("engine", "fail", seen, remedy)
    return Finding("engine", "ok", seen)


def _canary(config: Any, engine: VLLMEngine, learner: HFEngine, module: LLMRLModule) -> Iterator[Finding]:
    """Pushes weights that are far off, then the right ones; each must arrive whole."""
    prompt, response = fixed_sequence(module.llm.config.get_text_config().vocab_size, engine.context)
    kept = {name: parameter.detach().clone() for name, parameter in module.llm.named_parameters()}
    temperature, tolerance = config.temperature, config.sync_tolerance or TOLERANCE[config.dtype]
    for what in ("other weights", "the right weights again"):
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for name, parameter in module.llm.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                scale = 0.05 * parameter.std() if what == "other weights" else 0.0
                parameter.copy_(kept[name] + torch.nan_to_num(scale * noise))
        weights = ((name, tensor.to(module.dtype)) for name, tensor in module.llm.named_parameters())
        probe = Probe(prompt, response, learner.score(prompt, response, temperature), temperature, tolerance)
        try:
            engine.load_weights(weights)
            apart = probe.check(engine)
        except (SyncError, EngineError) as error:
            yield Finding("weight push", "fail", f"{what}: {error}", "a case to report, with versions and model")
            return
        yield Finding("weight push", "ok", f"{what} arrived and the prefix cache was reset: {apart:.2g} a token apart")
