"""``--roles``: who plays which role of a system, from a word on the command line.

``rewriter=identity,reranker=base`` replaces two roles, ``perfect`` all of them. A player is ``identity`` (leaves things
as they are), ``base`` (the policy before training), a hand-written policy of minipedia by name, a checkpoint or model
folder, or ``module:function`` called with (environment, agent).
"""

from pathlib import Path
from typing import Any

from rllib_mhgpo.algorithms.evaluation import System
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.engines import Engine, Written
from rllib_mhgpo.envs.minipedia.perfect import POLICIES
from rllib_mhgpo.errors import ConfigError, MHGPOError, did_you_mean


def recast(system: System, spec: str) -> System:
    """Returns the system with its roles played as ``spec`` says.

    Raises:
        ConfigError: an unknown role or player; the nearest right word is named.
    """
    agents, players = list(system.env.possible_agents), dict[str, str]()
    for part in spec.split(","):
        agent, equals, who = part.partition("=")
        if equals and agent.strip() not in agents:
            raise ConfigError(
                f"--roles {spec}: no role {agent.strip()!r}; roles: {', '.join(agents)}."
                + did_you_mean(agent.strip(), agents)
            )
        players |= {agent.strip(): who.strip()} if equals else dict.fromkeys(agents, part.strip())
    try:
        return system.cast({agent: player(system, who, agent) for agent, who in players.items()})
    except MHGPOError as error:
        raise type(error)(f"--roles {spec}: {error}") from None


def player(system: System, who: str, agent: str) -> Engine:
    """Returns the engine that a word names in the place of an agent."""
    if who == "base":
        return system.player(system.config.llms[system.config.policy_of(agent)], agent)
    if who == "identity":
        return Written(lambda env, agent: env.unwrapped.identity(agent), who)
    if who in POLICIES:
        return Written(lambda env, agent: _played(who, env.unwrapped, agent), who)
    if who and Path(who).expanduser().is_dir():
        return system.player(who, agent)
    if ":" in who:
        return Written(import_named("player", who, {}), who)
    raise ConfigError(
        f"no player {who!r}: expected identity, base, {', '.join(POLICIES)}, a checkpoint or model folder, or "
        "module:function." + did_you_mean(who, ["identity", "base", *POLICIES])
    )


def _played(name: str, env: Any, agent: str) -> str:
    return POLICIES[name][env.kinds[agent]](*env.told(agent))
