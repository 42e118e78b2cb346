"""Who plays the agents that are not trained: chance, an earlier policy, a function.

One idea: an opponent is an engine like any other; the trees hold its generations, and no loss does.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rllib_mhgpo.algorithms.checkpoints import POLICY, find_checkpoint
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.engines import Cast, Engine, HFEngine, VLLMEngine, Written
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.llms import eos_ids, load_model, load_tokenizer, resolve_llm

RANDOM, PAST = "random", "past"


class Opponents:
    """The engine of a policy, with other players for some agents.

    Args:
        mine: the policy's own engine.
        players: who plays each other agent, as the key ``opponents`` says.
        refresh: iterations after which ``past`` becomes the present policy.
    """

    def __init__(self, mine: HFEngine | VLLMEngine, players: Mapping[str, str], refresh: int) -> None:
        self.mine, self.refresh, self.period = mine, refresh, -1
        self.past: HFEngine | None = None
        made: dict[str, Engine] = {who: self._player(who) for who in set(players.values())}
        self.engine = Cast(mine, {agent: made[who] for agent, who in players.items()})

    def at(self, iteration: int) -> Engine:
        """Returns the engine for an iteration; in the first of each period the past policy becomes the present one."""
        if self.past is not None and iteration // self.refresh != self.period:
            assert isinstance(self.mine, HFEngine), "past needs the engine hf"
            self.period = iteration // self.refresh
            self.past.model.load_state_dict(self.mine.model.state_dict())
        return self.engine

    def _player(self, who: str) -> Engine:
        if who == PAST and isinstance(self.mine, HFEngine):
            self.past = copy.copy(self.mine)
            self.past.model = copy.deepcopy(self.mine.model)
            return self.past
        if who == RANDOM:
            return Written(random_reply, who, self.mine.tokenizer)
        if ":" in who and not Path(who).expanduser().is_dir():
            return Written(import_named("opponents", who, {}), who, self.mine.tokenizer)
        return loaded(who, self.mine)


def random_reply(env: Any, agent: str) -> str:
    """Asks the environment for a random legal reply."""
    draw: Callable[[str], str] | None = getattr(env.unwrapped, "random_reply", None)
    if draw is None:
        raise ConfigError(f"opponents: random needs a method random_reply(agent) of {type(env.unwrapped).__name__}.")
    return draw(agent)


def loaded(who: str, mine: HFEngine | VLLMEngine) -> HFEngine:
    """Returns an engine for the policy of a checkpoint, or of what the key ``llm`` takes.

    Raises:
        ConfigError: its tokenizer is another one, so that it could not read the prompts.
    """
    path = Path(who).expanduser()
    name = str(find_checkpoint(path) / POLICY) if path.is_dir() and not (path / "config.json").is_file() else who
    model, tokenizer = load_model(name), load_tokenizer(name)
    if tokenizer.get_vocab() != mine.tokenizer.get_vocab():
        raise ConfigError(f"opponents: {who!r} has another tokenizer than the policy and cannot read its prompts.")
    device = mine.model.device if isinstance(mine, HFEngine) else torch.device("cuda" if mine.place.gpus else "cpu")
    engine = HFEngine(model.to(device), eos_ids(model, tokenizer), mine.dtype, tokenizer=tokenizer)
    engine.max_batch_tokens = getattr(mine, "max_batch_tokens", engine.max_batch_tokens)
    return engine


def check_opponents(players: Mapping[str, str]) -> None:
    """Refuses a player that :class:`Opponents` could not make, as far as it can be known beforehand."""
    for who in players.values():
        if ":" in who and not Path(who).expanduser().is_dir():
            import_named("opponents", who, {})
        elif who not in (RANDOM, PAST):
            resolve_llm(who)
