"""Small things that tests share: a byte-level tokenizer and two-layer language models, made from nothing.

No network, no training: the models' weights are random with a fixed seed. Any text round-trips through the
tokenizer, one token a UTF-8 byte, so that lengths in tests can be counted by hand.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rllib_mhgpo.data import Question, Questions
from rllib_mhgpo.engines import Completion, Engine, Prompt

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
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2": LLAMA_SHAPE,
    "mistral": {**LLAMA_SHAPE, "sliding_window": 16},
    "granite": {**LLAMA_SHAPE, "logits_scaling": 4.0},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": False},
}
"""Kinds of model that differ in what matters here: biases, a sliding window, logits scaled after the head, ALiBi, SDPA
of a model's own."""
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


def toy_model(tokenizer: PreTrainedTokenizerBase, kind: str = "llama", seed: int = 0) -> PreTrainedModel:
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
        elif kind in OTHERS:
            config = AutoConfig.for_model(kind, **OTHERS[kind], initializer_range=spread, **ids)
            model = AutoModelForCausalLM.from_config(config)
        else:
            model = LlamaForCausalLM(LlamaConfig(**LLAMA_SHAPE, initializer_range=spread, **ids))
    model.train(False)
    return model


def save_toy(folder: Path, kind: str = "llama", seed: int = 0, chat_template: bool = False) -> Path:
    """Writes the toy as a Hugging Face folder (safetensors, tokenizer) and returns the folder."""
    tokenizer = toy_tokenizer(chat_template=chat_template)
    toy_model(tokenizer, kind, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def toy_questions(count: int = 4) -> Questions:
    """Questions "what is i?" with answer "ai", each with its own page Pi and a page Qi beside it."""
    return Questions(
        [
            Question(
                id=f"q{i}",
                question=f"what is {i}?",
                answers=(f"a{i}",),
                supporting=((f"P{i}", 0),),
                context=((f"P{i}", (f"page{i} says a{i}",)), (f"Q{i}", (f"page{i} says nothing",))),
            )
            for i in range(count)
        ],
        "toy questions",
    )


class ScriptedEngine(Engine):
    """An engine whose responses a function of (prompt text, sample index) writes; it counts its calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, script: Callable[[str, int], str]) -> None:
        self.tokenizer, self.script, self.calls = tokenizer, script, 0

    def generate(self, prompts: Sequence[Prompt], temperature: float) -> list[list[Completion]]:
        """Writes every response as the script says, with an EOS and log-probabilities of -1."""
        self.calls += 1
        return [[self._complete(prompt, i) for i in range(len(prompt.seeds))] for prompt in prompts]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Has none."""

    def _complete(self, prompt: Prompt, sample: int) -> Completion:
        text = self.script(self.tokenizer.decode(prompt.ids), sample)
        ids = np.array([*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id], dtype=np.int32)
        return Completion(ids, np.full(len(ids), -1, np.float32), truncated=False)


PROMPTS: dict[str, Any] = {
    "base": "hotpot",
    "rewriter": {"template": "ask {question}", "system": "", "examples": []},
    "reranker": {
        "template": "{passages} for {queries}",
        "passage": "Document{id} {title}",
        "system": "",
        "examples": [],
    },
    "answerer": {
        "template": "{passages} answer {question}",
        "passage": "{title}: {text}",
        "system": "",
        "examples": [],
    },
}
"""Short prompts for the search environment."""


def save_questions(path: Path, count: int = 8) -> Path:
    """Writes :func:`toy_questions` in HotpotQA's layout and returns the path."""
    records = [
        {
            "_id": q.id,
            "question": q.question,
            "answer": q.answers[0],
            "supporting_facts": [list(fact) for fact in q.supporting],
            "context": [[title, list(sentences)] for title, sentences in q.context],
            "type": "bridge",
            "level": "easy",
        }
        for q in toy_questions(count)
    ]
    path.write_text(json.dumps(records))
    return path


def share_of_vowels(answer: str, golds: Any) -> float:
    """A reward that a random model earns in varying amounts."""
    return sum(letter in "aeiou" for letter in answer) / 6
