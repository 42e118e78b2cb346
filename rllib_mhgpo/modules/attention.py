"""How attention kernels are told which token sees which in rows that branch.

Up to its first branch, its trunk, a row is a line, which needs no mask. ``tree_sdpa`` computes it by PyTorch's causal
kernels, which skip half of it, and only what stands after it under a mask; everything else it computes as ``sdpa``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

TREE_SDPA = "tree_sdpa"


def tree_mask(ends: Tensor, trunk: int = 0) -> Tensor:
    """Returns what each token after the trunk sees, (B, 1, T - trunk, T).

    >>> tree_mask(torch.tensor([[3, 2, 3]])).int().tolist()  # two tokens after one
    [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]
    >>> tree_mask(torch.tensor([[3, 2, 3]]), trunk=2).int().tolist()
    [[[[1, 0, 1]]]]
    """
    place = torch.arange(ends.shape[1], device=ends.device)
    own = place[trunk:, None]
    return ((place <= own) & (own < ends[:, None, :]))[:, None]


def tree_blocks(ends: Tensor, trunk: int = 0) -> BlockMask:
    """Returns what each token sees for FlexAttention, whose kernels pass over blocks in which none sees another."""
    rows, length = ends.shape

    def sees(row: Tensor, head: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return (other <= one) & (one < ends[row, other])

    return create_block_mask(sees, rows, None, length, length, device=ends.device)


MASKS: dict[str, Callable[[Tensor, int], Any]] = {TREE_SDPA: tree_mask, "flex_attention": tree_blocks}
"""What tells each kernel which token sees which; others take no such mask."""


def tree_sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """Attention in the form that transformers asks of its kernels; queries without a row in the mask are the trunk."""
    trunk = 0 if attention_mask is None else query.shape[2] - attention_mask.shape[2]
    if not trunk:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **how)
        return whole
    before = [states[:, :, :trunk] for states in (query, key, value)]
    line, _ = sdpa_attention_forward(module, *before, None, **{**how, "is_causal": True})
    branches, _ = sdpa_attention_forward(module, query[:, :, trunk:], key, value, attention_mask, **how)
    return torch.cat([line, branches], dim=1), None


AttentionInterface.register(TREE_SDPA, tree_sdpa)
AttentionMaskInterface.register(TREE_SDPA, sdpa_mask)


def kernel_of(llm: PreTrainedModel) -> str:
    """Returns what computes a model's attention, by transformers' name."""
    return str(llm.config._attn_implementation)


def skip_trunks(llm: PreTrainedModel) -> None:
    """Makes a model that computes attention by SDPA take short masks too."""
    if kernel_of(llm) == "sdpa":
        llm.set_attn_implementation(TREE_SDPA)
