"""From generations of many lengths to rectangles of tokens.

Prompts are padded on their left and responses on their right, so that all responses of a micro-batch start in one
column: the model's head then runs on response positions only. Rows of like length share a micro-batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Rectangle(NamedTuple):
    """B rows of P prompt columns and R response columns.

    Attributes:
        tokens: (B, P + R) ids, the padding is 0.
        attention: (B, P + R), 1 where a token stands.
        positions: (B, P + R), the place of each token in its own row, 0 on padding.
        prompt_width: P.
    """

    tokens: Ints
    attention: Ints
    positions: Ints
    prompt_width: int


def rectangle(prompts: Sequence[NDArray[np.int32]], responses: Sequence[NDArray[np.int32]]) -> Rectangle:
    """Lays generations out; a row's log-probabilities do not depend on the rows beside it."""
    prompt_width = max(map(len, prompts))
    width = prompt_width + max(map(len, responses), default=0)
    tokens = np.zeros((len(prompts), width), dtype=np.int64)
    attention = np.zeros_like(tokens)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = prompt_width - len(prompt), prompt_width + len(response)
        tokens[row, start:prompt_width], tokens[row, prompt_width:end] = prompt, response
        attention[row, start:end] = 1
    return Rectangle(tokens, attention, np.maximum(attention.cumsum(1) - 1, 0), prompt_width)


def right_pad(rows: Sequence[NDArray[np.float32]], width: int) -> NDArray[np.float32]:
    """Returns the rows as (B, width) float32 with zeros on the right."""
    padded = np.zeros((len(rows), width), dtype=np.float32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def micro_batches(prompt_lengths: Ints, response_lengths: Ints, max_tokens: int) -> list[Ints]:
    """Cuts rows into micro-batches of at most ``max_tokens`` padded tokens each (a single longer row stands alone).

    Every row is in exactly one micro-batch; rows are sorted by length, so that little padding is computed.

    Args:
        prompt_lengths, response_lengths: (B,).

    Returns:
        Index arrays that partition 0..B-1.
    """
    order = np.lexsort((response_lengths, prompt_lengths))
    batches: list[list[int]] = []
    prompt_width = response_width = 0
    for row in order.tolist():
        prompt_width = max(prompt_width, int(prompt_lengths[row]))
        response_width = max(response_width, int(response_lengths[row]))
        rows = len(batches[-1]) + 1 if batches else 1
        if not batches or rows * (prompt_width + response_width) > max_tokens:
            batches.append([])
            prompt_width, response_width = int(prompt_lengths[row]), int(response_lengths[row])
        batches[-1].append(row)
    return [np.array(rows, dtype=np.int64) for rows in batches]


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
