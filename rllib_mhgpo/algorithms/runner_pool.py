"""All env runners as one: roots go out, trees come back, whatever happens to a runner on the way.

A runner that dies or stalls is replaced, and its roots go to the others: an iteration has all its roots, none twice.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_mhgpo.errors import MHGPOError
from rllib_mhgpo.runner import LLMEnvRunner, Published, Rollouts
from rllib_mhgpo.waves import Play

log = logging.getLogger(__name__)
MOST_TRIES = 3
Call = Callable[[LLMEnvRunner], Any]
Deals = dict[ray.ObjectRef, "Deal"]


@dataclass
class Deal:
    """Roots that one runner plays.

    Attributes:
        runner: its index.
        tries: how often they have been dealt.
    """

    runner: int
    roots: Sequence[int]
    how: Play
    tries: int = 1


@dataclass
class RunnerPool:
    """The runners of an RLlib group.

    Attributes:
        group: local and remote runners.
        timeout_s: how long a runner may take for its roots.
        num_replaced: runners that were lost so far.
    """

    group: EnvRunnerGroup
    timeout_s: float
    num_replaced: int = 0
    published: Published | None = None
    _active: dict[int, ActorHandle] = field(default_factory=dict)
    _joining: dict[int, tuple[ActorHandle, ray.ObjectRef]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._active = dict(self.group._worker_manager.actors())

    @property
    def local(self) -> LLMEnvRunner | None:
        """The runner in this process, where there are no others."""
        local: LLMEnvRunner | None = self.group.local_env_runner
        return None if self._active or self._joining else local

    def first(self, function: Call) -> Any:
        """Returns what a function returns of any runner."""
        if self.local is not None:
            return function(self.local)
        return ray.get(next(iter(self._active.values())).apply.remote(function))

    def roll_out(self, roots: Sequence[int], how: Play) -> list[Rollouts]:
        """Plays the roots on all runners."""
        return self.finish(self.start(roots, how)) if self.local is None else [self.local.rollout(roots, how)]

    def start(self, roots: Sequence[int], how: Play) -> Deals:
        """Deals roots to the runners and returns at once."""
        self._welcome()
        return self._deal(list(roots), how, list(self._active))

    def finish(self, deals: Deals) -> list[Rollouts]:
        """Waits for all that was dealt.

        Raises:
            MHGPOError: roots on which runners die or stall again and again, or no runner is left.
        """
        deals, parts, begun = dict(deals), [], time.monotonic()
        while deals:
            left = max(0.0, begun + self.timeout_s - time.monotonic())
            done, waiting = ray.wait(list(deals), num_returns=1, timeout=left)
            for ref in done:
                deal = deals.pop(ref)
                try:
                    parts.append(ray.get(ref))
                except RayActorError as error:
                    deals |= self._lose(deal, f"died: {str(error).splitlines()[0]}")
            if not done:
                begun = time.monotonic()
                for ref in waiting:
                    deals |= self._lose(deals.pop(ref), f"took longer than sample_timeout_s = {self.timeout_s:g} s")
        versions = {part.weights_seq_no for part in parts}
        if len(versions) > 1:
            raise MHGPOError(f"runners hold different weights: versions {sorted(versions)}.")
        return parts

    def hand_over(self, published: Published) -> None:
        """Gives all runners new weights, and those that join later."""
        self.published = published
        if self.local is not None:
            self.local.receive(published)
            return
        calls = {index: actor.apply.remote(partial(_receive, published)) for index, actor in self._active.items()}
        for index, call in calls.items():
            try:
                ray.get(call)
            except RayActorError as error:
                self._replace(index, f"died: {error}")

    def _deal(self, roots: list[int], how: Play, runners: Sequence[int], tries: int = 1) -> Deals:
        deals: Deals = {}
        for place, runner in enumerate(runners):
            if mine := roots[place :: len(runners)]:
                deals[self._active[runner].apply.remote(partial(_roll, mine, how))] = Deal(runner, mine, how, tries)
        return deals

    def _lose(self, deal: Deal, reason: str) -> Deals:
        """Replaces the runner of a deal and deals its roots again."""
        if deal.runner in self._active:
            self._replace(deal.runner, reason)
        if deal.tries == MOST_TRIES:
            raise MHGPOError(f"{MOST_TRIES} runners were lost on the questions {list(deal.roots)}; the last {reason}")
        if not self._active:
            self._welcome(wait=True)
        return self._deal(list(deal.roots), deal.how, list(self._active), deal.tries + 1)

    def _replace(self, runner: int, reason: str) -> None:
        log.warning("Env runner %d %s. Another is started; its questions go to the others.", runner, reason)
        self.num_replaced += 1
        group, lost = self.group, self._active.pop(runner)
        ray.kill(lost)
        actor = group._make_worker(
            env_creator=group._env_creator, validate_env=None, worker_index=runner, num_workers=len(self._active) + 1,
            recreated_worker=True, config=group._remote_config_obj_ref,
        )  # fmt: skip
        known = next(number for number, held in group._worker_manager.actors().items() if held is lost)
        group._worker_manager.remove_actor(known)
        group._worker_manager.add_actors([actor])
        self._joining[runner] = (actor, actor.apply.remote(partial(_receive, self.published)))

    def _welcome(self, wait: bool = False) -> None:
        """Takes in the new runners that are ready; ``wait`` for one."""
        while self._joining:
            refs = {ready: runner for runner, (_, ready) in self._joining.items()}
            done, _ = ray.wait(list(refs), num_returns=1, timeout=self.timeout_s if wait else 0)
            if not done:
                break
            for ref in done:
                runner = refs[ref]
                actor, _ = self._joining.pop(runner)
                ray.get(ref)
                if self.published is not None:  # newer than what it was started with
                    ray.get(actor.apply.remote(partial(_receive, self.published)))
                self._active[runner] = actor
                wait = False
        if not self._active:
            raise MHGPOError(f"no env runner is left, and none could be started within {self.timeout_s:g} s.")


def _roll(roots: Sequence[int], how: Play, runner: LLMEnvRunner) -> Rollouts:
    return runner.rollout(roots, how)


def _receive(published: Published | None, runner: LLMEnvRunner) -> None:
    if published is not None:
        runner.receive(published)
