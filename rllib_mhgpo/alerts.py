"""What goes wrong in runs, seen in their rows of numbers, each with what to try.

Pure functions of a run's history. A rule says at which iterations something holds; a number that is missing or NaN
holds nothing. Thresholds are rules of thumb, written down in docs/seeing.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, float]
Floats = NDArray[np.float64]
Holds = NDArray[np.bool_]


@dataclass(frozen=True)
class Alert:
    """Something that a person should look at.

    Attributes:
        name: which rule.
        iterations: when it held, the last one last.
        message: what was seen there.
        advice: what to try.
    """

    name: str
    iterations: tuple[int, ...]
    message: str
    advice: str

    @property
    def when(self) -> str:
        """The iterations in words."""
        first, last = self.iterations[0], self.iterations[-1]
        if first == last:
            return f"iteration {first}"
        return f"{len(self.iterations)} iterations from {first} to {last}"


class History:
    """Rows of numbers by path, as columns."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.names = list(dict.fromkeys(name for row in rows for name in row))
        self.iterations = [int(row.get("training_iteration", place)) for place, row in enumerate(rows, 1)]

    def column(self, name: str) -> Floats:
        """One number an iteration, NaN where it is missing."""
        return np.array([row.get(name, np.nan) for row in self.rows], dtype=np.float64)

    def agents(self, number: str) -> list[str]:
        """The agents that report a number of this name."""
        found = (key.removesuffix(f"/{number}") for key in self.names if key.endswith(f"/{number}"))
        return [agent for agent in found if "/" not in agent and agent not in ("train", "dev", "dev_start")]

    def policies(self, number: str) -> list[tuple[str, str]]:
        """Where each policy has a number of its own, and words that name it; one place where all share a policy."""
        places = [key.removesuffix(number) for key in self.names if key.endswith(f"/{number}")]
        own = [place for place in places if place.startswith("policies/")]
        return [(place, f" of policy {place.split('/')[1]}") for place in own] or [("", "")]

    def start(self, values: Floats) -> float:
        """The mean of the first three numbers that exist, NaN where there are none."""
        known = values[np.isfinite(values)][:3]
        return float(known.mean()) if len(known) else np.nan

    def usual(self, values: Floats) -> Floats:
        """For each iteration the median of the twenty before it, NaN where fewer than five exist."""
        usual = np.full(len(values), np.nan)
        for place in range(len(values)):
            before = values[max(0, place - 20) : place]
            before = before[np.isfinite(before)]
            if len(before) >= 5:
                usual[place] = np.median(before)
        return usual


@dataclass(frozen=True)
class Finding:
    """What a rule found: when it holds, and a message with places for the numbers of that iteration."""

    holds: Holds
    message: str
    values: Mapping[str, Floats | float | str]

    def at(self, place: int) -> str:
        """The message of one iteration."""
        found = {name: value[place] if isinstance(value, np.ndarray) else value for name, value in self.values.items()}
        return self.message.format(**found)


def no_spread(history: History) -> Iterator[Finding]:
    """All groups have equal rewards: nothing can be learned."""
    share = history.column("zero_std_share")
    message = "{share:.0%} of the groups have equal rewards: nothing is learned from them"
    yield Finding(share >= 0.99, message, {"share": share})


def illegal_outputs(history: History) -> Iterator[Finding]:
    """Half of a role's outputs are refused."""
    for agent in history.agents("illegal"):
        share = history.column(f"{agent}/illegal")
        message = "{share:.0%} of the outputs of {agent} are illegal"
        yield Finding(share >= 0.5, message, {"share": share, "agent": agent})


def truncated_prompts(history: History) -> Iterator[Finding]:
    """Passages are left out of every second prompt."""
    for agent in history.agents("passages_left_out"):
        left = history.column(f"{agent}/passages_left_out")
        message = "{left:.1f} passages a prompt of {agent} did not fit into it"
        yield Finding(left >= 0.5, message, {"left": left, "agent": agent})


def truncated_responses(history: History) -> Iterator[Finding]:
    """A quarter of a role's responses are cut off."""
    for agent in history.agents("truncated_share"):
        share = history.column(f"{agent}/truncated_share")
        message = "{share:.0%} of the responses of {agent} are cut off"
        yield Finding(share >= 0.25, message, {"share": share, "agent": agent})


def engine_drift(history: History) -> Iterator[Finding]:
    """Engine and learner disagree about what was sampled."""
    for place, whose in history.policies("engine_logprob_diff"):
        gap, kl = history.column(f"{place}engine_logprob_diff"), history.column(f"{place}engine_kl")
        message = "log-probabilities of engine and learner{whose} differ by {gap:.3f} a token"
        yield Finding(gap >= 0.05, message, {"gap": gap, "whose": whose})
        message = "the KL of the engine's to the learner's distribution{whose} is {kl:.4f} a token"
        yield Finding(kl >= 0.02, message, {"kl": kl, "whose": whose})


def entropy_collapse(history: History) -> Iterator[Finding]:
    """A role's entropy has fallen to a tenth."""
    for agent in history.agents("entropy"):
        entropy = history.column(f"{agent}/entropy")
        start = history.start(entropy)
        message = "the entropy of {agent} is {entropy:.3f} nats a token, {start:.3f} at the start"
        holds = (entropy <= 0.1 * start) & (start > 0.05)
        yield Finding(holds, message, {"agent": agent, "entropy": entropy, "start": start})


