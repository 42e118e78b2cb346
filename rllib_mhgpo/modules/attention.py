"""How attention kernels are told which token sees which in rows that branch.

Up to its first branch, its trunk, a row is a line, which needs no mask. Importing this module teaches transformers'
``sdpa`` masks that begin behind the trunk, at which it would raise an error: the trunk is left to PyTorch's causal
kernels, which skip half of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SDPA, WHOLE_SDPA, FLEX = "sdpa", "sdpa, whole masks", "flex_attention"


def tree_mask(ends: Tensor, trunk: int = 0) -> Tensor:
    """Returns what each token after the trunk sees, (B, 1, T - trunk, T), of two tokens at least.

    >>> tree_mask(torch.tensor([[3, 2, 3]])).int().tolist()  # two tokens after one
    [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]
    >>> tree_mask(torch.tensor([[4, 4, 3, 4]]), trunk=3).int().tolist()
    [[[[1, 1, 1, 0], [1, 1, 0, 1]]]]
    """
    place = torch.arange(ends.shape[1], device=ends.device)
    own = place[min(trunk, len(place) - 2) :, None]  # a mask of one query would do for all
    return ((place <= own) & (own < ends[:, None, :]))[:, None]


def tree_blocks(ends: Tensor, trunk: int = 0) -> BlockMask:
    """Returns what each token sees for FlexAttention, whose kernels pass over blocks in which none sees another."""
    rows, length = ends.shape

    def sees(row: Tensor, head: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return (other <= one) & (one < ends[row, other])

    return create_block_mask(sees, rows, None, length, length, device=ends.device)


def whole_mask(ends: Tensor, trunk: int = 0) -> Tensor:
    """Returns what each token sees, (B, 1, T, T), for models that call PyTorch's SDPA themselves."""
    return tree_mask(ends)


MASKS: dict[str, Callable[[Tensor, int], Any]] = {SDPA: tree_mask, WHOLE_SDPA: whole_mask, FLEX: tree_blocks}
"""What tells which token sees which."""


def kernel_of(llm: PreTrainedModel) -> str:
    """Returns what computes a model's attention, by transformers' name."""
    return str(llm.config._attn_implementation)


def masks_for(llm: PreTrainedModel) -> list[str]:
    """Returns which of the masks a model may take, the cheapest first; none where its kernels take no such mask."""
    return {SDPA: [SDPA, WHOLE_SDPA], FLEX: [FLEX]}.get(kernel_of(llm), [])


def tree_sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """Attention in the form that transformers asks of its kernels; queries without a row in the mask are the trunk."""
    masked = 1 if attention_mask is None else attention_mask.shape[-2]
    trunk = query.shape[2] - masked
    if masked == 1 or not trunk:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **how)
        return whole
    before = [states[:, :, :trunk] for states in (query, key, value)]
    line, _ = sdpa_attention_forward(module, *before, None, **{**how, "is_causal": True})
    branches, _ = sdpa_attention_forward(module, query[:, :, trunk:], key, value, attention_mask, **how)
    return torch.cat([line, branches], dim=1), None


AttentionInterface.register(SDPA, tree_sdpa)
