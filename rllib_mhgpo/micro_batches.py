"""Cuts a train batch into micro-batches and lays them out on a device, and counts what that saved."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllib_mhgpo.footprint import Work
from rllib_mhgpo.modules.scoring import as_tensors
from rllib_mhgpo.packing import Rows, Sharing, lay_out, plan
from rllib_mhgpo.sharding import largest
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.train_batch import NOTHING, TrainBatch

EMPTY = Rows([], "causal")
ONE = np.zeros(1, dtype=np.int64)


class Laid(NamedTuple):
    """A micro-batch on its device.

    Attributes:
        batch: what its rows are of: the train batch, or a row that weighs nothing where a micro-batch is empty.
        rows: (b,) of that batch.
        tensors: a :class:`rllib_mhgpo.packing.Layout` by its fields.
        mask: (b, R), True on response tokens that the policy said.
    """

    batch: TrainBatch
    rows: NDArray[np.int64]
    tensors: dict[str, Any]
    mask: Tensor


class MicroBatches:
    """How one learner computes its rows.

    Args:
        sharing: when sequences share a row.
        max_tokens: of a micro-batch, padding included.
        adapters: agents with an adapter of their own; a micro-batch has rows of one of them.
        work: what a pass over tokens takes.
        together: every learner computes as many micro-batches, because models are sharded.

    Attributes:
        counts: tokens that were ``asked`` for since it was cleared, how many of them are ``distinct``, how many were
            ``computed``, padding included, and the ``flops`` that the distinct ones need.
    """

    def __init__(
        self,
        sharing: Sharing,
        max_tokens: int,
        adapters: Sequence[str],
        work: Work,
        device: torch.device,
        together: bool = False,
    ) -> None:
        self.sharing, self.max_tokens, self.adapters, self.device = sharing, max_tokens, adapters, device
        self.work, self.together = work, together
        self.counts: Counter[str] = Counter()

    def cut(self, batch: TrainBatch, rows: NDArray[np.int64], prompts: Sequence[Tokens] = ()) -> list[Rows]:
        """Cuts some rows, (n,), into micro-batches of places 0..n-1; other prompts may stand before the responses."""
        prompts = prompts or batch.prompts
        agents = np.array([batch.agents[i] if self.adapters else "" for i in rows], dtype=object)
        parts: list[Rows] = []
        for agent in self.adapters or [""]:
            mine = np.flatnonzero(agents == agent)
            asked, said = [prompts[i] for i in rows[mine]], [batch.responses[i] for i in rows[mine]]
            parts += [part.renumbered(mine) for part in plan(asked, said, self.max_tokens, self.sharing)]
        return parts

    def in_step(
        self, batch: TrainBatch, rows: NDArray[np.int64], prompts: Sequence[Tokens] = ()
    ) -> Iterator[tuple[Rows, bool]]:
        """Yields the micro-batches of :meth:`cut` and whether each is the last; what others have more of is empty."""
        parts = self.cut(batch, rows, prompts)
        count = largest(len(parts), self.device) if self.together else len(parts)
        for number in range(count):
            yield parts[number] if number < len(parts) else EMPTY, number == count - 1

    def lay_out(
        self,
        batch: TrainBatch,
        rows: NDArray[np.int64],
        part: Rows,
        prompts: Sequence[Tokens] = (),
        passes: int = 1,
        work: Work | None = None,
    ) -> Laid:
        """Lays out one of the micro-batches that :meth:`cut` made.

        Args:
            passes: over it, for the count; a backward pass is two.
            work: of each, where another model than the policy makes them.
        """
        if not part.rows:
            batch, rows, part, prompts = NOTHING, ONE, Rows([[0]], "causal"), ()
        prompts = prompts or batch.prompts
        said = [_said(batch, row) for row in rows]
        layout = lay_out([prompts[i] for i in rows], [batch.responses[i] for i in rows], part, said)
        mask = np.zeros(layout.shape[0] * layout.shape[1], dtype=bool)
        mask[layout.cells] = True
        rows = rows[part.sequences]
        self.counts["asked"] += sum(len(prompts[i]) + len(batch.responses[i]) for i in rows)
        self.counts["distinct"] += layout.num_tokens
        self.counts["computed"] += layout.tokens.size
        work = work or self.work
        self.counts["flops"] += passes * work.flops(layout.num_tokens, layout.num_seen, len(layout.targets))
        tensors = as_tensors(layout, self.device, self.sharing.kernel)
        return Laid(batch, rows, tensors, torch.from_numpy(mask).view(layout.shape).to(self.device))


def _said(batch: TrainBatch, row: int) -> NDArray[np.bool_]:
    said = batch.said[row] if batch.said else None
    return np.ones(len(batch.responses[row]), dtype=bool) if said is None else said