def kl_runaway(history: History) -> Iterator[Finding]:
    """The policy has run from its reference, in the mean over roles or, four times as far, in one role alone."""
    for place, whose, far in [("", "", 0.5), *((f"{agent}/", f" of {agent}", 2.0) for agent in history.agents("kl"))]:
        kl = history.column(f"{place}kl")
        leap = (kl >= 10 * history.usual(kl)) & (kl >= far / 10)
        yield Finding(
            (kl >= far) | leap, "the KL{whose} to the reference is {kl:.3f} a token", {"kl": kl, "whose": whose}
        )


def reward_without_score(history: History) -> Iterator[Finding]:
    """The training reward has risen since the best evaluation, and dev F1 has fallen by more than chance."""
    score, questions = history.column("dev/f1"), history.column("dev/questions")
    asked, reward = history.column("dev/iteration"), history.column("reward")
    holds = np.zeros(len(score), dtype=bool)
    best = np.zeros(len(score), dtype=np.int64)
    for place in np.flatnonzero(np.isfinite(score)):
        before = best[place - 1] if place else place
        best[place:] = before if score[before] >= score[place] else place
        chance = sqrt(0.25 / questions[place]) if questions[place] > 0 else 0.0
        fell = score[place] < score[before] - max(0.02, 2 * chance) and asked[place] != asked[before]
        holds[place] = fell and reward[place] > reward[before]
    message = (
        "the reward has risen from {start:.3f} to {reward:.3f} while dev F1 has fallen from {best:.3f} to {score:.3f}"
    )
    if len(score):
        yield Finding(holds, message, {"start": reward[best], "reward": reward, "best": score[best], "score": score})


def falling_recall(history: History) -> Iterator[Finding]:
    """Less of what supports the answer is found than before."""
    for agent in history.agents("recall"):
        recall = history.column(f"{agent}/recall")
        smooth = np.full(len(recall), np.nan)
        for place in range(2, len(recall)):
            smooth[place] = recall[place - 2 : place + 1].mean()
        best = np.fmax.accumulate(smooth)
        message = "the recall of {agent} has fallen from {best:.2f} to {smooth:.2f} (means of three iterations)"
        yield Finding(smooth <= best - 0.1, message, {"agent": agent, "best": best, "smooth": smooth})


def gradient_spikes(history: History) -> Iterator[Finding]:
    """A gradient ten times the usual, or one that was not finite."""
    norm, skipped = history.column("grad_norm"), history.column("skipped_steps")
    usual = history.usual(norm)
    message = "the gradient's norm is {norm:.3g}, usually {usual:.3g}"
    yield Finding(norm >= 10 * usual, message, {"norm": norm, "usual": usual})
    message = "{skipped:.0f} optimiser steps were left out: their gradient was not finite"
    yield Finding(skipped > 0, message, {"skipped": skipped})


RULES: dict[Callable[[History], Iterator[Finding]], str] = {
    no_spread: "raise group_size or temperature, take harder or easier questions, or set refill_rounds",
    illegal_outputs: "look at them with rllib trees; make the role's prompt or parser clearer, or start from a policy "
    "that knows the form",
    truncated_prompts: "raise max_prompt_tokens, lower env_config.top_k, or shorten the passages (passage_chars)",
    truncated_responses: "raise max_response_tokens of that role, or set overlong_penalty_tokens",
    engine_drift: "see what rllib doctor says; usual causes are bfloat16 (float32 shows whether it is that), another "
    "attention kernel, weights that do not arrive, prefixes cached under old weights, responses sampled ahead; "
    "rollout_is_cap (such as 2) corrects what remains",
    entropy_collapse: "set entropy_coeff, raise kl_beta or clip_high, or lower lr",
    kl_runaway: "raise kl_beta, lower lr or num_epochs; go back to an earlier checkpoint; max_kl stops such a run",
    reward_without_score: "the reward is being learned instead of the task: look at answers with rllib trees, "
    "check the reward and its penalties; take the best checkpoint",
    falling_recall: "look at the queries with rllib trees; check that the rewriter's reward reaches it, raise kl_beta",
    gradient_spikes: "lower lr or grad_clip, and look at that iteration's rollouts",
}
"""Every rule and what to try where it holds."""


def find_alerts(rows: Sequence[Row]) -> list[Alert]:
    """Returns what holds or held in a run, one alert for each rule and role, those that hold now first."""
    history, alerts = History(rows), []
    with np.errstate(invalid="ignore"):
        for rule, advice in RULES.items():
            for found in rule(history):
                places = np.flatnonzero(found.holds)
                if len(places):
                    iterations = tuple(history.iterations[place] for place in places)
                    name = rule.__name__.replace("_", " ")
                    alerts.append(Alert(name, iterations, found.at(int(places[-1])), advice))
    return sorted(alerts, key=lambda alert: -alert.iterations[-1])


def new_alerts(rows: Sequence[Row]) -> list[Alert]:
    """Returns what holds at the last iteration and did not at the one before."""
    if not rows:
        return []
    now = History(rows).iterations
    before = now[-2] if len(now) > 1 else None
    return [a for a in find_alerts(rows) if a.iterations[-1] == now[-1] and before not in a.iterations]


def numbers_by_path(result: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns the numbers of a nested result by their path; NaN stays NaN.

    >>> numbers_by_path({"dev": {"f1": 0.5}, "done": False, "date": "today"})
    {'dev/f1': 0.5}
    """
    numbers: dict[str, float] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            numbers |= numbers_by_path(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers
