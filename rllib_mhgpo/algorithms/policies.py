"""Which policy an agent follows, and what a policy has of its own.

Sharing parameters is one policy for all agents, RLlib's ``default_policy``. The one idea: a policy is a name and the
few keys in which it differs from the run's configuration; whatever computes with it asks for the configuration of that
name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.policy import PolicySpec
from ray.rllib.utils.schedules.scheduler import Scheduler

from rllib_mhgpo.algorithms.scale_checks import check_adapters
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.llms import load_tokenizer
from rllib_mhgpo.llms.lora import lora_settings

if TYPE_CHECKING:
    from rllib_mhgpo.algorithms.config import LLMConfig

OWN = ("llm", "lora", "lr")
"""Keys in which policies may differ."""
TAKEN = ("critic", DEFAULT_MODULE_ID)
"""Names of other modules."""


def given_policies(policies: Any) -> Any:
    """Returns what RLlib's users write as names with keys; what is no such thing stays as it is.

    >>> given_policies(["a", "b"]), given_policies({"a": None, "b": PolicySpec(config={"lr": 0.1})})
    ({'a': {}, 'b': {}}, {'a': {}, 'b': {'lr': 0.1}})
    """
    if isinstance(policies, Mapping):
        specs = {name: _own(name, spec) if isinstance(spec, PolicySpec) else spec for name, spec in policies.items()}
        return {name: {} if spec is None else spec for name, spec in specs.items()}
    if isinstance(policies, list | tuple | set | frozenset):
        if not all(isinstance(name, str) for name in policies) or len(set(policies)) < len(policies):
            raise ConfigError(f"config: policies: expected different names, found {list(policies)}.")
        return {name: {} for name in (sorted(policies) if isinstance(policies, set | frozenset) else policies)}
    return policies


def _own(name: str, spec: PolicySpec) -> Any:
    given = [key for key in ("policy_class", "observation_space", "action_space") if getattr(spec, key) is not None]
    if given:
        raise ConfigError(
            f"config: policies.{name}: a policy may have its own {', '.join(OWN)} (config), found {given}."
        )
    return spec.config


def policy_followed(config: "LLMConfig", agent: str) -> str:
    """Returns the policy of an agent: as ``policy_mapping`` or ``policy_mapping_fn`` says, or that of its own name."""
    if not config.policies:
        return str(DEFAULT_MODULE_ID)
    if config.policy_mapping:
        return str(config.policy_mapping.get(agent, agent))
    mapping: Callable[[str, None], str] | None = config.policy_mapping_fn
    return agent if mapping is None else mapping(agent, None)


def check_policies(config: "LLMConfig") -> None:
    """Refuses policies that cannot be, and puts in what their adapters leave out.

    Raises:
        ConfigError: which policy and key, and what to do.
    """
    if config.policy_mapping_fn is not None and (config.policy_mapping or not config.policies):
        beside = "policy_mapping, which says the same" if config.policy_mapping else "no policies, which it would name"
        raise ConfigError(f"config: policy_mapping_fn: found beside {beside}; leave one out or give the other.")
    for name, own in config.policies.items():
        _check_policy(config, name, own)
    strangers = {policy: agent for agent, policy in config.policy_mapping.items() if policy not in config.policies}
    for policy, agent in strangers.items():
        raise ConfigError(
            f"config: policy_mapping: {agent} follows {policy!r}, but policies has {list(config.policies)}."
            + did_you_mean(policy, config.policies)
        )
    if config.policy_mapping_fn is None:  # the environment's agents are known later; so much is certain of them now
        limits = config.max_response_tokens
        named = [*config.policy_mapping, *config.opponents, *config.policies]
        check_trained(config, list(limits) if isinstance(limits, dict) else list(dict.fromkeys(named)))


def _check_policy(config: "LLMConfig", name: str, own: dict[str, Any]) -> None:
    place = f"config: policies.{name}"
    if name in TAKEN or not re.fullmatch(r"\w[\w.-]*", name):  # it becomes a folder's
        raise ConfigError(f"{place}: expected a name of letters, digits, _, - and ., none of {list(TAKEN)}.")
    for key in own:
        if key not in OWN:
            hint = did_you_mean(key, OWN)
            raise ConfigError(f"{place}: a policy may have its own {', '.join(OWN)}, found {key!r}.{hint}")
    for key, kind, wanted in (("llm", str, "a name or folder"), ("lora", Mapping | None, "keys and values, or null")):
        if key in own and not isinstance(own[key], kind):
            raise ConfigError(f"{place}: {key}: expected {wanted}, found {own[key]!r}.")
    try:
        if own.get("lora") is not None:
            own["lora"] = lora_settings(own["lora"])
        its = config.get_config_for_module(name)
        if its.lora is not None:
            check_adapters(its)
    except ConfigError as error:
        raise ConfigError(str(error).replace("config:", f"{place}:", 1)) from error
    if (its.lora or {}).get("adapters"):
        raise ConfigError(
            f"{place}: lora.adapters: adapters of roles belong to one policy for all; leave policies out, or give each "
            "policy its own lora."
        )
    check_rate(place, its.lr)
    if its.llm != config.llm and load_tokenizer(its.llm).get_vocab() != load_tokenizer(config.llm).get_vocab():
        raise ConfigError(
            f"{place}: llm: {its.llm!r} has another tokenizer than llm, {config.llm!r}; agents of one environment read "
            "and write the same tokens."
        )


def check_rate(place: str, lr: Any) -> None:
    """Refuses what is neither a learning rate nor RLlib's schedule of one.

    Raises:
        ConfigError: with the place in the configuration.
    """
    if isinstance(lr, list):
        try:
            Scheduler.validate(fixed_value_or_schedule=lr, setting_name="lr", description="learning rate")
        except (ValueError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{place}: lr: expected a number or a schedule such as [[0, 1e-5], [100000, 1e-6]], found {lr!r}."
            ) from error
    elif isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < float("inf"):
        raise ConfigError(f"{place}: lr: expected a number of at least 0 or a schedule, found {lr!r}.")


def followers(config: "LLMConfig", agents: Sequence[str]) -> dict[str, str]:
    """Returns the policy of each agent that follows one: other opponents than ``past`` have weights of their own."""
    return {agent: config.policy_of(agent) for agent in agents if config.opponents.get(agent, "past") == "past"}


def check_followed(config: "LLMConfig", agents: Sequence[str]) -> None:
    """Refuses a mapping that does not fit the environment's agents.

    Raises:
        ConfigError: an agent without a policy, or a policy without an agent.
    """
    if strangers := [agent for agent in config.policy_mapping if agent not in agents]:
        raise ConfigError(f"config: policy_mapping: no agents {strangers}; agents: {list(agents)}.")
    if not config.policies:
        return
    if restless := [agent for agent in agents if len({config.policy_of(agent) for _ in range(8)}) > 1]:
        raise ConfigError(f"config: policy_mapping_fn: names other policies for {restless} when asked again; name one.")
    followed = followers(config, agents)
    for agent, policy in followed.items():
        if policy not in config.policies:
            raise ConfigError(
                f"config: policy_mapping: {agent} follows {policy!r}, but policies has {list(config.policies)}; name "
                "the policy of every agent."
            )
    if idle := [name for name in config.policies if name not in followed.values()]:
        raise ConfigError(f"config: policies: no agent follows {idle}; agents follow {followed}.")


def check_trained(config: "LLMConfig", agents: Sequence[str]) -> None:
    """Refuses a policy that only opponents ``past`` follow: what it was at the start is all that it will ever be.

    Raises:
        ConfigError: which policy, who follows it, and what to do.
    """
    followed = followers(config, agents)
    learning = {policy for agent, policy in followed.items() if agent not in config.opponents}
    if idle := [name for name in config.policies if name in followed.values() and name not in learning]:
        players = [agent for agent, policy in followed.items() if policy in idle]
        raise ConfigError(
            f"config: policies: {idle} would never be trained: only the opponents {players} follow them, which play as "
            "their policy was. Take one of these agents out of opponents, or let it follow a policy that others train."
        )
