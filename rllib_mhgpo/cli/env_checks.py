"""What is checked of an environment before anyone trains in it, and what MHGPO will see of it.

One idea: every check plays the environment for real, with the policy's own responses, and says in a line what it found.
"""

import contextlib
import io
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pettingzoo import AECEnv
from pettingzoo.test import api_test, seed_test

from rllib_mhgpo.algorithms.evaluation import System, assemble
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.algorithms.scale_checks import prompt_limits
from rllib_mhgpo.credit import AGGREGATIONS, group_advantages, propagate
from rllib_mhgpo.engines import Prompt
from rllib_mhgpo.errors import MHGPOError
from rllib_mhgpo.forks import copy_env
from rllib_mhgpo.llms import load_tokenizer
from rllib_mhgpo.llms.names import SHIPPED
from rllib_mhgpo.sampling import ForkOnFirst, Options
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.tree import TEAM, Generation, RolloutTree, flatten
from rllib_mhgpo.waves import Play, play, split_rewards

API_CYCLES, MOST_WORDS = 20, 100


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: what was checked.
        said: what was found.
        passed: whether the environment can be trained in, as far as this check goes.
    """

    name: str
    said: str
    passed: bool = True


class Failure(Exception):  # noqa: N818  # a finding, not an error of this program
    """What a check found to be wrong."""


def run_checks(system: System, roots: Sequence[int]) -> Iterator[Finding]:
    """Yields the findings one by one; a check that fails does not keep the next from running."""
    checks: dict[str, Callable[[], str]] = {
        "PettingZoo api_test": lambda: conforms(system),
        "PettingZoo seed_test": lambda: repeats(system),
        "episodes end": lambda: ends(system, roots),
        "forks": lambda: forks_apart(system, roots),
        "tokens": lambda: keeps_words(system, roots),
        "prompt limits": lambda: fits(system, roots),
        "rewards": lambda: pays(system, roots),
    }
    for name, run in checks.items():
        try:
            yield Finding(name, run())
        except Failure as failure:
            yield Finding(name, str(failure), passed=False)
        except Exception as error:
            yield Finding(name, blamed(error), passed=False)


def blamed(error: Exception) -> str:
    """Says what was raised and, where it is no message for users, on which line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, MHGPOError) else f" ({frame.filename}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{place}"


# --- one episode at a time ---------------------------------------------------------------------------------------


def begun(system: System, root: int) -> AECEnv:
    """Returns a copy of the environment at the start of a root."""
    env = copy_env(system.env)
    env.reset(seed=root, options={"index": root, "split": "train"})
    return env


def is_live(env: AECEnv) -> bool:
    """Lets agents that have ended leave; returns whether anyone is to act."""
    while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
        env.step(None)
    return bool(env.agents)


def respond(system: System, env: AECEnv, seed: int) -> Tokens:
    """Asks the policy for what the acting agent says."""
    agent, config = env.agent_selection, system.config
    ids, limits = env.observe(agent), config.max_response_tokens
    limit = limits if isinstance(limits, int) else limits[agent]
    prompt = Prompt(ids, [seed], min(limit, system.context - len(ids)), getattr(env, "stop", ()), agent, env)
    return system.engine.generate([prompt], config.temperature)[0][0].ids


def turns(system: System, env: AECEnv) -> Iterator[int]:
    """Counts the acts of an episode, which the caller takes, until it is over."""
    turn = 0
    while is_live(env):
        if turn == system.config.max_turns:
            raise Failure(f"the episode has not ended after max_turns = {turn} acts")
        yield turn
        turn += 1


def finish(system: System, env: AECEnv, seed: int) -> int:
    """Plays an environment to its end and returns in how many acts."""
    count = 0
    for turn in turns(system, env):
        env.step(respond(system, env, seed + turn))
        count += 1
    return count


def state(env: AECEnv) -> tuple[Any, ...]:
    """What agents can see of an environment."""
    if not env.agents:
        return ("over",)
    seen = np.asarray(env.observe(env.agent_selection)).tolist()
    facts = (env.rewards, env.terminations, env.truncations, env.infos)
    return (env.agent_selection, seen, *(repr(fact) for fact in facts))


# --- the checks ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """PettingZoo prints, and warns of spaces that are neither boxes nor discrete."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def conforms(system: System) -> str:
    """Runs PettingZoo's test of the AEC interface, with random tokens as responses."""
    with quiet():
        api_test(copy_env(system.env), num_cycles=API_CYCLES)
    return f"{API_CYCLES} cycles of random tokens"


