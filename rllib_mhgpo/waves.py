"""Plays AEC environments in waves: one engine call for all live environments, forks, one step for all of them.

Knows no environment, no strategy and no RLlib; what comes out are rollout trees.
"""

import copy
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pettingzoo import AECEnv

from rllib_mhgpo.engines import Completion, Engine, Prompt
from rllib_mhgpo.errors import ConfigError, RolloutError
from rllib_mhgpo.forks import copy_env
from rllib_mhgpo.sampling import Strategy, Visit
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.tree import TEAM, Generation, RolloutTree

LARGEST_REWARD = 1e100
"""Squares of larger ones, summed, have no place in a number."""


@dataclass(frozen=True)
class Play:
    """How to play a batch of roots.

    Attributes:
        strategy: how many responses each act draws.
        temperature: 0 is greedy.
        max_tokens: most tokens of a response: one number, or one by agent.
        seed: with root and path it decides every response and the environments' noise.
        split: which roots.
        keep_records: keep what the environment summarises of each episode, of all roots or of these.
        common_noise: branches see the same noise of the environment instead of their own.
        context: most tokens of prompt and response together; response limits are lowered to it.
        void_errors: whatever an environment raises voids the rollout; otherwise a :class:`RolloutError` alone does.
        max_turns: acts after which an episode that has not ended is voided.
    """

    strategy: Strategy
    temperature: float
    max_tokens: int | Mapping[str, int]
    seed: tuple[int, ...]
    split: str = "train"
    keep_records: bool | Collection[int] = False
    common_noise: bool = False
    context: int | None = None
    void_errors: bool = False
    max_turns: int = 1000

    def limit(self, agent: str, prompt_length: int) -> int:
        """Most tokens of a response of ``agent`` to a prompt of this length."""
        if not prompt_length:
            raise RolloutError(f"agent {agent!r}: the prompt has no tokens; expected at least one.")
        limit = self.max_tokens if isinstance(self.max_tokens, int) else self.max_tokens[agent]
        if self.context is None:
            return limit
        if prompt_length >= self.context:
            raise RolloutError(
                f"agent {agent!r}: the prompt of {prompt_length} tokens fills the context of {self.context}."
            )
        return min(limit, self.context - prompt_length)

    def keeps(self, root: int) -> bool:
        """Whether the summaries of this root's episodes are kept."""
        return self.keep_records if isinstance(self.keep_records, bool) else root in self.keep_records

    def stream(self, root: int, path: tuple[int, ...]) -> int:
        """Returns the seed of the response at ``path`` of a root, 64 bits."""
        # the length keeps (0,) and (0, 0) apart: a SeedSequence does not see zeros at its end
        return int(np.random.SeedSequence((*self.seed, root, len(path), *path)).generate_state(1, np.uint64)[0])


@dataclass
class Branch:
    """One live trajectory.

    Attributes:
        env: its environment.
        tree: where its generations go.
        path: which sample was taken at each act.
        acts: which act of its agent each act was.
        latest: index of each agent's generations so far, in order.
        previous: index of the generation that acted before.
        teams: the team of each agent that has named one.
    """

    env: AECEnv
    tree: RolloutTree
    path: tuple[int, ...] = ()
    acts: tuple[int, ...] = ()
    latest: dict[str, list[int]] = field(default_factory=dict)
    previous: int | None = None
    teams: dict[str, str] = field(default_factory=dict)

    def generation(self) -> Generation:
        """The generation that acted last."""
        assert self.previous is not None
        return self.tree.generations[self.previous]

    def visit(self) -> Visit:
        """Where this trajectory stands."""
        agent, agents = acting(self.env), self.env.possible_agents
        act = len(self.latest.get(agent, ()))
        return Visit(self.tree.root, agent, agents.index(agent), len(agents), act, self.path, self.acts)

    def fork(self, count: int) -> list["Branch"]:
        """Returns ``count`` branches, this one first, the others with copies of the environment."""
        return [self, *(replace(self, env=copy_env(self.env), **self._own()) for _ in range(count - 1))]

    def _own(self) -> dict[str, Any]:
        return {"latest": copy.deepcopy(self.latest), "teams": dict(self.teams)}

    def name_teams(self) -> None:
        """Takes the teams that the environment names; an agent that names none stays where it was."""
        self.teams.update({agent: info["team"] for agent, info in self.env.infos.items() if "team" in info})


