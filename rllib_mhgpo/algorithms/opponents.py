"""Who plays the agents that are not trained: chance, an earlier policy, a function.

One idea: an opponent is an engine like any other; the trees hold its generations, and no loss does.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rllib_mhgpo.algorithms.checkpoints import policy_source
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.engines import Cast, Engine, HFEngine, VLLMEngine, Written
from rllib_mhgpo.errors import CheckpointError, ConfigError
from rllib_mhgpo.llms import eos_ids, load_model, load_tokenizer, resolve_llm
from rllib_mhgpo.llms.folders import check_context

RANDOM, PAST, PERIOD = "random", "past", "period"
FILE = "past_opponents.safetensors"
"""Where a checkpoint has the opponents ``past``."""


class Opponents:
    """The engines of policies, with other players for some agents.

    Args:
        own: by agent, the engine of the policy that it follows.
        players: who plays each other agent, as the key ``opponents`` says.
        refresh: iterations after which ``past`` becomes the present policy.
        longest: most tokens of prompt and response together.
        present: makes an engine of transformers of the policy that an agent follows, as it is now, for policies whose
            own engine is vLLM; None where policies stay as they are, so that ``past`` is the present policy too.

    Attributes:
        past: by agent, the engine of its policy as it was, one a policy.
    """

    def __init__(
        self,
        own: Mapping[str, HFEngine | VLLMEngine],
        players: Mapping[str, str],
        refresh: int,
        longest: int,
        present: Callable[[str], HFEngine] | None = None,
    ) -> None:
        self.own, self.refresh, self.present, self.period = own, refresh, present, -1
        following = [agent for agent, who in players.items() if who == PAST and present is not None]
        copies = {id(own[agent]): agent for agent in following}
        engines = {key: self._copy(agent) for key, agent in copies.items()}
        self.past = {agent: engines[id(own[agent])] for agent in following}
        sources = {agent: policy_source(who, agent) for agent, who in players.items() if who != PAST}
        made = {source: _player(source, own[agent], longest) for agent, source in sources.items()}
        others = {agent: made[source] for agent, source in sources.items()}
        self.engine = Cast(next(iter(own.values())), {**own, **others, **self.past})

    def at(self, iteration: int) -> Engine:
        """Returns the engine for an iteration; in the first of each period the past policy becomes the present one."""
        if self.past and iteration // self.refresh != self.period:
            self.period = iteration // self.refresh
            for agent, engine in {id(engine): (agent, engine) for agent, engine in self.past.items()}.values():
                engine.model.load_state_dict(self._now(agent).model.state_dict())
        return self.engine

    def _now(self, agent: str) -> HFEngine:
        """The policy of an agent as it is: its own engine, or a new one that nothing else holds."""
        own = self.own[agent]
        if isinstance(own, HFEngine):
            return own
        assert self.present is not None
        return self.present(agent)

    def _copy(self, agent: str) -> HFEngine:
        own, now = self.own[agent], self._now(agent)
        if now is own:
            now = copy.copy(now)
            now.model = copy.deepcopy(now.model)
        now.model.to(_device(own))
        return now

    def state(self) -> dict[str, Tensor]:
        """Returns which period the past policies are of and their weights, by agent and name."""
        held = {
            f"{agent}.{name}": tensor.detach().cpu().clone()
            for agent, engine in self.past.items()
            for name, tensor in engine.model.state_dict().items()
        }
        return {PERIOD: torch.tensor(self.period), **held}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`state` returned."""
        self.period = int(state[PERIOD])
        for agent, engine in self.past.items():
            names = engine.model.state_dict()
            engine.model.load_state_dict({name: state[f"{agent}.{name}"] for name in names})


def write_past(folder: Path, state: dict[str, Tensor]) -> None:
    """Writes what :meth:`Opponents.state` returned into a checkpoint."""
    save_file(state, folder / FILE)


def read_past(folder: Path) -> dict[str, Tensor] | None:
    """Reads what :func:`write_past` wrote; None where the run had no such opponents.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not (folder / FILE).is_file():
        return None
    try:
        return dict(load_file(folder / FILE))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / FILE}: the past opponents cannot be read: {error}.") from error


def _device(mine: HFEngine | VLLMEngine) -> torch.device:
    """Where opponents compute: beside the policy."""
    return mine.model.device if isinstance(mine, HFEngine) else torch.device("cuda" if mine.place.gpus else "cpu")


def _player(who: str, mine: HFEngine | VLLMEngine, longest: int) -> Engine:
    if who == RANDOM:
        return Written(random_reply, who, mine.tokenizer)
    if ":" in who and not Path(who).expanduser().is_dir():
        return Written(import_named("opponents", who, {}), who, mine.tokenizer)
    return loaded(who, mine, longest)


def random_reply(env: Any, agent: str) -> str:
    """Asks the environment for a random legal reply."""
    draw: Callable[[str], str] | None = getattr(env.unwrapped, "random_reply", None)
    if draw is None:
        raise ConfigError(f"opponents: random needs a method random_reply(agent) of {type(env.unwrapped).__name__}.")
    return draw(agent)


def loaded(name: str, mine: HFEngine | VLLMEngine, longest: int) -> HFEngine:
    """Returns an engine for a model folder, or what else the key ``llm`` takes.

    Raises:
        ConfigError: its tokenizer is another one, so that it could not read the prompts.
        ModelError: its context is too short for them.
    """
    check_context("opponents", name, longest)
    model, tokenizer = load_model(name), load_tokenizer(name)
    if tokenizer.get_vocab() != mine.tokenizer.get_vocab():
        raise ConfigError(f"opponents: {name!r} has another tokenizer than the policy and cannot read its prompts.")
    engine = HFEngine(model.to(_device(mine)), eos_ids(model, tokenizer), mine.dtype, tokenizer=tokenizer)
    engine.max_batch_tokens = getattr(mine, "max_batch_tokens", engine.max_batch_tokens)
    return engine


def check_opponents(players: Mapping[str, str]) -> None:
    """Refuses a player that :class:`Opponents` could not make, as far as it can be known beforehand."""
    for who in players.values():
        if ":" in who and not Path(who).expanduser().is_dir():
            import_named("opponents", who, {})
        elif who not in (RANDOM, PAST):
            resolve_llm(who)
