"""Who plays whom: other engines, or written policies, in the place of some agents."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from rllib_mhgpo.engines.base import Completion, Engine, Prompt
from rllib_mhgpo.errors import ConfigError


class Cast(Engine):
    """An engine that hands each agent's prompts to the engine that plays it.

    Args:
        default: plays every agent that ``others`` does not name.
        others: engines by agent.
    """

    def __init__(self, default: Engine, others: Mapping[str, Engine]) -> None:
        self.default, self.others = default, others

    def generate(self, prompts: Sequence[Prompt], temperature: float) -> list[list[Completion]]:
        """Calls each engine once, with all of its prompts."""
        engines = [self.others.get(prompt.agent, self.default) for prompt in prompts]
        said: dict[int, list[Completion]] = {}
        for engine in {id(engine): engine for engine in engines}.values():
            mine = [i for i, other in enumerate(engines) if other is engine]
            said |= zip(mine, engine.generate([prompts[i] for i in mine], temperature), strict=True)
        return [said[i] for i in range(len(prompts))]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Gives the default engine new weights."""
        self.default.load_weights(weights)

    @contextmanager
    def remembering(self, held: list[Any] | None = None) -> Iterator[None]:
        """The context in which every engine remembers, all together as much as one."""
        shared = [] if held is None else held
        with ExitStack() as stack:
            for engine in {id(engine): engine for engine in (self.default, *self.others.values())}.values():
                stack.enter_context(engine.remembering(shared))
            yield


class Written(Engine):
    """An engine that needs no model: a function of the environment and the acting agent writes the text.

    Args:
        write: called as ``write(env, agent)``.
        name: of the policy, for messages.
        tokenizer: the environment's own when None.
    """

    def __init__(self, write: Callable[[Any, str], str], name: str, tokenizer: Any = None) -> None:
        self.write, self.name, self.tokenizer = write, name, tokenizer

    def generate(self, prompts: Sequence[Prompt], temperature: float) -> list[list[Completion]]:
        """Writes each prompt's response as often as it has seeds; log-probabilities are 0."""
        return [[self._complete(prompt)] * len(prompt.seeds) for prompt in prompts]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Has none."""

    def _complete(self, prompt: Prompt) -> Completion:
        try:
            text = self.write(prompt.env, prompt.agent)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"roles: {self.name!r} failed as agent {prompt.agent!r}: {error!r}.") from error
        if not isinstance(text, str):
            raise ConfigError(f"roles: {self.name!r} as agent {prompt.agent!r}: expected a text, found {text!r}.")
        tokenizer = self.tokenizer or prompt.env.tokenizer
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), truncated=False)
