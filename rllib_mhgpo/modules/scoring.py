"""What a language model says about responses that are laid out in rows: log-probabilities, entropies, values.

The head runs on the places before response tokens alone, a piece at a time, so that logits over the whole vocabulary
exist for one piece only, forwards and backwards.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from rllib_mhgpo.footprint import Work
from rllib_mhgpo.losses import token_logprobs
from rllib_mhgpo.modules.attention import MASKS, SDPA, kernel_of, masks_for
from rllib_mhgpo.packing import Attention, Layout, Rows, Sharing, lay_out

LOGITS_AT_ONCE = 1 << 25
"""Most logits of a piece: 128 MiB in float32."""
MOST_PADDING = (256, 4096)
"""Tokens that cost as much as another pass, on a CPU (measured on two cores) and on a GPU (a guess)."""
SAME = 1e-3
"""Log-probabilities closer than this come from the same model."""
SAME_IN_BFLOAT16 = 0.1
Batch = Mapping[str, Any]


def as_tensors(layout: Layout, device: torch.device, kernel: str = SDPA) -> dict[str, Any]:
    """Returns a layout's fields by name, arrays as tensors, and where rows branch the ``mask`` that a kernel takes."""
    tensors = {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in layout._asdict().items()
    }
    if layout.attention == "tree":
        tensors["mask"] = MASKS[kernel](tensors["ends"], layout.trunk)
    return tensors


def response_values(run: Callable[..., Any], head: torch.nn.Module, batch: Batch) -> Tensor:
    """Returns what a head of one number says before each response token, (b, R), 0 past a response's end."""
    with head_at(head, batch["before"], lambda forward, hidden: forward(hidden)):
        return spread(run_rows(run, batch)[0, :, 0].float(), batch)


def response_logprobs(
    run: Callable[..., Any],
    head: torch.nn.Module,
    batch: Batch,
    temperature: float,
    entropy_grad: bool = False,
    in_pieces: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of response tokens and the entropies they were drawn at, (b, R), 0 past the end.

    Args:
        run: the model, or what runs it.
        head: the model's module that makes logits.
        batch: a :class:`rllib_mhgpo.packing.Layout` as tensors.
        in_pieces: score inside the head; not for models that scale or cap what it returns.
    """

    def score(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack(token_logprobs(logits, targets, temperature, entropy_grad), -1)

    def score_pieces(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        size = max(1, LOGITS_AT_ONCE // head.get_parameter("weight").shape[0])
        pieces = list(zip(torch.split(hidden[0], size), torch.split(batch["targets"], size), strict=True))
        if len(pieces) == 1:
            return score(forward(hidden[0]), batch["targets"])[None]
        scored = [
            checkpoint(lambda part, targets: score(forward(part), targets), *piece, use_reentrant=False)
            for piece in pieces
        ]
        return torch.cat(scored)[None]

    with head_at(head, batch["before"], score_pieces if in_pieces else lambda forward, hidden: forward(hidden)):
        found = run_rows(run, batch)[0]
    logp, entropy = (found if in_pieces else score(found, batch["targets"])).unbind(-1)
    return spread(logp, batch), spread(entropy, batch)


def spread(values: Tensor, batch: Batch) -> Tensor:
    """Puts values of response tokens, (N,), in their cells of (b, R), the others 0."""
    height, width = batch["shape"]
    return values.new_zeros(height * width).index_copy(0, batch["cells"], values).view(height, width)


@contextmanager
def head_at(
    head: torch.nn.Module, places: Tensor, function: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
) -> Iterator[None]:
    """The context in which a model's head is ``function`` of its own forward pass and (1, N, width) of its input.

    Args:
        places: (N,), which of the hidden states are kept, flat over rows and columns.
    """
    forward, own = head.forward, vars(head).get("forward")
    head.forward = lambda hidden: function(forward, hidden.flatten(0, 1).index_select(0, places)[None])
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def run_rows(run: Callable[..., Any], batch: Batch, cache: Cache | None = None) -> Tensor:
    """Runs the model on the rows; where a row does not branch, the model's own causal mask serves.

    Args:
        cache: is given the keys and values of all places.

    Returns:
        What the model's head makes of them.
    """
    more: dict[str, Any] = {} if batch["attention"] == "causal" else {"position_ids": batch["positions"]}
    if batch["attention"] == "tree":
        more["attention_mask"] = batch["mask"]
    if cache is not None:
        more["past_key_values"] = cache
    logits: Tensor = run(input_ids=batch["tokens"], use_cache=cache is not None, **more).logits
    return logits


def head_of(llm: torch.nn.Module) -> torch.nn.Module:
    """Returns the module that makes a model's logits, of words or of a single number."""
    words = llm.get_output_embeddings()  # type: ignore[operator]
    if words is not None:
        return words  # type: ignore[no-any-return]
    return next(getattr(llm, name) for name in ("score", "classifier") if hasattr(llm, name))  # type: ignore[no-any-return]


def is_head_last(llm: PreTrainedModel) -> bool:
    """Whether nothing changes logits after the head, so that they can be scored inside it; found by trying."""
    return _same(llm, _tried(llm, "causal", in_pieces=False), _tried(llm, "causal", in_pieces=True))


def shares_rows(llm: PreTrainedModel, attention: Attention, kernel: str = SDPA) -> bool:
    """Whether a model scores sequences that share a row as it scores them alone; found by trying.

    A model whose attention knows only distances within a row (ALiBi), or that has states instead, does not.
    """
    try:
        return _same(llm, _tried(llm, "causal", in_pieces=False), _tried(llm, attention, False, kernel))
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError):
        return False


