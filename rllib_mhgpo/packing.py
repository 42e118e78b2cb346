"""From generations of many lengths to rows of tokens in which nothing stands twice.

A sequence is a prompt with the response that was drawn for it. Sequences that begin alike can share a row: their common
beginning stands there once, and what follows it side by side, as a trie in depth-first order. A token sees its own
ancestors alone, so every sequence has the log-probabilities and gradients that it has in a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.spaces import Tokens

Ints = NDArray[np.int64]
Row = list[int]
"""The sequences that stand in one row, in the order of their tokens."""


Attention = Literal["causal", "tree", "packed"]


@dataclass(frozen=True)
class Sharing:
    """When sequences share a row.

    Attributes:
        mode: ``off``: never; ``plain``: rows back to back, nothing shared; ``shared``: all of one prompt; ``auto``:
            where it costs less.
        linear_cost: what a token costs beside attention, in comparisons with single keys.
        window: sequences longer than this have rows of their own.
        most_padding: tokens of padding in a micro-batch beyond which another pass costs less.
        kernel: what computes attention: ``sdpa``, which needs no mask before the first branch, ``flex_attention``,
            which needs none at all, or another.
    """

    mode: str = "auto"
    linear_cost: float = 1024.0
    window: float = float("inf")
    most_padding: int = 256
    kernel: str = "sdpa"

    def pays(self, row: "_Growing", grown: "_Growing", own: int, one_prompt: bool) -> bool:
        """Whether a sequence of ``own`` tokens joins a row, which would have grown with it."""
        if self.mode == "shared":
            return one_prompt
        return self.mode == "auto" and self.cost(grown) < self.cost(row) + self.cost(_Growing([], own, own))

    def cost(self, row: "_Growing") -> float:
        """What a row costs; kernels skip half of the attention where no mask is needed."""
        line = {"sdpa": row.trunk, "flex_attention": row.length}.get(self.kernel, row.length * (not row.branches))
        return row.length * self.linear_cost + line * line / 2 + (row.length - line) * row.length


def _key(ids: Tokens) -> bytes:
    """Sorts as the ids do."""
    return ids.astype(">i4").tobytes()


class _Growing(NamedTuple):
    """A row to which sequences are added, its tokens, and how many of them stand before the first branch."""

    sequences: Row
    length: int
    trunk: int

    @property
    def branches(self) -> bool:
        """Whether it is more than one line of tokens."""
        return self.trunk < self.length


class Layout(NamedTuple):
    """B rows of T tokens for b sequences, whose responses have R tokens at most, of which N count in all.

    A response's last token is not among the row's tokens, since nothing follows it.

    Attributes:
        tokens: (B, T) ids, the padding is 0.
        positions: (B, T), how many tokens of its sequence stand before a token.
        ends: (B, T), one past the last token that sees a token: the i-th sees the j-th where ``j <= i < ends[j]``.
        attention: ``causal``: each token sees all before it in its row; ``tree``: what ``ends`` says; ``packed``: the
            same, and it follows from ``positions``, which start again at each sequence of the only row.
        before: (N,), where the token before each token that counts stands in (B, T), flat.
        cells: (N,), where each of them stands in (b, R), flat.
        targets: (N,), their ids.
        shape: (b, R).
        trunk: tokens of every row before the first branch of any.
        num_tokens: tokens without padding.
        num_seen: tokens that these see, themselves included.
    """

    tokens: Ints
    positions: Ints
    ends: Ints
    attention: Attention
    before: Ints
    cells: Ints
    targets: Ints
    shape: tuple[int, int]
    trunk: int
    num_tokens: int
    num_seen: int


class Rows(NamedTuple):
    """Rows that are computed together, and how their tokens see each other."""

    rows: list[Row]
    attention: Attention

    @property
    def sequences(self) -> Ints:
        """All sequences of the rows, (b,)."""
        return np.array([number for row in self.rows for number in row], dtype=np.int64)

    def renumbered(self, numbers: Ints) -> "Rows":
        """Returns the same rows of the sequences that have these numbers elsewhere."""
        return Rows([numbers[row].tolist() for row in self.rows], self.attention)


def plan(prompts: Sequence[Tokens], responses: Sequence[Tokens], max_tokens: int, sharing: Sharing) -> list[Rows]:
    """Cuts sequences into rows, and rows into micro-batches of at most ``max_tokens`` tokens, padding included.

    A single longer sequence stands alone. Rows are sorted by length, so that little padding is computed, and rows that
    branch stay among themselves, because the others need no mask.

    Returns:
        Micro-batches; each sequence is in exactly one row.
    """
    sequences = [inputs(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    if sharing.mode == "plain":
        return _back_to_back([len(ids) for ids in sequences], max_tokens)
    rows: list[_Growing] = []
    by_prompt = sharing.mode == "shared"
    # sequences that begin alike are neighbours, or those of one prompt
    for number in sorted(range(len(sequences)), key=lambda i: (by_prompt and _key(prompts[i]), _key(sequences[i]))):
        row, ids = rows[-1] if rows else None, sequences[number]
        if row is not None and sharing.mode != "off":
            last = row.sequences[-1]
            common = common_prefix(sequences[last], ids)
            joined = row.length + len(ids) - common
            fits = joined <= max_tokens and max(len(ids), len(sequences[last])) <= sharing.window
            same = fits and np.array_equal(prompts[last], prompts[number])
            trunk = row.trunk if row.branches or common < len(sequences[last]) else joined
            grown = _Growing([*row.sequences, number], joined, trunk)
            if fits and sharing.pays(row, grown, len(ids), same):
                rows[-1] = grown
                continue
        rows.append(_Growing([number], len(ids), len(ids)))
    return _micro_batches(sorted(rows, key=lambda row: (row.branches, row.length)), max_tokens, sharing.most_padding)


def _micro_batches(rows: Sequence[_Growing], max_tokens: int, most_padding: int) -> list[Rows]:
    """Cuts rows that are sorted by kind and length, also where a longer row would pad the others too much."""
    batches: list[Rows] = []
    held = 0
    for row in rows:
        kind: Attention = "tree" if row.branches else "causal"
        computed = (len(batches[-1].rows) + 1) * row.length if batches else 0
        padding = computed - held - row.length
        if not batches or batches[-1].attention != kind or computed > max_tokens or padding > most_padding:
            batches.append(Rows([], kind))
            held = 0
        batches[-1].rows.append(row.sequences)
        held += row.length
    return batches


def _back_to_back(lengths: Sequence[int], max_tokens: int) -> list[Rows]:
    """Fills single rows with whole sequences, the longest first."""
    batches: list[Rows] = []
    room = 0
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or lengths[number] > room:
            batches.append(Rows([[]], "packed"))
            room = max_tokens
        batches[-1].rows[0].append(number)
        room -= lengths[number]
    return batches


def lay_out(
    prompts: Sequence[Tokens], responses: Sequence[Tokens], batch: Rows, said: Sequence[NDArray[np.bool_]]
) -> Layout:
    """Lays the sequences of a micro-batch out; (b, R) has them in the order of the rows.

    Args:
        said: which tokens of each response count among the N, (R_i,) each.
    """
    rows = [_trie([(prompts[i], responses[i]) for i in row], batch.attention != "packed") for row in batch.rows]
    order = batch.sequences.tolist()
    length, width = max(len(row.tokens) for row in rows), max(len(responses[i]) for i in order)
    tokens, positions = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), np.int64)
    ends = np.tile(np.arange(1, length + 1), (len(rows), 1))  # padding is seen by itself alone
    before: list[Ints] = []
    for number, row in enumerate(rows):
        size = len(row.tokens)
        tokens[number, :size], positions[number, :size], ends[number, :size] = row.tokens, row.positions, row.ends
        before += [places + number * length for places in row.before]
    return Layout(
        tokens, positions, ends, batch.attention,
        before=np.concatenate([places[said[i]] for i, places in zip(order, before, strict=True)]),
        cells=np.concatenate([place * width + np.flatnonzero(said[i]) for place, i in enumerate(order)]),
        targets=np.concatenate([responses[i][said[i]] for i in order]).astype(np.int64),
        shape=(len(order), width),
        trunk=int(ends.min()),
        num_tokens=sum(len(row.tokens) for row in rows),
        num_seen=sum(int(row.positions.sum()) + len(row.tokens) for row in rows),
    )  # fmt: skip


class _Trie(NamedTuple):
    tokens: Ints
    positions: Ints
    ends: Ints
    before: list[Ints]


def _trie(sequences: Sequence[tuple[Tokens, Tokens]], shares: bool) -> _Trie:
    """One row: sorted sequences, each following its predecessor as far as they agree, or none at all."""
    pieces: list[Tokens] = []
    positions: list[Ints] = []
    before: list[Ints] = []
    ends = np.zeros(sum(len(prompt) + len(response) for prompt, response in sequences), np.int64)
    previous, path, size = np.zeros(0, np.int32), np.zeros(0, np.int64), 0
    for prompt, response in sequences:
        ids = inputs(prompt, response)
        common = common_prefix(previous, ids) if shares else 0
        pieces.append(ids[common:])
        positions.append(np.arange(common, len(ids)))
        path = np.concatenate([path[:common], np.arange(size, size + len(ids) - common)])
        size += len(ids) - common
        ends[path] = size
        before.append(path[len(prompt) - 1 :])
        previous = ids
    return _Trie(np.concatenate(pieces), np.concatenate(positions), ends[:size], before)


def inputs(prompt: Tokens, response: Tokens) -> Tokens:
    """What the model reads of a sequence: all but the last token."""
    return np.concatenate([prompt, response[:-1]])


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Returns how many tokens two sequences have in common at their beginnings.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def ancestors(layout: Layout, width: int) -> Ints:
    """Returns what the tokens see after which something counts: (N, width) places, flat over (B, T).

    Themselves on the right, 0 on the left where there are fewer.
    """
    found = np.zeros((len(layout.before), width), np.int64)
    length = layout.tokens.shape[1]
    for number, (row, place) in enumerate(zip(*np.divmod(layout.before, length), strict=True)):
        seen = np.flatnonzero(layout.ends[row, : place + 1] > place)
        found[number, width - len(seen) :] = row * length + seen
    return found


class Rectangle(NamedTuple):
    """B rows that end together, so that all of them grow at one place.

    Attributes:
        tokens: (B, T) ids, the padding is 0 and stands on the left.
        attention: (B, T), 1 where a token stands.
        positions: (B, T), the place of each token in its own row, 0 on padding.
    """

    tokens: Ints
    attention: Ints
    positions: Ints


def rectangle(prompts: Sequence[Tokens]) -> Rectangle:
    """Lays prompts out whose responses are still to be drawn."""
    width = max(map(len, prompts))
    tokens = np.zeros((len(prompts), width), dtype=np.int64)
    attention = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        attention[row, width - len(prompt) :] = 1
    return Rectangle(tokens, attention, np.maximum(attention.cumsum(1) - 1, 0))


def right_pad(rows: Sequence[NDArray[np.float32]], width: int) -> NDArray[np.float32]:
    """Returns the rows as (B, width) float32 with zeros on the right."""
    padded = np.zeros((len(rows), width), dtype=np.float32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def balanced_shards(tokens: Ints, groups: Ints, steps: Ints, count: int) -> list[Ints]:
    """Deals rows to ``count`` learners so that each has about as many tokens in every optimiser step.

    Rows of one group stay together; a group goes where least is, the largest first. A shard may be empty.

    Args:
        tokens, groups, steps: of each row, (B,).

    Returns:
        Index arrays that partition 0..B-1, one a learner.

    >>> tokens, one = np.array([5, 4, 3, 2]), np.zeros(4, dtype=np.int64)
    >>> [shard.tolist() for shard in balanced_shards(tokens, np.arange(4), one, 2)]
    [[0, 3], [1, 2]]
    """
    _, group = np.unique(groups, return_inverse=True)
    size = np.bincount(group, weights=tokens)
    first_step = np.full(len(size), np.iinfo(np.int64).max)
    np.minimum.at(first_step, group, steps)
    owner = np.zeros(len(size), dtype=np.int64)
    for step in np.unique(first_step):
        load = np.zeros(count)
        mine = np.flatnonzero(first_step == step)
        for one in mine[np.argsort(-size[mine], kind="stable")]:
            owner[one] = load.argmin()
            load[owner[one]] += size[one]
    return [np.flatnonzero(owner[group] == learner) for learner in range(count)]
