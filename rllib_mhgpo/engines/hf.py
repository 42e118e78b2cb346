"""Generation with the training module itself: no second copy of the weights, one prefill a distinct prompt.

The key-value cache has its room from the start, so that a step copies nothing, and finished responses leave the batch.
Each response is drawn by inverting the distribution function at uniform numbers of its own seed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rllib_mhgpo.engines.base import Completion, Prompt
from rllib_mhgpo.errors import ModelError
from rllib_mhgpo.packing import rectangle
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


class HFEngine:
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
        self.model, self.eos_ids, self.dtype, self.max_batch_tokens = model, frozenset(eos_ids), dtype, max_batch_tokens

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
        for batch in self._batches([row for group in rows for row in group], ids):
            with self._precision():
                self._finish(batch, ids, temperature)
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

    def _finish(self, rows: list[Row], ids: list[Tokens], temperature: float) -> None:
        """Prefills the distinct prompts of the rows, then grows all rows until each has ended."""
        owners = list(dict.fromkeys(row.prompt for row in rows))
        steps = max(row.max_tokens for row in rows)
        layout = rectangle([ids[owner] for owner in owners])
        attention = self._tensor(layout.attention)
        out = self.model(
            input_ids=self._tensor(layout.tokens),
            attention_mask=attention,
            position_ids=self._tensor(layout.positions),
            past_key_values=DynamicCache(config=self.model.config),
            use_cache=True,
            logits_to_keep=1,
        )
        place = {owner: i for i, owner in enumerate(owners)}
        copies = self._tensor(np.array([place[row.prompt] for row in rows]))
        state = _State(out.past_key_values, attention, attention.shape[1], steps, copies)
        uniforms = np.stack([np.pad(row.uniforms(), (0, steps - row.max_tokens)) for row in rows])
        logits, active = out.logits[:, -1].index_select(0, copies), np.arange(len(rows))
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


class _State:
    """Cache, mask and positions of the rows that are still growing."""

    def __init__(self, cache: DynamicCache, attention: Tensor, width: int, steps: int, copies: Tensor) -> None:
        self.cache, self.width = cache, width
        self.positions = attention.sum(1, keepdim=True).index_select(0, copies)
        room = attention.new_ones((len(copies), steps))
        self.attention = torch.cat([attention.index_select(0, copies), room], dim=1)
        for i, layer in enumerate(cache.layers):
            layer.reorder_cache(copies)
            if type(layer) is DynamicLayer:
                cache.layers[i] = _RoomyLayer(layer, steps)

    def keep(self, rows: Tensor) -> None:
        """Drops all other rows."""
        self.positions, self.attention = self.positions.index_select(0, rows), self.attention.index_select(0, rows)
        for layer in self.cache.layers:
            layer.reorder_cache(rows)

    def forward(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """Feeds one token a row; returns the logits of the next, (rows, V)."""
        self.width += 1
        out = model(
            input_ids=tokens[:, None],
            attention_mask=self.attention[:, : self.width],
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions = self.positions + 1
        return out.logits[:, -1]  # type: ignore[no-any-return]


class _RoomyLayer(DynamicLayer):
    """A cache layer that is written in place, instead of being copied at every step to grow by one."""

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.length = layer.keys.shape[-2]
        self.key_room, self.value_room = (_with_room(states, room) for states in (layer.keys, layer.values))
        self._expose()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        self.key_room[:, :, self.length : end], self.value_room[:, :, self.length : end] = key_states, value_states
        self.length = end
        self._expose()
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.key_room, self.value_room = (room.index_select(0, beam_idx) for room in (self.key_room, self.value_room))
        self._expose()

    def _expose(self) -> None:
        self.keys, self.values = self.key_room[:, :, : self.length], self.value_room[:, :, : self.length]


def _with_room(states: Tensor, room: int) -> Tensor:
    rows, heads, length, size = states.shape
    larger = states.new_empty((rows, heads, length + room, size))
    larger[:, :, :length] = states
    return larger


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