def play(env: AECEnv, engine: Engine, roots: Sequence[int], how: Play, seconds: dict[str, float]) -> list[RolloutTree]:
    """Plays every root to its end.

    Args:
        env: copied for each root; itself left as it is.
        seconds: seconds spent in ``generate`` and ``step`` are added to it.

    Returns:
        One tree a root, in order. Trajectories that met a :class:`RolloutError` are left out; ``void`` says why.
    """
    trees = [RolloutTree(root, recorded=how.keeps(root)) for root in roots]
    live = [branch for tree in trees for branch in _begun(env, tree, how)]
    with engine.remembering():
        while live:
            live, prompts, flags = _observed(live, how)
            with _timed(seconds, "generate"):
                completions = engine.generate(prompts, how.temperature)
            forks = [_responded(*fork, how) for fork in zip(live, prompts, flags, completions, strict=True)]
            with _timed(seconds, "step"):
                live = _stepped([branch for fork in forks for branch in fork], how)
    for tree in trees:
        if tree.void:
            tree.prune()
    return trees


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def _begun(env: AECEnv, tree: RolloutTree, how: Play) -> list[Branch]:
    branch = Branch(copy_env(env), tree)
    try:
        branch.env.reset(seed=how.stream(tree.root, ()) % 2**32, options={"index": tree.root, "split": how.split})
    except Exception as error:
        _void(branch, error, how)
        return []
    branch.name_teams()
    return [branch]


def _reseed(env: AECEnv, seed: int) -> None:
    """Gives a fork noise of its own, through ``reseed`` or through a generator in ``np_random``."""
    if hasattr(env, "reseed"):
        env.reseed(seed)
    elif isinstance(getattr(env.unwrapped, "np_random", None), np.random.Generator):
        env.unwrapped.np_random = np.random.default_rng(seed)


def _observed(live: list[Branch], how: Play) -> tuple[list[Branch], list[Prompt], list[Sequence[bool]]]:
    """Reads the prompt of every live branch; branches whose prompt cannot be made are voided."""
    kept, prompts, flags = [], [], []
    for branch in live:
        agent = branch.env.agent_selection
        try:
            if len(branch.path) >= how.max_turns:
                raise RolloutError(
                    f"agent {agent!r}: the episode has not ended after max_turns = {how.max_turns} acts."
                )
            visit = branch.visit()
            ids = branch.env.observe(agent)
            limit = how.limit(agent, len(ids))
        except Exception as error:
            _void(branch, error, how)
            continue
        trained = how.strategy(visit)
        seeds = [how.stream(branch.tree.root, (*branch.path, sample)) for sample in range(len(trained))]
        kept.append(branch)
        prompts.append(Prompt(ids, seeds, limit, getattr(branch.env, "stop", ()), visit.agent, branch.env))
        flags.append(trained)
    return kept, prompts, flags


def _responded(
    branch: Branch, prompt: Prompt, trained: Sequence[bool], completions: Sequence[Completion], how: Play
) -> list[Branch]:
    """Forks a branch, one fork a response, and notes the response in the tree."""
    agent, path, previous = branch.env.agent_selection, branch.path, branch.previous
    act = len(branch.latest.get(agent, ()))
    forks = branch.fork(len(completions))
    for sample, (fork, completion) in enumerate(zip(forks, completions, strict=True)):
        fork.path, fork.acts = (*path, sample), (*fork.acts, act)
        if not how.common_noise:
            _reseed(fork.env, how.stream(fork.tree.root, fork.path))
        generation = Generation(
            agent, prompt.ids, completion.ids, completion.logprobs, completion.truncated, previous,
            act=act, path=fork.path, trained=trained[sample], pays=all(trained) or not trained[sample],
        )  # fmt: skip
        fork.previous = fork.tree.add(generation)
        fork.latest.setdefault(agent, []).append(fork.previous)
    return forks


def _stepped(live: list[Branch], how: Play) -> list[Branch]:
    """Steps all branches at once and notes what each step earned; returns those that go on."""
    going = []
    for branch, error in zip(live, _step(live), strict=True):
        try:
            if error is not None:
                raise error
            if not _note(branch, how):
                going.append(branch)
        except Exception as reason:
            _void(branch, reason, how)
    return going


