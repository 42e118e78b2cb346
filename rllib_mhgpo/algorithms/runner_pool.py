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
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_mhgpo.errors import EngineError, MHGPOError
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
        actor: the runner itself; by the time it fails another may have its index.
        tries: how often they have been dealt.
        since: when they were dealt, or when they were first waited for.
    """

    runner: int
    actor: ActorHandle
    roots: Sequence[int]
    how: Play
    tries: int = 1
    since: float = 0.0


@dataclass
class RunnerPool:
    """The runners of an RLlib group.

    Attributes:
        group: local and remote runners.
        timeout_s: how long a runner may take for its roots, or for new weights.
        versions_apart: how far apart the weights of one batch's runners may be; 1 where batches are sampled ahead.
        has_past: past policies play opponents; a new runner gets those that the others have.
        num_replaced: runners that were lost so far.
        republish: puts the weights where a new runner finds them, if they travel otherwise.
    """

    group: EnvRunnerGroup
    timeout_s: float
    versions_apart: int = 0
    has_past: bool = False
    num_replaced: int = 0
    published: Published | None = None
    republish: Callable[[], Published] | None = None
    _active: dict[int, ActorHandle] = field(default_factory=dict)
    _joining: dict[int, tuple[ActorHandle, ray.ObjectRef]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._active = dict(self.group._worker_manager.actors())

    @property
    def local(self) -> LLMEnvRunner | None:
        """The runner in this process, where there are no others."""
        local: LLMEnvRunner | None = self.group.local_env_runner
        return None if self._active or self._joining else local

    @property
    def actors(self) -> list[ActorHandle]:
        """The runners at work."""
        return list(self._active.values())

    def first(self, function: Call) -> Any:
        """Returns what a function returns of any runner."""
        if self.local is not None:
            return function(self.local)
        return ray.get(next(iter(self._active.values())).apply.remote(function))

    def each(self, function: Call) -> list[Any]:
        """Returns what a function returns of every runner."""
        if self.local is not None:
            return [function(self.local)]
        return [_result(actor.apply.remote(function), self.timeout_s) for actor in self._active.values()]

    def roll_out(self, roots: Sequence[int], how: Play) -> list[Rollouts]:
        """Plays the roots on all runners."""
        return self.finish(self.start(roots, how)) if self.local is None else [self.local.rollout(roots, how)]

    def start(self, roots: Sequence[int], how: Play) -> Deals:
        """Deals roots to the runners and returns at once."""
        self._welcome(wait=not self._active)
        return self._deal(list(roots), how, list(self._active))

    def finish(self, deals: Deals) -> list[Rollouts]:
        """Waits for all that was dealt.

        Raises:
            MHGPOError: roots on which runners die or stall again and again, or no runner is left.
        """
        waiting, parts, now = dict(deals), [], time.monotonic()
        for deal in waiting.values():
            deal.since = now
        while waiting:
            soonest = min(deal.since for deal in waiting.values()) + self.timeout_s
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, soonest - time.monotonic()))
            lost: list[tuple[Deal, str]] = []
            for ref in done:
                deal = waiting.pop(ref)
                try:
                    parts.append(_result(ref))
                except (RayActorError, ObjectLostError, EngineError) as error:
                    lost.append((deal, f"died: {str(error).splitlines()[0]}"))
            if not done:
                late = [ref for ref, deal in waiting.items() if deal.since + self.timeout_s <= time.monotonic()]
                lost = [(waiting.pop(ref), f"took longer than sample_timeout_s = {self.timeout_s:g} s") for ref in late]
            for deal, reason in lost:
                if self._active.get(deal.runner) is deal.actor:
                    self._replace(deal.runner, reason)
            for deal, reason in lost:
                waiting |= self._again(deal, reason)
        versions = sorted({part.weights_seq_no for part in parts})
        if versions and versions[-1] - versions[0] > self.versions_apart:
            raise MHGPOError(f"runners hold different weights: versions {versions}.")
        return parts

    def hand_over(self, published: Published) -> float:
        """Gives all runners new weights, and those that join later; returns the largest of what they return.

        Raises:
            SyncError: a runner's engine does not compute with them.
        """
        self.published = published
        if self.local is not None:
            return self.local.receive(published)
        apart = 0.0
        calls = {index: actor.apply.remote(partial(_receive, published)) for index, actor in self._active.items()}
        for index, call in calls.items():
            try:
                apart = max(apart, _result(call, self.timeout_s))
            except (RayActorError, EngineError) as error:
                self._replace(index, f"died: {str(error).splitlines()[0]}")
            except GetTimeoutError:
                self._replace(index, f"took no new weights within sample_timeout_s = {self.timeout_s:g} s")
        return apart

    def sleep(self) -> None:
        """Lets the runners' engines give up the memory of GPUs that learners share, until the next weights."""
        if self.local is not None:
            self.local.sleep()
        calls = {index: actor.apply.remote(LLMEnvRunner.sleep) for index, actor in self._active.items()}
        for index, call in calls.items():
            try:
                _result(call, self.timeout_s)
            except (RayActorError, EngineError) as error:
                self._replace(index, f"died: {str(error).splitlines()[0]}")
            except GetTimeoutError:
                self._replace(index, f"did not go to sleep within sample_timeout_s = {self.timeout_s:g} s")

    def _deal(self, roots: list[int], how: Play, runners: Sequence[int], tries: int = 1) -> Deals:
        deals: Deals = {}
        for place, runner in enumerate(runners):
            if mine := roots[place :: len(runners)]:
                actor = self._active[runner]
                ref = actor.apply.remote(partial(_roll, mine, how))
                deals[ref] = Deal(runner, actor, mine, how, tries, time.monotonic())
        return deals

    def _again(self, deal: Deal, reason: str) -> Deals:
        """Deals the roots of a lost runner to the others."""
        if deal.tries == MOST_TRIES:
            raise MHGPOError(f"{MOST_TRIES} runners were lost on the questions {list(deal.roots)}; the last {reason}")
        if not self._active:
            self._welcome(wait=True)
        return self._deal(list(deal.roots), deal.how, list(self._active), deal.tries + 1)

    def _replace(self, runner: int, reason: str) -> None:
        log.warning("Env runner %d %s. Another is started; its questions go to the others.", runner, reason)
        self.num_replaced += 1
        lost = self._active.pop(runner)
        ray.kill(lost)
        self._start(runner, lost)

    def _start(self, runner: int, lost: ActorHandle) -> None:
        """Starts a runner in the place of a lost one; it joins when it is ready."""
        group = self.group
        if self.republish is not None and self.published is not None:
            self.published = self.republish()
        actor = group._make_worker(
            env_creator=group._env_creator, validate_env=None, worker_index=runner, num_workers=len(self._active) + 1,
            recreated_worker=True, config=group._remote_config_obj_ref,
        )  # fmt: skip
        known = next(number for number, held in group._worker_manager.actors().items() if held is lost)
        group._worker_manager.remove_actor(known)
        group._worker_manager.add_actors([actor])
        self._joining[runner] = (actor, actor.apply.remote(partial(_receive, self.published)))

    def _welcome(self, wait: bool = False) -> None:
        """Takes in the new runners that are ready; ``wait`` for one.

        Raises:
            MHGPOError: no runner is left, and none could be started.
        """
        failed = 0
        while self._joining and failed < MOST_TRIES:
            refs = {ready: runner for runner, (_, ready) in self._joining.items()}
            done, _ = ray.wait(list(refs), num_returns=1, timeout=self.timeout_s if wait else 0)
            if not done:
                break
            runner = refs[done[0]]
            actor, ready = self._joining.pop(runner)
            try:
                _result(ready)
                if self.published is not None and self.published.transferred and self.republish is not None:
                    self.published = self.republish()  # what went from GPU to GPU has passed it by
                if self.published is not None:  # newer than what it was started with
                    _result(actor.apply.remote(partial(_receive, self.published)), self.timeout_s)
                if self.has_past and self._active:
                    past = next(iter(self._active.values())).apply.remote(lambda held: held.opponents.state())
                    _result(actor.apply.remote(lambda new, state: new.opponents.set_state(state), past), self.timeout_s)
            except (RayActorError, GetTimeoutError, EngineError) as error:
                failed += 1
                log.warning("Env runner %d could not be started: %s", runner, str(error).splitlines()[0])
                ray.kill(actor)
                self._start(runner, actor)
                continue
            self._active[runner] = actor
            wait = False
        if not self._active:
            raise MHGPOError(f"no env runner is left, and none could be started within {self.timeout_s:g} s.")


def _roll(roots: Sequence[int], how: Play, runner: LLMEnvRunner) -> Rollouts:
    return runner.rollout(roots, how)


def _receive(published: Published | None, runner: LLMEnvRunner) -> float:
    return 0.0 if published is None else runner.receive(published)


def _result(ref: ray.ObjectRef, timeout_s: float | None = None) -> Any:
    """Returns what a runner returned, or raises its own error without the trace of the way it came."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, MHGPOError):
            raise error.cause from None
        raise
