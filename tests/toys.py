"""Small things that tests share: a byte-level tokenizer and two-layer language models, made from nothing.

No network, no training: the models' weights are random with a fixed seed. Any text round-trips through the
tokenizer, one token a UTF-8 byte, so that lengths in tests can be counted by hand.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

EOS, PAD = "<eos>", "<pad>"
LLAMA_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def toy_tokenizer(eos: bool = True, pad: bool = True, chat_template: bool = False) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of 258 ids: 0..255 the bytes (in the byte-level alphabet's order), 256 EOS, 257 padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, PAD])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS if eos else None, pad_token=PAD if pad else None
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def toy_model(
    tokenizer: PreTrainedTokenizerBase, kind: Literal["llama", "gpt2"] = "llama", seed: int = 0
) -> PreTrainedModel:
    """Returns a two-layer model of width 32 with 2 heads, float32, eval mode; gpt2 has learned absolute positions."""
    ids: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    # wider than the usual 0.02, so that the distributions are far from uniform
    spread = 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel
        if kind == "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=1024, initializer_range=spread, **ids)
            )
        else:
            model = LlamaForCausalLM(LlamaConfig(**LLAMA_SHAPE, initializer_range=spread, **ids))
    model.train(False)
    return model


def save_toy(
    folder: Path, kind: Literal["llama", "gpt2"] = "llama", seed: int = 0, chat_template: bool = False
) -> Path:
    """Writes the toy as a Hugging Face folder (safetensors, tokenizer) and returns the folder."""
    tokenizer = toy_tokenizer(chat_template=chat_template)
    toy_model(tokenizer, kind, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