def sharing_of(llm: PreTrainedModel, mode: str) -> Sharing:
    """Finds out when sequences can share rows of a model that is not sharded yet.

    A model that cannot share rows has rows back to back where its attention has kernels for that.
    """
    kernel = None
    if mode in ("auto", "shared"):
        kernel = next((kernel for kernel in masks_for(llm) if shares_rows(llm, "tree", kernel)), None)
        mode = mode if kernel else "plain" if _is_flash(llm) else "off"
    if mode == "plain" and not shares_rows(llm, "packed"):
        mode = "off"
    work = work_of(llm)
    # attention compares at four operations a channel, weights take two
    linear_cost = work.body / max(1, 2 * work.attention)
    padding = MOST_PADDING[llm.device.type != "cpu"]
    return Sharing(mode, linear_cost, _longest_shared(llm), padding, kernel or SDPA)


def work_of(llm: PreTrainedModel) -> Work:
    """Returns what a pass of a model takes."""
    config = llm.config.get_text_config()
    tables = {llm.get_input_embeddings().weight, head_of(llm).get_parameter("weight")}
    body = sum(parameter.numel() for parameter in llm.parameters()) - sum(table.numel() for table in tables)
    heads = getattr(config, "num_attention_heads", 0)  # a model without attention has none
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    return Work(body, head_of(llm).get_parameter("weight").numel(), config.num_hidden_layers * heads * width)


def _longest_shared(llm: PreTrainedModel) -> float:
    """Returns how long sequences may be that share a row: those that a sliding window does not cut."""
    config = llm.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((float(window) for window in windows if window), default=float("inf"))


def _is_flash(llm: PreTrainedModel) -> bool:
    return "flash" in kernel_of(llm)


@torch.no_grad()
def _tried(llm: PreTrainedModel, attention: Attention, in_pieces: bool, kernel: str = SDPA) -> Tensor:
    """Log-probabilities of two responses to one prompt, and of a third to its beginning."""
    prompts = [np.array(ids, np.int32) for ids in ([1, 2, 3], [1, 2, 3], [1, 2])]
    responses = [np.array(ids, np.int32) for ids in ([4, 5, 6], [5, 7, 8, 9], [6, 1])]
    rows = Rows([[2], [0], [1]] if attention == "causal" else [[2, 0, 1]], attention)
    layout = lay_out(prompts, responses, rows, [np.ones(len(response), bool) for response in responses])
    device = next(llm.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=_is_flash(llm)):  # those kernels take nothing wider
        batch = as_tensors(layout, device, kernel)
        logp, _ = response_logprobs(llm, head_of(llm), batch, 1.0, in_pieces=in_pieces)
    return logp.float()


def _same(llm: PreTrainedModel, one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() < (SAME_IN_BFLOAT16 if _is_flash(llm) else SAME))


@torch.no_grad()
def matmul_rate(device: torch.device, dtype: torch.dtype, times: int = 3) -> float:
    """Returns the best rate of a large matrix product, in floating-point operations a second."""
    size = 1024 if device.type == "cpu" else 8192
    one, best = torch.ones((size, size), device=device, dtype=dtype), float("inf")
    for _ in range(times):
        started = time.perf_counter()
        (one @ one)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
