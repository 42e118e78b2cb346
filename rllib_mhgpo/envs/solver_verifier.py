"""Arithmetic in two rounds: a solver answers, a verifier comments, the solver answers again.

Two agents of one policy; nothing is retrieved. The last answer decides what both earn; a reply without form costs its
agent alone.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from rllib_mhgpo.envs.token_env import Messages, TokenEnv
from rllib_mhgpo.errors import ConfigError

SOLVER, VERIFIER = "solver", "verifier"
COMMENTS = ("right", "wrong")
LARGEST = 9
SPLITS = {"train": 600, "dev": 200, "test": 200}
"""The 1,000 sums of three digits, dealt once: none is in two splits."""


class SolverVerifierEnv(TokenEnv):
    """The solver says a sum of three digits, the verifier ``right`` or ``wrong``, the solver says it once more.

    Args:
        penalties: what a reply without form costs (a number; ``right`` or ``wrong``): 0.5, or False for nothing.
        tokenizer, max_prompt_tokens, max_response_tokens: see :class:`TokenEnv`.

    Rewards: 1 for both when the last answer is right.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "solver_verifier_v0", "render_modes": ["ansi"], "is_parallelizable": False
    }  # fmt: skip

    def __init__(
        self,
        penalties: bool = True,
        tokenizer: Any = "mini",
        max_prompt_tokens: int = 64,
        max_response_tokens: int = 8,
    ) -> None:
        if not isinstance(penalties, bool):
            raise ConfigError(f"penalties: expected true or false, found {penalties!r}.")
        super().__init__([SOLVER, VERIFIER], tokenizer, max_prompt_tokens, max_response_tokens)
        self.penalty = -0.5 * penalties

    def num_roots(self, split: str = "train") -> int:
        """Returns the number of sums of a split."""
        return SPLITS.get(split, 0)

    def start(self, index: int, split: str) -> None:
        """Takes a sum."""
        self.digits = sums(split)[index]
        self.said: list[str] = []

    def prompt(self, agent: str) -> Messages:
        """The sum and all that was said of it."""
        return written(self.digits, self.said)

    def act(self, agent: str, text: str) -> None:
        """Notes the answer or the comment; pays at the end."""
        said = text.strip()
        legal = said in COMMENTS if agent == VERIFIER else said.isdecimal()
        self.said.append(said if legal else "?")
        self.reward(agent, 0.0 if legal else self.penalty)
        is_right = self.said[-1 if agent == SOLVER else -2] == str(sum(self.digits))
        if agent == VERIFIER:
            self.measure(agent, illegal=float(not legal), correct=float(said == COMMENTS[not is_right]))
        else:
            self.measure(agent, illegal=float(not legal), correct=float(is_right))
        if self.next_agent() is None:
            self.reward_all(float(is_right))
            self.score(acc=float(is_right), first=float(self.said[0] == str(sum(self.digits))))

    def next_agent(self) -> str | None:
        """Solver, verifier, solver."""
        return (SOLVER, VERIFIER, SOLVER, None)[len(self.said)]

    def summary(self) -> dict[str, object]:
        """Returns the sum and what was said."""
        return {"question": written(self.digits, ()), "said": self.said, "gold": str(sum(self.digits))}


def written(digits: tuple[int, ...], said: Sequence[str]) -> str:
    """Writes what is read after ``said``; each act's prompt ends otherwise, so that none looks like another's reply.

    >>> written((3, 4, 5), ["12"]), written((3, 4, 5), ["12", "right"])
    ('3 + 4 + 5 = 12 ?', '3 + 4 + 5 = 12 ? right ; =')
    """
    parts = [" + ".join(map(str, digits)), "="]
    for text, sign in zip(said, ("?", "; ="), strict=False):
        parts += [text, sign]
    return " ".join(parts)


def sums(split: str) -> Sequence[tuple[int, ...]]:
    """Returns a split's sums; the same in every process."""
    every = [(a, b, c) for a in range(LARGEST + 1) for b in range(LARGEST + 1) for c in range(LARGEST + 1)]
    Random(0).shuffle(every)
    start = sum(SPLITS[name] for name in list(SPLITS)[: list(SPLITS).index(split)])
    return every[start : start + SPLITS[split]]
