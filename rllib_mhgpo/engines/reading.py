"""How an engine reads prompts: what begins alike is read once, and what an earlier prompt said is not read again.

The prompts of a wave are laid out as the learner lays out its rows, and each row of the key-value cache is gathered
from the places of its own prompt. A prompt that extends an earlier one (a transcript) is read on from there.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rllib_mhgpo.engines.cache import Growing, RoomyLayer
from rllib_mhgpo.errors import ModelError
from rllib_mhgpo.modules.scoring import as_tensors, head_at, head_of, run_rows
from rllib_mhgpo.packing import Ints, Rows, Sharing, ancestors, lay_out, plan, rectangle
from rllib_mhgpo.spaces import Tokens

TOKENS_AT_ONCE = 4096
"""Most tokens of one pass over prompts; a longer prompt has a pass of its own."""


class Pass(NamedTuple):
    """One forward pass over n prompts.

    Attributes:
        prompts: (n,), which they are.
        layers: of the cache, with keys and values of (rows, heads, T, width) each.
        logits: (n, V), behind each prompt.
        places: (n, width), where each prompt's tokens stand in the layers, flat over rows and places; 0 on the left.
    """

    prompts: Ints
    layers: list[Any]
    logits: Tensor
    places: Ints

    @property
    def size(self) -> int:
        """Places in the layers."""
        return int(self.layers[0].keys.shape[0] * self.layers[0].keys.shape[2])


Known = dict[int, dict[bytes, tuple[Pass, Ints]]]
"""By length and tokens of a prompt: the pass that has read it, and where it stands in that."""


class Memory:
    """Passes of one set of weights over prompts that later ones may extend; the oldest are dropped.

    Args:
        most_tokens: places that are held, padding included.
        held: passes of this memory and of others that share its bound, the oldest first, each with what knows of it.
    """

    def __init__(self, most_tokens: int, held: list[tuple[Known, Pass]]) -> None:
        self.most_tokens, self.held = most_tokens, held
        self.known: Known = {}

    def keep(self, prompts: Sequence[Tokens], done: Pass) -> None:
        """Holds what a pass over prompts has found, where there is room for it."""
        if done.size > self.most_tokens:
            return
        while done.size + sum(held.size for _, held in self.held) > self.most_tokens:
            _forget(*self.held.pop(0))
        done = done._replace(logits=done.logits.new_empty(0))
        self.held.append((self.known, done))
        for number, places in zip(done.prompts, done.places, strict=True):
            length = len(prompts[number])
            self.known.setdefault(length, {})[prompts[number].tobytes()] = done, places[len(places) - length :]

    def longest(self, prompt: Tokens) -> tuple[Pass, Ints] | None:
        """Returns the pass that has read the longest beginning of a prompt, and where that stands in it, (n,).

        A prompt's last token is never among it, since what follows that is still to be known.
        """
        for length in sorted(self.known, reverse=True):
            found = self.known[length].get(prompt[:length].tobytes())
            if found is not None:
                return found[0], found[1][: len(prompt) - 1]
        return None


def _forget(known: Known, dropped: Pass) -> None:
    for length, prompts in known.items():
        known[length] = {ids: found for ids, found in prompts.items() if found[0] is not dropped}


def read_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    owners: Ints,
    room: int,
    sharing: Sharing,
    memory: Memory | None = None,
) -> tuple[Growing, Tensor]:
    """Reads distinct prompts; returns rows that grow behind them, and the logits of their first tokens, (B, V).

    Args:
        owners: (B,), the prompt of each row.
        room: tokens by which a row may grow.
        sharing: when prompts share a row of the pass.
        memory: of earlier prompts, which gets these too.
    """
    padded = rectangle(prompts)
    width = padded.attention.shape[1]
    attention = np.pad(padded.attention[owners], ((0, 0), (0, room)), constant_values=1)
    layers = DynamicCache(config=model.config).layers
    if layers and all(type(layer) is DynamicLayer for layer in layers):
        passes = _read_once(model, prompts, width, sharing, memory)
        cache, logits = _gathered(DynamicCache(config=model.config), passes, owners, width, room)
    else:
        cache, logits = _read_padded(model, prompts, owners, room)
    return Growing(cache, torch.from_numpy(attention).to(model.device), width), logits


def _gathered(
    cache: DynamicCache, passes: Iterable[Pass], owners: Ints, width: int, room: int
) -> tuple[DynamicCache, Tensor]:
    """Fills a cache from passes over the prompts of its rows."""
    logits = torch.empty(0)
    for done in passes:
        at = {int(prompt): number for number, prompt in enumerate(done.prompts)}
        mine = np.array([row for row, owner in enumerate(owners.tolist()) if owner in at])
        chosen = np.array([at[owner] for owner in owners[mine].tolist()])
        device = done.logits.device
        rows, numbers = torch.from_numpy(mine).to(device), torch.from_numpy(chosen).to(device)
        if not len(logits):
            logits = done.logits.new_empty((len(owners), done.logits.shape[-1]))
            cache.layers = [RoomyLayer.empty(layer, len(owners), width, room) for layer in done.layers]
        logits[rows] = done.logits[numbers]
        for grown, layer in zip(cache.layers, done.layers, strict=True):
            grown.take(layer, rows, torch.from_numpy(done.places[chosen]).to(device))
    return cache, logits


def _read_once(
    model: PreTrainedModel, prompts: Sequence[Tokens], width: int, sharing: Sharing, memory: Memory | None
) -> Iterator[Pass]:
    """Reads every prompt in one of the passes, what it has in common with others or with earlier ones only once."""
    known = [None if memory is None else memory.longest(prompt) for prompt in prompts]
    new = np.array([number for number, past in enumerate(known) if past is None], dtype=np.int64)
    lone = [prompts[number] for number in new]
    for part in plan(lone, [_NOTHING] * len(lone), TOKENS_AT_ONCE, sharing) if lone else ():
        yield _kept(memory, prompts, _read(model, prompts, part.renumbered(new), width, sharing.kernel))
    extended = [(number, *past) for number, past in enumerate(known) if past is not None]
    for batch in _in_batches(extended, prompts):
        yield _kept(memory, prompts, _read_on(model, prompts, batch, width))


def _kept(memory: Memory | None, prompts: Sequence[Tokens], done: Pass) -> Pass:
    if memory is not None:
        memory.keep(prompts, done)
    return done


def _read(model: PreTrainedModel, prompts: Sequence[Tokens], part: Rows, width: int, kernel: str) -> Pass:
    """Reads some prompts from their beginnings."""
    layout = lay_out(prompts, [_NOTHING] * len(prompts), part, [_COUNTS] * len(prompts))
    tensors, cache = as_tensors(layout, model.device, kernel), DynamicCache(config=model.config)
    with head_at(head_of(model), tensors["before"], lambda forward, hidden: forward(hidden)):
        said = run_rows(model, tensors, cache)[0]
    if any(layer.keys is None for layer in cache.layers):
        raise _unkept(model)
    return Pass(part.sequences, cache.layers, said, ancestors(layout, width))


Extended = tuple[int, Pass, Ints]
"""A prompt's number, the pass that has read its beginning, and where that stands in it."""