def repeats(system: System) -> str:
    """Runs PettingZoo's test that a seed decides everything."""
    tokenizer = load_tokenizer(system.config.llm)
    with quiet():
        seed_test(lambda: system.config.make_env(tokenizer, system.context), num_cycles=API_CYCLES)
    return "the same seed and responses, the same episode"


def ends(system: System, roots: Sequence[int]) -> str:
    """Counts the acts of episodes."""
    counts = [finish(system, begun(system, root), 0) for root in roots]
    if not min(counts):
        raise Failure("an episode ended before any agent had acted")
    return f"after {', '.join(map(str, counts))} acts"


def forks_apart(system: System, roots: Sequence[int]) -> str:
    """Plays forks to their ends at every turn: parents must stay as a twin that was never forked."""
    env, twin, count = begun(system, roots[0]), begun(system, roots[0]), 0
    for turn in turns(system, twin):
        branch = copy_env(env)
        if state(branch) != state(env):
            raise Failure(f"after {turn} acts a fork is not in the state of its parent")
        finish(system, branch, 1000 * (turn + 1))
        said = respond(system, twin, turn)
        twin.step(said)
        with contextlib.suppress(Exception):  # a parent that can no longer be played is one that has changed
            env.step(said)
        count += 1
        if state(env) != state(twin):
            raise Failure(
                f"playing a fork changed its parent (after {turn} acts): they share a list or another object; a fork "
                "is a deep copy, so keep state in attributes of the environment that are not in `shared`"
            )
    return f"{count} forks played to their ends left their parents as they were"


def keeps_words(system: System, roots: Sequence[int]) -> str:
    """Looks for words that the tokenizer does not know, and decodes and encodes every prompt."""
    tokenizer = tokenizer_of(system)
    count, changed, spaces = 0, 0, system.env.observation_space
    for env, agent, ids in reads(system, roots):
        if not spaces(agent).contains(ids):
            raise Failure(f"agent {agent!r}: what it reads is not in its observation space {spaces(agent)}")
        if fault := unread(system, env, agent, ids):
            raise Failure(f"{fault}; use words of its vocabulary{_words(tokenizer)}, or another llm")
        again = tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
        count, changed = count + 1, changed + (list(again) != ids.tolist())
    return f"{count} prompts, of which {count - changed} survive decoding and encoding; no word is unknown"


def tokenizer_of(system: System) -> Any:
    """The tokenizer that made the environment's prompts."""
    return getattr(system.env.unwrapped, "tokenizer", None) or load_tokenizer(system.config.llm)


def reads(system: System, roots: Sequence[int]) -> Iterator[tuple[AECEnv, str, Tokens]]:
    """Plays roots; yields the environment, who is to act and what it reads, before every act."""
    for root in roots:
        env = begun(system, root)
        for turn in turns(system, env):
            yield env, env.agent_selection, np.asarray(env.observe(env.agent_selection))
            env.step(respond(system, env, turn + 1))


def unread(system: System, env: AECEnv, agent: str, ids: Tokens) -> str:
    """Says which words of what an agent reads have no token; empty where all have."""
    tokenizer = tokenizer_of(system)
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
        return ""
    known = f"agent {agent!r} reads words that the tokenizer of {system.config.llm!r} does not know"
    return known + unknown_words(env, agent, tokenizer)


def unread_at_first(config: Any) -> str:
    """Says which words of a first question have no token of a policy that ships, for these know few; else empty.

    Whatever keeps the environment from being played, the run itself will say.
    """
    if not set(config.llms.values()) <= set(SHIPPED):
        return ""
    config = config.update_from_dict({"engine": "hf", "engine_config": {}, "opponents": {}})
    with contextlib.suppress(Exception):
        system = assemble(config, config.llms, config.env_config)
        return next(filter(None, (unread(system, *read) for read in reads(system, [0]))), "")
    return ""


def _words(tokenizer: Any) -> str:
    """Lists a vocabulary that is small enough to be read."""
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    return f" ({' '.join(words)})" if len(words) <= MOST_WORDS else ""


def unknown_words(env: AECEnv, agent: str, tokenizer: Any) -> str:
    """Names the words of a text prompt that have no token."""
    prompt = getattr(env.unwrapped, "prompt", None)
    text = prompt(agent) if prompt else ""
    text = text if isinstance(text, str) else " ".join(message["content"] for message in text)
    words = [word for word in dict.fromkeys(text.split()) if tokenizer.unk_token_id in tokenizer(word)["input_ids"]]
    return f": {', '.join(words[:8])}" if words else ""


