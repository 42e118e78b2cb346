"""What a run holds in memory and sends over the wire, by formulas; nothing is loaded or allocated.

All sizes are bytes. Weights, gradients and Adam's states follow Rajbhandari et al. (arXiv:1910.02054, section 3);
activations are what autograd keeps of a Llama-like layer.
"""

from dataclasses import dataclass

FLOAT32, BFLOAT16 = 4, 2
LIVE = 10**9
"""Parameters that ZeRO-3 holds whole at a time: DeepSpeed's ``stage3_max_live_parameters`` by default."""

REDUCE_BUCKET = 500_000_000
"""Most numbers that ZeRO reduces at a time: DeepSpeed's own default."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a language model.

    Attributes:
        parameters: all of them, tied ones once.
        trained: those with a gradient; fewer with adapters.
        layers, width, inner: number of layers, hidden size, width inside the MLP.
        heads, kv_heads, head: attention heads, those of keys and values, width of one.
        vocabulary: number of token ids.
    """

    parameters: int
    trained: int
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int


@dataclass(frozen=True)
class Sharding:
    """How a model is spread.

    Attributes:
        learners: how many there are.
        stage: DeepSpeed's ZeRO stage, 0 for whole replicas.
        is_bfloat16: parameters and gradients of two bytes with float32 masters; else float32 throughout.
        offload_optimizer, offload_param: kept in the CPU's memory.
        bucket: most gradients that ZeRO sums at a time.
    """

    learners: int = 1
    stage: int = 0
    is_bfloat16: bool = False
    offload_optimizer: bool = False
    offload_param: bool = False
    bucket: int = REDUCE_BUCKET


def model_states(shape: Shape, how: Sharding) -> dict[str, float]:
    """Returns a learner's ``weights``, ``gradients`` and ``optimizer`` states, as they are kept between steps.

    >>> whole = Shape(100, 100, 1, 1, 1, 1, 1, 1, 1)
    >>> model_states(whole, Sharding())
    {'weights': 400.0, 'gradients': 400.0, 'optimizer': 800.0}
    >>> model_states(whole, Sharding(learners=4, stage=3, is_bfloat16=True))
    {'weights': 50.0, 'gradients': 50.0, 'optimizer': 300.0}
    """
    number = BFLOAT16 if how.is_bfloat16 else FLOAT32
    master = FLOAT32 if how.stage else 0  # ZeRO steps on flat float32 copies of the parameters
    share = [1.0 if how.stage < least else 1.0 / how.learners for least in (1, 2, 3)]
    return {
        "weights": shape.parameters * number * share[2],
        "gradients": shape.trained * number * share[1],
        "optimizer": shape.trained * (2 * FLOAT32 + master) * share[0],
    }


def gathered(shape: Shape, how: Sharding) -> float:
    """Returns what the layers at work take that ZeRO-3 gathers from the learners, and lets go again."""
    number = BFLOAT16 if how.is_bfloat16 else FLOAT32
    return float(min(shape.parameters, LIVE) * number) if how.stage == 3 else 0.0


def frozen_weights(shape: Shape, how: Sharding) -> float:
    """Returns a learner's part of a model that is not trained."""
    number = BFLOAT16 if how.is_bfloat16 else FLOAT32
    return shape.parameters * number / (how.learners if how.stage == 3 else 1)


def reduce_bucket(shape: Shape, how: Sharding) -> float:
    """Returns what ZeRO sums gradients in."""
    number = BFLOAT16 if how.is_bfloat16 else FLOAT32
    return float(min(shape.trained, how.bucket) * number) if how.stage else 0.0


def layer_inputs(shape: Shape, tokens: int, number: int) -> float:
    """Returns what checkpointing keeps of every layer."""
    return float(tokens * shape.layers * shape.width * number)


def activations(shape: Shape, tokens: int, number: int, checkpointing: bool) -> float:
    """Returns what the backward pass needs of ``tokens`` tokens; with checkpointing a vector a layer, and one layer."""
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    # what autograd keeps of norms, attention and MLP; their sums are within a tenth of measured ones (docs/scaling.md)
    layer = 8 * shape.width + 4 * queries + 4 * keys + 5 * shape.inner
    if checkpointing:
        return layer_inputs(shape, tokens, number) + float(tokens * layer * number)
    return float(tokens * shape.layers * layer * number)


def logits(shape: Shape, response_tokens: int) -> float:
    """Returns the head's output over response tokens: logits, their log-softmax and the gradient, in float32."""
    return 3.0 * response_tokens * shape.vocabulary * FLOAT32


def key_value_cache(shape: Shape, tokens: int, number: int) -> float:
    """Returns keys and values of ``tokens`` tokens in all layers."""
    return 2.0 * shape.layers * shape.kv_heads * shape.head * tokens * number


@dataclass(frozen=True)
class Work:
    """What a forward pass takes; arithmetic alone, in floating-point operations.

    Attributes:
        body: parameters that every token meets: all but embeddings and head.
        head: parameters of the head.
        attention: layers times width of all queries.
    """

    body: int
    head: int
    attention: int

    def flops(self, tokens: int, seen: int, scored: int) -> int:
        """Operations of one pass over ``tokens`` that see ``seen`` keys in all; the head runs on ``scored`` of them.

        Two operations a weight; four a key and channel, for scores and for sums. Source: arXiv:2001.08361, table 1.

        >>> Work(body=10, head=5, attention=2).flops(tokens=3, seen=6, scored=1)
        118
        """
        return 2 * self.body * tokens + 4 * self.attention * seen + 2 * self.head * scored


def generations(strategy: str, agents: int, group: int, probs: tuple[float, ...], counts: list[int] | None) -> float:
    """Returns how many responses one question costs, in the mean.

    >>> [generations(name, 3, 4, (0.7, 0.1, 0.2), None) for name in ("fof", "rr", "fof_os", "is")]
    [12.0, 10.5, 24.0, 24.0]
    """
    if strategy == "fof":
        return float(agents * group)
    if strategy == "fof_os":
        return float((agents - 1) * group + group**2 if agents > 1 else group)
    if strategy == "is":
        return group * agents * (agents + 1) / 2
    if strategy == "rr":
        return float(sum(p * (i + (agents - i) * group) for i, p in enumerate(probs)))
    if strategy == "fork_counts" and counts:
        total, alive = 0.0, 1.0
        for count in counts:
            alive *= count
            total += alive
        return total
    return float("nan")
