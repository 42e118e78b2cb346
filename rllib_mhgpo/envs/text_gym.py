"""A Gymnasium environment as one agent: it reads observations as text and replies with actions.

Texts pass as they are (:class:`gymnasium.spaces.Text`); discrete actions have names, as in
:class:`rllib_mhgpo.envs.text_game.TextGame`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from rllib_mhgpo.envs.moves import Moves, import_object, renderer
from rllib_mhgpo.envs.text_game import DEV_SEEDS, check_template, penalties_of
from rllib_mhgpo.envs.token_env import Messages, TokenEnv
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.kinds import whole_number

AGENT = "agent"


class TextGym(TokenEnv):
    """One agent in a Gymnasium environment; root i is the environment reset with seed i.

    Args:
        env: a Gymnasium id, ``module:Class``, or a class.
        config: its keyword arguments.
        render: ``module:function`` that writes an observation; :func:`rllib_mhgpo.envs.moves.render` when None.
        moves: names of discrete actions, in order; their numbers when None.
        template: what the agent reads; ``{board}`` is the observation, ``{moves}`` the legal moves. By default a text
            alone where actions are texts.
        penalties: what a reply costs that is no action, as in ``TextGame``.
        dev_roots, max_turns: as in ``TextGame``.
        tokenizer, max_prompt_tokens, max_response_tokens: see :class:`TokenEnv`.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "text_gym_v0", "render_modes": ["ansi"], "is_parallelizable": False}
    shared: ClassVar[tuple[str, ...]] = (*TokenEnv.shared, "moves", "written", "penalties")

    def __init__(
        self,
        env: str | type,
        config: Mapping[str, Any] | None = None,
        render: str | Callable[[Any], str] | None = None,
        moves: Sequence[Any] | None = None,
        template: str | None = None,
        penalties: bool | Mapping[str, float] = True,
        dev_roots: int = 100,
        max_turns: int = 200,
        tokenizer: Any = "tiny",
        max_prompt_tokens: int = 1024,
        max_response_tokens: int = 128,
    ) -> None:
        super().__init__([AGENT], tokenizer, max_prompt_tokens, max_response_tokens)
        self.env = make_gym(env, config or {})
        space = self.env.action_space
        self.moves = None if isinstance(space, Text) else Moves(space, moves, str(env))
        self.template = check_template(template or ("{board}" if self.moves is None else "{board}\nmove:"))
        self.written = renderer(render)
        self.penalties = penalties_of(penalties, [AGENT])
        self.dev_roots, self.max_turns = whole_number("dev_roots", dev_roots, 0), whole_number("max_turns", max_turns)

    def num_roots(self, split: str = "train") -> int:
        """Returns how many seeds a split has."""
        return {"dev": self.dev_roots}.get(split, super().num_roots(split))

    def start(self, index: int, split: str) -> None:
        """Resets the environment with the root's seed."""
        self.seen, self.info = self.env.reset(seed=index + DEV_SEEDS * (split == "dev"))
        self.ended, self.total = False, 0.0

    def prompt(self, agent: str) -> Messages:
        """Writes what is observed."""
        return self.template.format(board=self.written(self.seen), moves=" ".join(self.legal()), agent=agent)

    def act(self, agent: str, text: str) -> None:
        """Takes the reply as the action; a reply that is none costs the penalty, and a random action is taken."""
        action = self.action_of(text)
        self.reward(agent, self.penalties[agent] if action is None else 0.0)
        self.measure(agent, illegal=float(action is None))
        taken = self.random_action() if action is None else action
        self.seen, earned, terminated, truncated, self.info = self.env.step(taken)
        self.ended, self.total = bool(terminated or truncated), self.total + float(earned)
        self.rewards[agent] += float(earned)
        self.score(**{"return": self.total})

    def next_agent(self) -> str | None:
        """The agent, until the environment ends."""
        return None if self.ended else AGENT

    def summary(self) -> dict[str, object]:
        """Returns what was earned."""
        return {"return": self.total}

    def reseed(self, seed: int) -> None:
        """Gives a fork noise of its own, in the environment too."""
        super().reseed(seed)
        self.env.unwrapped.np_random = np.random.default_rng(seed)

    def legal(self) -> list[str]:
        """Names the discrete actions that the info's ``action_mask`` allows."""
        return [] if self.moves is None else self.moves.legal(self.info.get("action_mask"))

    def action_of(self, text: str) -> Any:
        """Returns the action that a reply is, None where it is none."""
        if self.moves is None:
            return text if self.env.action_space.contains(text) else None
        move = self.moves.read(text, self.legal())
        return None if move is None else self.moves.action(move)

    def random_action(self) -> Any:
        """Draws a discrete action that is allowed, or a text of the action space."""
        if self.moves is not None:
            return self.moves.action(str(self.np_random.choice(self.legal())))
        self.env.action_space.seed(int(self.np_random.integers(2**31)))
        return self.env.action_space.sample()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()  # type: ignore[no-untyped-call]


def make_gym(env: str | type, config: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Builds a Gymnasium environment.

    Raises:
        ConfigError: no such environment, or arguments that it refuses.
    """
    if isinstance(env, str) and ":" in env and env.rpartition(":")[2] not in gymnasium.registry:
        env = import_object("env", env)
    try:
        made = gymnasium.make(env, **config) if isinstance(env, str) else env(**config)
    except Exception as error:
        raise ConfigError(f"env_config: the environment {env!r} cannot be made: {error}") from error
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(f"env_config.env: expected a Gymnasium environment, found {made!r}.")
    return made
