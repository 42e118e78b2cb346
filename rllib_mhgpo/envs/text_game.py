"""Any PettingZoo game with discrete actions, played by text.

The acting agent reads what it observes and which moves are legal, and replies with the name of one. Every agent is a
team of its own and earns the game's rewards; nothing of the game itself is here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

from rllib_mhgpo.envs.moves import Moves, import_object, renderer
from rllib_mhgpo.envs.token_env import Messages, TokenEnv
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.kinds import check_kind, whole_number

DEV_SEEDS = 2**31
"""Dev roots begin here, train roots at 0."""


class TextGame(TokenEnv):
    """A game as text; root i is the game reset with seed i.

    Args:
        game: a PettingZoo module, such as ``pettingzoo.classic.tictactoe_v3``, or ``module:function`` that makes an AEC
            or a parallel environment, such as ``mpe2.simple_spread_v3:parallel_env``.
        game_config: keyword arguments of the game.
        render: ``module:function`` that writes an observation; :func:`rllib_mhgpo.envs.moves.render` when None.
        moves: names of the moves, in the order of the actions; their numbers when None.
        template: what an agent reads; ``{board}``, ``{moves}`` and ``{agent}`` are filled in.
        teams: team by agent where agents earn together; by default each is a team of its own.
        penalties: an illegal reply costs 1; False for nothing, or a value by agent. A random legal move is played
            in its place, and ``illegal`` counts it.
        dev_roots: how many seeds the dev split has.
        max_turns: acts after which a game is cut off.
        tokenizer, max_prompt_tokens, max_response_tokens: see :class:`TokenEnv`.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "text_game_v0", "render_modes": ["ansi"], "is_parallelizable": False}
    shared: ClassVar[tuple[str, ...]] = (*TokenEnv.shared, "moves", "written", "penalties", "teams")

    def __init__(
        self,
        game: str = "pettingzoo.classic.tictactoe_v3",
        game_config: Mapping[str, Any] | None = None,
        render: str | Callable[[Any], str] | None = None,
        moves: Sequence[Any] | None = None,
        template: str = "{board}\nmoves: {moves}\nmove:",
        teams: Mapping[str, str] | None = None,
        penalties: bool | Mapping[str, float] = True,
        dev_roots: int = 100,
        max_turns: int = 200,
        tokenizer: Any = "tiny",
        max_prompt_tokens: int = 1024,
        max_response_tokens: int = 128,
    ) -> None:
        self.game = make_game(game, game_config or {})
        agents = list(self.game.possible_agents)
        super().__init__(agents, tokenizer, max_prompt_tokens, max_response_tokens)
        self.moves = {agent: Moves(self.game.action_space(agent), moves, agent) for agent in agents}
        self.written = renderer(render)
        self.template = check_template(template)
        self.teams = {**{agent: agent for agent in agents}, **by_agent("teams", teams or {}, agents)}
        self.penalties = penalties_of(penalties, agents)
        self.dev_roots, self.max_turns = whole_number("dev_roots", dev_roots, 0), whole_number("max_turns", max_turns)

    def num_roots(self, split: str = "train") -> int:
        """Returns how many seeds a split has."""
        return {"dev": self.dev_roots}.get(split, super().num_roots(split))

    def start(self, index: int, split: str) -> None:
        """Resets the game with the root's seed."""
        self.game.reset(seed=index + DEV_SEEDS * (split == "dev"))
        self.returns = dict.fromkeys(self.possible_agents, 0.0)
        self._settle()
        for agent in self.agents:
            self.infos[agent]["team"] = self.teams[agent]

    def prompt(self, agent: str) -> Messages:
        """Writes what the agent observes and may play."""
        board = self.written(self.game.observe(agent))
        return self.template.format(board=board, moves=" ".join(self.legal(agent)), agent=agent)

    def act(self, agent: str, text: str) -> None:
        """Plays the move that the reply names, or a random legal one where it names none."""
        legal = self.legal(agent)
        move = self.moves[agent].read(text, legal)
        self.reward(agent, self.penalties[agent] if move is None else 0.0)
        self.measure(agent, illegal=float(move is None))
        self.game.step(self.moves[agent].action(self.random_reply(agent) if move is None else move))
        for other, earned in self.game.rewards.items():
            self.returns[other] += float(earned)
            self.rewards[other] += float(earned)
        self._settle()
        self.score(**{f"{name}_return": earned for name, earned in self.returns.items()})

    def next_agent(self) -> str | None:
        """The game says."""
        return self.game.agent_selection if self.game.agents else None

    def summary(self) -> dict[str, object]:
        """Returns what each agent earned."""
        return {"returns": self.returns}

    def reseed(self, seed: int) -> None:
        """Gives a fork noise of its own, in the game too."""
        super().reseed(seed)
        if isinstance(getattr(self.game.unwrapped, "np_random", None), np.random.Generator):
            self.game.unwrapped.np_random = np.random.default_rng(seed)

    def legal(self, agent: str) -> list[str]:
        """Names the moves that the agent may play; what it observes or its info may hold an ``action_mask``."""
        seen = self.game.observe(agent)
        mask = seen.get("action_mask") if isinstance(seen, Mapping) else None
        return self.moves[agent].legal(self.game.infos[agent].get("action_mask") if mask is None else mask)

    def random_reply(self, agent: str) -> str:
        """Draws a legal move, uniformly."""
        return str(self.np_random.choice(self.legal(agent)))

    def _settle(self) -> None:
        """Lets agents that have ended leave the game."""
        game = self.game
        while game.agents and (game.terminations[game.agent_selection] or game.truncations[game.agent_selection]):
            game.step(None)


