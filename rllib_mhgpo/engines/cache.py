"""A key-value cache in whose rows responses grow, written in place."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class Growing:
    """Cache, mask and positions of rows that grow, one token at a time.

    Args:
        cache: keys and values of ``width`` places, and room for more.
        attention: (B, width + room), 0 on padding, which stands on the left.
    """

    def __init__(self, cache: DynamicCache, attention: Tensor, width: int) -> None:
        self.cache, self.attention, self.width = cache, attention, width
        self.positions = attention[:, :width].sum(1, keepdim=True)

    def keep(self, rows: Tensor) -> None:
        """Drops all other rows."""
        self.positions, self.attention = self.positions.index_select(0, rows), self.attention.index_select(0, rows)
        for layer in self.cache.layers:
            layer.reorder_cache(rows)

    def forward(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """Feeds one token a row; returns the logits of the next, (B, V)."""
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


class RoomyLayer(DynamicLayer):
    """A cache layer that is written in place, instead of being copied at every step to grow by one."""

    def __init__(self, key_room: Tensor, value_room: Tensor, length: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = key_room.dtype, key_room.device, True
        self.key_room, self.value_room, self.length = key_room, value_room, length
        self._expose()

    @classmethod
    def empty(cls, like: DynamicLayer, rows: int, width: int, room: int) -> "RoomyLayer":
        """A layer whose first ``width`` places are still to be taken."""
        shapes = [(rows, states.shape[1], width + room, states.shape[3]) for states in (like.keys, like.values)]
        return cls(like.keys.new_empty(shapes[0]), like.values.new_empty(shapes[1]), width)

    @classmethod
    def of(cls, layer: DynamicLayer, room: int) -> "RoomyLayer":
        """A layer that holds what another one does."""
        rows, _, length, _ = layer.keys.shape
        made = cls.empty(layer, rows, length, room)
        made.keys[:], made.values[:] = layer.keys, layer.values
        return made

    def take(self, layer: DynamicLayer, rows: Tensor, places: Tensor) -> None:
        """Fills some rows, (n,), from the places, (n, width), of another layer, flat over its rows and columns."""
        for room, states in ((self.keys, layer.keys), (self.values, layer.values)):
            found = states.transpose(1, 2).flatten(0, 1).index_select(0, places.flatten())
            room.index_copy_(0, rows, found.unflatten(0, places.shape).transpose(1, 2))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends to all rows; returns keys and values so far."""
        end = self.length + key_states.shape[-2]
        self.key_room[:, :, self.length : end], self.value_room[:, :, self.length : end] = key_states, value_states
        self.length = end
        self._expose()
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes rows, in this order."""
        self.key_room, self.value_room = (room.index_select(0, beam_idx) for room in (self.key_room, self.value_room))
        self._expose()

    def _expose(self) -> None:
        self.keys, self.values = self.key_room[:, :, : self.length], self.value_room[:, :, : self.length]