def _step(live: list[Branch]) -> list[Exception | None]:
    """Steps environments of one class, through their ``step_batch`` where they have one; returns what went wrong."""
    envs, actions = [branch.env for branch in live], [branch.generation().response for branch in live]
    if envs and hasattr(envs[0], "step_batch"):
        return list(envs[0].step_batch(envs, actions))
    return [_step_one(env, action) for env, action in zip(envs, actions, strict=True)]


def _step_one(env: AECEnv, action: Tokens) -> Exception | None:
    try:
        env.step(action)
    except Exception as error:
        return error
    return None


def _note(branch: Branch, how: Play) -> bool:
    """Writes rewards, parents and numbers of the last step into the tree; returns whether the episode is over."""
    env, generation = branch.env, branch.generation()
    rewards, infos = dict(env.rewards), dict(env.infos)
    branch.name_teams()
    ended = _is_over(env)
    teams = {agent: branch.teams.get(agent, TEAM) for agent in rewards}
    info = infos.get(generation.agent, {})
    generation.team = teams.get(generation.agent, TEAM)
    generation.specific, generation.shared = split_rewards(rewards, infos, teams, generation.agent, ended)
    for value in (generation.specific, *generation.shared.values()):
        if not abs(value) < LARGEST_REWARD:
            raise RolloutError(
                f"question {branch.tree.root}, agent {generation.agent!r}: expected a finite reward, found {value}."
            )
    generation.metrics = dict(info.get("metrics", {}))
    generation.parents = _parents(branch, info)
    if ended:
        generation.scores = dict(info.get("scores", {}))
        generation.record = env.summary() if branch.tree.recorded and hasattr(env, "summary") else None
    return ended


def acting(env: AECEnv) -> str:
    """Returns who is to act.

    Raises:
        ConfigError: it is not one of the agents that the environment has announced.
    """
    agent, agents = env.agent_selection, env.possible_agents
    if agent not in agents:
        raise ConfigError(f"env: {agent!r} is to act, but possible_agents has only {agents}; name all agents there.")
    return str(agent)


def _is_over(env: AECEnv) -> bool:
    """Lets agents that have ended leave; returns whether none is left."""
    while env.agents and (env.terminations[acting(env)] or env.truncations[env.agent_selection]):
        env.step(None)
    return not env.agents


def split_rewards(
    rewards: Mapping[str, float],
    infos: Mapping[str, Mapping[str, Any]],
    teams: Mapping[str, str],
    actor: str,
    ended: bool,
) -> tuple[float, dict[str, float]]:
    """Splits the rewards of one step into the actor's specific reward and what each team earned.

    Where ``infos[agent]["specific_reward"]`` is absent, an actor's reward is specific until the episode ends and
    shared at its end; what reaches an agent that is not acting is shared. A team that pays several members the same
    step is credited once, with the mean of the members' shared rewards that are not 0.
    """
    specific = 0.0
    paid: dict[str, list[float]] = {}
    for agent, reward in rewards.items():
        default = reward if agent == actor and not ended else 0.0
        own = float(infos.get(agent, {}).get("specific_reward", default))
        if agent == actor:
            specific = own
            own_shared = reward - own
        else:
            own_shared = reward
        if own_shared != 0.0:
            paid.setdefault(teams[agent], []).append(float(own_shared))
    return specific, {team: sum(values) / len(values) for team, values in paid.items()}


def _parents(branch: Branch, info: Mapping[str, Any]) -> tuple[int, ...]:
    """Resolves ``infos[agent]["parents"]``: agents, or (agent, n-th act); the one that acted before by default."""
    generation = branch.generation()
    if info.get("parents") is None:
        return () if generation.previous is None else (generation.previous,)
    parents = []
    for name in info["parents"]:
        agent, act = (name, -1) if isinstance(name, str) else name
        acts = [index for index in branch.latest.get(agent, ()) if index != branch.previous]
        if not -len(acts) <= act < len(acts):
            raise ValueError(
                f"question {branch.tree.root}, agent {generation.agent!r}: parent {name!r} has not acted before; "
                f"agents that have: {sorted(branch.latest)}."
            )
        parents.append(acts[act])
    return tuple(dict.fromkeys(parents))


def _void(branch: Branch, error: Exception, how: Play) -> None:
    """Leaves the trajectory out and says why; a fault of the program is raised unless it is to be voided too."""
    if not isinstance(error, RolloutError) and not how.void_errors:
        raise error
    reason = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
    place = "" if reason.startswith("question") else f"question {branch.tree.root}: "
    branch.tree.void.append(f"{place}{reason}")