def make_game(game: str, config: Mapping[str, Any]) -> AECEnv:
    """Builds a game; a parallel one goes through PettingZoo's own wrapper.

    Raises:
        ConfigError: no such game, arguments that it refuses, or agents that cannot be known beforehand.
    """
    found = import_object("game", game)
    make = getattr(found, "env", None) if isinstance(found, ModuleType) else found
    if not callable(make):
        raise ConfigError(f"env_config.game: expected a PettingZoo module or module:function, found {game!r}.")
    try:
        made = make(**config)
    except Exception as error:
        raise ConfigError(f"env_config.game_config: {game} refuses it: {error}") from error
    if isinstance(made, ParallelEnv):
        made = parallel_to_aec(made)
    if not isinstance(made, AECEnv):
        raise ConfigError(f"env_config.game: expected a PettingZoo environment, {game!r} makes {made!r}.")
    if not getattr(made, "possible_agents", None):
        raise ConfigError(f"env_config.game: {game} does not say its possible_agents, which learning has to know.")
    return made


def check_template(template: str) -> str:
    """Returns the template, or raises a ConfigError where it has other fields than are filled in."""
    try:
        template.format(board="", moves="", agent="")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"env_config.template: expected the fields {{board}}, {{moves}}, {{agent}}; found {error} in {template!r}."
        ) from None
    return template


def by_agent(key: str, values: Mapping[str, Any], agents: Sequence[str]) -> dict[str, Any]:
    """Returns values by agent, or raises a ConfigError for an agent that is not there."""
    for agent in values:
        if agent not in agents:
            raise ConfigError(f"{key}: no agent {agent!r}; agents: {', '.join(agents)}." + did_you_mean(agent, agents))
    return dict(values)


def penalties_of(penalties: bool | Mapping[str, float], agents: Sequence[str]) -> dict[str, float]:
    """Returns what an illegal reply of each agent earns: -1, nothing, or a value by agent."""
    check_kind("penalties", penalties, bool | Mapping)
    defaults = dict.fromkeys(agents, -1.0 * (penalties is not False))
    if isinstance(penalties, bool):
        return defaults
    for agent, value in penalties.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value <= 0:
            raise ConfigError(f"penalties.{agent}: expected a number of at most 0, found {value!r}.")
    return {**defaults, **by_agent("penalties", penalties, agents)}
