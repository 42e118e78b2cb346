"""The tiny network before its first step: a Llama whose first two layers can already copy.

Knows nothing of minipedia. One idea: a small network spends most of its training on forming the circuit that continues
a repeated text (find where the last words stood before, say what followed), and that circuit can be written down. Layer
0 gets heads that look one, two and three tokens back; layer 1 gets heads that look for the place where the same words
stood before; what they find is read by the output. Everything else starts small and random, and all of it is trained.
"""

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

WIDTH, LAYERS, HEADS, HEAD = 128, 4, 4, 32
THETA = 1e8  # rotations that are fast in five of the sixteen pairs (position) and almost still in the others (content)
FAST = 5
WORD = slice(0, 48)  # the places of the residual stream: the word itself,
ONE = 48  # a constant,
BACK = (slice(49, 73), slice(73, 87), slice(87, 96))  # codes of the words one, two and three places back,
NEXT = slice(96, 128)  # the code of what should come next


def start_model(vocabulary: int, pad: int, eos: int, seed: int) -> LlamaForCausalLM:
    """Builds the network for token ids below ``vocabulary``."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        pad_token_id=pad,
        bos_token_id=None,
        eos_token_id=eos,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        write_copying(model)
    return model


def write_copying(model: LlamaForCausalLM) -> None:
    """Writes the copying circuit into layers 0 and 1."""
    words = torch.randn(model.config.vocab_size, WORD.stop)
    embedding = model.model.embed_tokens.weight
    embedding.mul_(0.2)
    embedding[:, WORD] = words
    embedding[:, ONE] = 4.0
    code = torch.linalg.qr(torch.randn(WORD.stop, WORD.stop)).Q
    look_back, look_up = (layer.self_attn for layer in model.model.layers[:2])
    for head, place in enumerate(BACK):
        kept = code[:24][{0: slice(0, 24), 1: slice(10, 24), 2: slice(10, 19)}[head]]
        look_behind(look_back, head, head + 1)
        copy(look_back, head, kept, place)
    one, two, three = BACK
    find(look_up, 0, [(code[0:12], (one.start, 12), None), (None, (two.start, 10), one.start + 10)])
    find(look_up, 1, [(code[12:24], (one.start + 12, 12), None), (None, (three.start, 9), two.start)])
    following = code[16:48]
    for head in (0, 1):
        copy(look_up, head, following, NEXT)
    model.lm_head.weight.mul_(0.2)
    model.lm_head.weight[:, NEXT] = 0.3 * words @ following.T


def rows(head: int, start: int, count: int) -> slice:
    """The rows of a head's projection."""
    return slice(head * HEAD + start, head * HEAD + start + count)


def look_behind(attention: LlamaAttention, head: int, back: int) -> None:
    """Lets a head attend ``back`` places back: the key is a constant, turned by as many steps of each rotation."""
    gain = 1.4
    for pair in range(FAST):
        angle = back * THETA ** (-2 * pair / HEAD)
        first, second = head * HEAD + pair, head * HEAD + pair + HEAD // 2
        attention.q_proj.weight[first, ONE] = gain
        attention.k_proj.weight[first, ONE] = gain * math.cos(angle)
        attention.k_proj.weight[second, ONE] = gain * math.sin(angle)


def copy(attention: LlamaAttention, head: int, code: Tensor, place: slice) -> None:
    """Lets a head carry the code of the attended word to a place of the residual stream."""
    count = code.shape[0]
    attention.v_proj.weight[rows(head, 0, count), WORD] = code
    attention.o_proj.weight[place, rows(head, 0, count)] = torch.eye(count)


def find(
    attention: LlamaAttention, head: int, matches: list[tuple[Tensor | None, tuple[int, int], int | None]]
) -> None:
    """Lets a head attend where codes agree, on rotations that hardly turn.

    Each match is (code of the own word or None, (first place, count) of the key, first place of the query).
    """
    still = [p + half for half in (0, HEAD // 2) for p in range(FAST, HEAD // 2)]
    gain = 1.6
    for code, (key, count), query in matches:
        for i in range(count):
            row = head * HEAD + still.pop()
            attention.k_proj.weight[row, key + i] = gain
            if code is not None:
                attention.q_proj.weight[row, WORD] = gain * code[i]
            elif query is not None:
                attention.q_proj.weight[row, query + i] = gain