def fits(system: System, roots: Sequence[int]) -> str:
    """Measures prompts against the context."""
    longest: dict[str, int] = {}
    for root in roots:
        env = begun(system, root)
        for turn in turns(system, env):
            agent = env.agent_selection
            longest[agent] = max(longest.get(agent, 0), len(env.observe(agent)))
            env.step(respond(system, env, turn))
    _, room = prompt_limits(system.config, system.context)
    over = {agent: length for agent, length in longest.items() if length > room}
    said = ", ".join(f"{agent} {length}" for agent, length in longest.items())
    if over:
        raise Failure(f"longest prompts {said} tokens; {room} leave a response its room in the context")
    return f"longest prompts {said} of {room} tokens"


def pays(system: System, roots: Sequence[int]) -> str:
    """Compares what agents earn by PettingZoo's count with what they are credited with."""
    for root in roots:
        env = begun(system, root)
        teams = dict.fromkeys(env.possible_agents, TEAM)
        earned, credited = dict.fromkeys(env.possible_agents, 0.0), dict.fromkeys(env.possible_agents, 0.0)
        teams |= {agent: info["team"] for agent, info in env.infos.items() if "team" in info}
        for turn in turns(system, env):
            actor = env.agent_selection
            env.step(respond(system, env, turn))
            rewards, infos = dict(env.rewards), dict(env.infos)
            teams |= {agent: info["team"] for agent, info in infos.items() if "team" in info}
            specific, shared = split_rewards(rewards, infos, teams, actor, ended=not is_live(env))
            for agent, reward in rewards.items():
                if not np.isfinite(reward):
                    raise Failure(f"root {root}: {actor!r} acts and {agent!r} earns {reward}")
                earned[agent] += float(reward)
                credited[agent] += shared.get(teams[agent], 0.0) + specific * (agent == actor)
        for agent in earned:
            if abs(earned[agent] - credited[agent]) > 1e-6:
                raise Failure(
                    f"root {root}: {agent!r} earned {earned[agent]:g} in all, and is credited with "
                    f"{credited[agent]:g}: the agents of team {teams[agent]!r} are paid different shared rewards, of "
                    'which the mean counts; name teams in infos[agent]["team"], or pay what is an agent\'s own as '
                    "specific_reward"
                )
    return "what agents earn is what they are credited with"


# --- what MHGPO sees -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """One group of a root.

    Attributes:
        prompts: how many different prompts its members read.
        specific, shared, advantage: of each member.
    """

    root: int
    agent: str
    act: int
    team: str
    prompts: int
    specific: list[float]
    shared: list[float]
    advantage: list[float]


def groups(system: System, roots: Sequence[int]) -> tuple[list[Group], list[RolloutTree]]:
    """Rolls out as ``fof`` does and returns the groups that MHGPO makes, with the trees."""
    config, agents = system.config, list(system.env.possible_agents)
    size = max(2, config.group_size)
    how = Play(
        ForkOnFirst(Options(size, len(agents))), config.temperature, config.max_response_tokens, (0, 0),
        context=system.context, max_turns=config.max_turns,
    )  # fmt: skip
    trees = play(system.env, system.engine, roots, how, {})
    flat = flatten(trees, agents)
    aggregate = import_named("reward_aggregation", config.reward_aggregation, AGGREGATIONS)
    rows = np.arange(len(flat.generations))
    shared = propagate(flat.edges, flat.shared, aggregate, np.random.default_rng(0))[rows, flat.team]
    keys = [(int(tree), int(agent), int(act)) for tree, agent, act in zip(flat.tree, flat.agent, flat.act, strict=True)]
    place = {key: number for number, key in enumerate(sorted(set(keys)))}
    advantage = group_advantages(shared + flat.specific, np.array([place[key] for key in keys])).values
    made = []
    for tree, agent, act in place:
        mine = [row for row, key in enumerate(keys) if key == (tree, agent, act)]
        acts_ = [flat.generations[row] for row in mine]
        made.append(
            Group(
                trees[tree].root,
                agents[agent],
                act,
                acts_[0].team,
                len({g.prompt.tobytes() for g in acts_}),
                flat.specific[mine].tolist(),
                shared[mine].tolist(),
                advantage[mine].tolist(),
            )
        )
    return made, trees


def always_illegal(system: System, trees: Sequence[RolloutTree]) -> dict[str, tuple[int, str]]:
    """Returns the agents of which no output was legal, how many there were, and the text of one."""
    tokenizer = getattr(system.env.unwrapped, "tokenizer", None) or load_tokenizer(system.config.llm)
    said: dict[str, list[Generation]] = defaultdict(list)
    for act in (act for tree in trees for act in tree.generations):
        said[act.agent].append(act)
    return {
        agent: (len(acts), tokenizer.decode(acts[0].response))
        for agent, acts in said.items()
        if all(act.metrics.get("illegal", 0.0) == 1.0 for act in acts)
    }