def _in_batches(extended: Sequence[Extended], prompts: Sequence[Tokens]) -> Iterator[list[Extended]]:
    """Cuts extended prompts, sorted by what is left of them to read."""
    batch: list[Extended] = []
    for one in sorted(extended, key=lambda one: len(prompts[one[0]]) - len(one[2])):
        if batch and (len(batch) + 1) * (len(prompts[one[0]]) - len(one[2])) > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _read_on(model: PreTrainedModel, prompts: Sequence[Tokens], batch: Sequence[Extended], width: int) -> Pass:
    """Reads what is new of prompts whose beginnings earlier passes have read.

    A row has these beginnings, which end together, and then what is new, which begins together.
    """
    past = np.array([len(places) for _, _, places in batch])
    new = [prompts[number][start:] for (number, _, _), start in zip(batch, past, strict=True)]
    before, after, count = int(past.max()), max(map(len, new)), len(batch)
    cache = _recalled(DynamicCache(config=model.config), batch, before, after)
    tokens = np.stack([np.pad(ids, (0, after - len(ids))) for ids in new]).astype(np.int64)
    lengths = np.array([len(ids) for ids in new])
    place = np.arange(before + after)
    attention = (place >= before - past[:, None]).astype(np.int64)
    positions = past[:, None] + np.minimum(np.arange(after), lengths[:, None] - 1)  # padding has none of its own
    last = torch.from_numpy(np.arange(count) * after + lengths - 1).to(model.device)
    tensors = [torch.from_numpy(array).to(model.device) for array in (tokens, attention, positions)]
    with head_at(head_of(model), last, lambda forward, hidden: forward(hidden)):
        out = model(
            input_ids=tensors[0], attention_mask=tensors[1], position_ids=tensors[2], past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
    found = np.zeros((count, width), np.int64)
    for row, (start, length) in enumerate(zip(past.tolist(), lengths.tolist(), strict=True)):
        found[row, width - start - length :] = row * (before + after) + place[before - start : before + length]
    return Pass(np.array([number for number, _, _ in batch]), cache.layers, out.logits[0], found)


def _recalled(cache: DynamicCache, batch: Sequence[Extended], width: int, room: int) -> DynamicCache:
    """Fills a cache with what earlier passes have read."""
    like = batch[0][1].layers
    cache.layers = [RoomyLayer.empty(layer, len(batch), width, room) for layer in like]
    for source in {id(source): source for _, source, _ in batch}.values():
        mine = [row for row, (_, other, _) in enumerate(batch) if other is source]
        places = np.stack([np.pad(batch[row][2], (width - len(batch[row][2]), 0)) for row in mine])
        device = source.logits.device
        rows, at = torch.tensor(mine, device=device), torch.from_numpy(places).to(device)
        for grown, layer in zip(cache.layers, source.layers, strict=True):
            grown.take(layer, rows, at)
    return cache


def _unkept(model: PreTrainedModel) -> ModelError:
    return ModelError(
        f"engine: {type(model).__name__} keeps no keys and values from which a response could go on; the engine hf "
        "samples from models with attention in every layer. Take another llm."
    )


_NOTHING, _COUNTS = np.zeros(1, np.int32), np.ones(1, dtype=bool)
"""A response of one token, which is not read; it counts, so that the place before it is known."""


def _read_padded(
    model: PreTrainedModel, prompts: Sequence[Tokens], owners: Ints, room: int
) -> tuple[DynamicCache, Tensor]:
    """For models whose caches are of another kind, or windows: prompts side by side, each in a row of its own."""
    tokens, attention, positions = (torch.from_numpy(array).to(model.device) for array in rectangle(prompts))
    out = model(
        input_ids=tokens, attention_mask=attention, position_ids=positions, use_cache=True, logits_to_keep=1,
        past_key_values=DynamicCache(config=model.config),
    )  # fmt: skip
    if getattr(out, "past_key_values", None) is None:
        raise _unkept(model)
    cache, copies = out.past_key_values, torch.from_numpy(owners).to(model.device)
    for number, layer in enumerate(cache.layers):
        layer.reorder_cache(copies)
        if type(layer) is DynamicLayer:
            cache.layers[number] = RoomyLayer.of(layer, room)
    return cache, out.logits[:, -1].index_select(0, copies)
