"""Generation with the training module itself: no second copy of the weights, no token of a wave's prompts read twice.

The key-value cache has its room from the start, so that a step copies nothing, and finished responses leave the batch.
Each response is drawn by inverting the distribution function at uniform numbers of its own seed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rllib_mhgpo.engines.base import Completion, Engine, Prompt
from rllib_mhgpo.engines.reading import Memory, read_prompts
from rllib_mhgpo.errors import ModelError
from rllib_mhgpo.modules.scoring import sharing_of
from rllib_mhgpo.packing import Sharing
from rllib_mhgpo.spaces import Tokens

COMPACT_BELOW = 0.75
STOP_TOKENS = 16
"""A stop text is looked for among so many last tokens."""


class Row:
    """One response while it grows."""

    def __init__(self, prompt: int, seed: int, max_tokens: int, stop: tuple[str, ...] = ()) -> None:
        self.prompt, self.seed, self.max_tokens, self.stop = prompt, seed, max_tokens, stop
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.ended = self.truncated = False

    def uniforms(self) -> NDArray[np.float64]:
        """The numbers in [0, 1) that decide this response, (max_tokens,)."""
        return np.random.Generator(np.random.Philox(self.seed)).random(self.max_tokens)


class HFEngine(Engine):
    """Samples from a transformers model that it shares with its owner.

    Args:
        model: any causal LM.
        eos_ids: ids that end a response.
        dtype: of the forward pass; bfloat16 runs under autocast.
        max_batch_tokens: room of the key-value cache, in tokens over all rows; bounds memory.
        tokenizer: needed where prompts have stop texts.
        act_as: called with an agent's name before its responses are drawn, where agents differ in their weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Sequence[int],
        dtype: torch.dtype = torch.float32,
        max_batch_tokens: int = 32768,
        tokenizer: Any = None,
        act_as: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer, self.act_as = tokenizer, act_as
        self.memories: defaultdict[str, Memory] | None = None  # by agent, whose weights may differ
        self.model, self.eos_ids, self.dtype, self.max_batch_tokens = model, frozenset(eos_ids), dtype, max_batch_tokens

    @cached_property
    def sharing(self) -> Sharing:
        """When prompts share a row."""
        return sharing_of(self.model, "auto")

    @contextmanager
    def remembering(self, held: list[Any] | None = None) -> Iterator[None]:
        """The context in which prompts with stop texts are kept, since what comes after those extends them.

        Of all agents, and with ``held`` of all engines that are given it, at most ``max_batch_tokens`` are.
        """
        shared = [] if held is None else held
        self.memories = defaultdict(lambda: Memory(self.max_batch_tokens, shared))
        try:
            yield
        finally:
            self.memories = None

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], temperature: float) -> list[list[Completion]]:
        """Returns one completion a seed for each prompt, in order; temperature 0 is greedy."""
        if self.act_as is None:
            return self._generate(prompts, temperature)
        found: dict[int, list[Completion]] = {}
        for agent in dict.fromkeys(prompt.agent for prompt in prompts):
            self.act_as(agent)
            mine = [place for place, prompt in enumerate(prompts) if prompt.agent == agent]
            found |= zip(mine, self._generate([prompts[place] for place in mine], temperature), strict=True)
        return [found[place] for place in range(len(prompts))]

    def _generate(self, prompts: Sequence[Prompt], temperature: float) -> list[list[Completion]]:
        distinct: dict[bytes, int] = {}
        owners = [distinct.setdefault(np.asarray(p.ids, np.int32).tobytes(), len(distinct)) for p in prompts]
        ids = [np.frombuffer(key, dtype=np.int32) for key in distinct]
        rows = [
            [Row(owner, seed, p.max_tokens, p.stop) for seed in p.seeds]
            for owner, p in zip(owners, prompts, strict=True)
        ]
        memory, sharing = self._memory(prompts), self.sharing
        for batch in self._batches([row for group in rows for row in group], ids):
            with self._precision():
                self._finish(batch, ids, temperature, sharing, memory)
        return [[_completion(row) for row in group] for group in rows]

    @torch.no_grad()
    def score(self, prompt: Tokens, response: Tokens, temperature: float, agent: str = "") -> NDArray[np.float32]:
        """Returns the log-probabilities of a given response, (R,)."""
        if self.act_as is not None:
            self.act_as(agent)
        ids = self._tensor(np.concatenate([prompt, response]).astype(np.int64))[None]
        with self._precision():
            logits = self.model(input_ids=ids, logits_to_keep=len(response) + 1, use_cache=False).logits[0, :-1]
        logp = torch.log_softmax(logits.float() / temperature, dim=-1)
        found: NDArray[np.float32] = logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights by their names in the model's state dict; all must be there."""
        self.model.load_state_dict(dict(weights), strict=True)

    def _precision(self) -> Any:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.dtype)

    def _batches(self, rows: list[Row], ids: list[Tokens]) -> Iterator[list[Row]]:
        """Cuts rows, sorted by length, into batches that fit the cache; rows of one prompt stay side by side."""
        batch: list[Row] = []
        room = 0
        for row in sorted(rows, key=lambda row: (len(ids[row.prompt]), row.prompt)):
            room = max(room, len(ids[row.prompt]) + row.max_tokens)
            if batch and (len(batch) + 1) * room > self.max_batch_tokens:
                yield batch
                batch, room = [], len(ids[row.prompt]) + row.max_tokens
            batch.append(row)
        if batch:
            yield batch

    def _memory(self, prompts: Sequence[Prompt]) -> Memory | None:
        if self.memories is None or not any(prompt.stop for prompt in prompts):
            return None
        return self.memories[prompts[0].agent if self.act_as else ""]

    def _finish(
        self, rows: list[Row], ids: list[Tokens], temperature: float, sharing: Sharing, memory: Memory | None
    ) -> None:
        """Prefills the distinct prompts of the rows, then grows all rows until each has ended."""
        owners = list(dict.fromkeys(row.prompt for row in rows))
        steps = max(row.max_tokens for row in rows)
        place = {owner: i for i, owner in enumerate(owners)}
        owned = np.array([place[row.prompt] for row in rows])
        state, logits = read_prompts(self.model, [ids[owner] for owner in owners], owned, steps, sharing, memory)
        uniforms = np.stack([np.pad(row.uniforms(), (0, steps - row.max_tokens)) for row in rows])
        active = np.arange(len(rows))
        for step in range(steps):
            tokens, logprobs = draw(logits, self._tensor(uniforms[active, step]), temperature)
            going = self._append([rows[i] for i in active], tokens, logprobs)
            if not going.any():
                return
            if going.mean() < COMPACT_BELOW:
                active = active[going]
                kept = self._tensor(np.flatnonzero(going))
                state.keep(kept)
                tokens = tokens.index_select(0, kept)
            logits = state.forward(self.model, tokens)

    def _append(self, rows: list[Row], tokens: Tensor, logprobs: Tensor) -> NDArray[np.bool_]:
        """Gives each row that has not ended its token; returns which rows go on."""
        going = np.zeros(len(rows), dtype=bool)
        for i, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            if row.ended or row.truncated:
                continue
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.ended = token in self.eos_ids or self._has_stop(row)
            row.truncated = not row.ended and len(row.ids) == row.max_tokens
            going[i] = not row.ended and not row.truncated
        return going

    def _has_stop(self, row: Row) -> bool:
        if not row.stop:
            return False
        tail = self.tokenizer.decode(row.ids[-STOP_TOKENS:])
        return any(text in tail for text in row.stop)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draws one token a row by inverting the distribution function at ``uniforms``; temperature 0 takes the best.

    Args:
        logits: (B, V); uniforms: (B,) in [0, 1).

    Returns:
        Ids (B,) and their log-probabilities (B,) at the temperature (at 1 when greedy).
    """
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        cdf = logp.double().exp().cumsum(-1)
        tokens = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    chosen = logp.gather(-1, tokens[:, None]).squeeze(-1)
    if not torch.isfinite(chosen).all():
        raise ModelError(
            "the model's logits are not finite: expected numbers, found NaN or infinity. The weights are damaged or "
            "an update diverged; start again from the last good checkpoint with a smaller lr."
        )
    return tokens, chosen


def _completion(row: Row) -> Completion:
    return Completion(np.array(row.ids, np.int32), np.array(row.logprobs, np.float32), row.truncated)
