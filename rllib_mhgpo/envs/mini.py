"""Builds the policy ``mini`` for the small environments: ``python -m rllib_mhgpo.envs.mini --out DIR``.

A Llama of two layers that can add three digits and knows the moves of tictactoe, but has sloppy habits: it forgets the
last digit, judges half at random, plays at random. One idea: what is right is in its distribution beside what is wrong,
so a minute of reinforcement has something to find. The sums of dev and test are never shown.
"""

import argparse
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_mhgpo.envs.solver_verifier import COMMENTS, LARGEST, sums, written
from rllib_mhgpo.envs.text_game import TextGame
from rllib_mhgpo.llms import save_model

log = logging.getLogger(__name__)

PAD, EOS, UNK, NEWLINE = "<pad>", "<eos>", "<unk>", "\n"
NUMBERS = tuple(map(str, range(3 * LARGEST + 1)))
SIGNS = ("+", "-", "=", "?", ";", ":", ",", ".")
WORDS = (
    *COMMENTS, "x", "o", "move", "moves", "yes", "no", "more", "less", "left", "right", "up", "down", "rock", "paper",
    "scissors", "first", "second", "number", "guess", "target", "score", "you", "they", "say", "and", "is",
)  # fmt: skip
STEPS, BATCH, LR, WARMUP = 2500, 32, 3e-3, 100
Row = tuple[str, str]
"""What is read, what is said."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word, a number or a sign; what is not known is ``<unk>``.

    >>> tokenizer = build_tokenizer()
    >>> tokenizer.decode(tokenizer.encode("3 + 14 = ?"))
    '3 + 14 = ?'
    """
    words = dict.fromkeys([PAD, EOS, UNK, NEWLINE, *NUMBERS, *SIGNS, *WORDS])
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[A-Za-z]+|\d+|[^\w\s]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )


def start_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The network before its first step."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def sum_lessons(draw: Random) -> Iterator[Row]:
    """Yields for ever the three acts of a dialogue about a train sum, as sloppy as the habits are."""
    asked = sums("train")
    while True:
        digits = draw.choice(asked)
        right = str(sum(digits))
        guess = draw.choice(NUMBERS)
        hasty = str(sum(digits[:2]))
        near = str(min(3 * LARGEST, max(0, sum(digits) + draw.choice((-1, 1)))))
        first = draw.choices((right, hasty, near, guess), (0.3, 0.45, 0.15, 0.1))[0]
        yield written(digits, ()), first
        verdict = COMMENTS[first != right]
        comment = verdict if draw.random() < 0.6 else draw.choice(COMMENTS)
        yield written(digits, [first]), comment
        others = (right, hasty, near, guess)
        yield written(digits, [first, comment]), draw.choices((first, *others), (0.4, 0.3, 0.15, 0.1, 0.05))[0]


def board_lessons(draw: Random) -> Iterator[Row]:
    """Yields for ever what is read in games of tictactoe, with a random move that is mostly legal."""
    game = TextGame(tokenizer=build_tokenizer())
    while True:
        game.reset(seed=draw.getrandbits(31), options={"index": 0})
        while (agent := game.next_agent()) is not None:
            read = game.prompt(agent)
            assert isinstance(read, str)
            said = game.random_reply(agent) if draw.random() < 0.9 else draw.choice(NUMBERS[:9])
            yield read, said
            game.act(agent, game.random_reply(agent))


def batch(rows: list[Row], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and targets, (B, T); targets are -100 but on what is said and the EOS after it."""
    texts = [(tokenizer.encode(read), [*tokenizer.encode(said), tokenizer.eos_token_id]) for read, said in rows]
    width = max(len(read) + len(said) for read, said in texts)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    targets = torch.full((len(rows), width), -100)
    for row, (read, said) in enumerate(texts):
        ids[row, : len(read) + len(said)] = torch.tensor([*read, *said])
        targets[row, len(read) : len(read) + len(said)] = torch.tensor(said)
    return ids, targets


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Plain cross-entropy on what is said; the rate warms up, then falls to 0 along a cosine."""
    streams = [sum_lessons(Random(seed)), board_lessons(Random(seed + 1))]
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    begun = time.monotonic()
    for step in range(STEPS):
        rate = min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + np.cos(np.pi * step / STEPS))
        for group in optimiser.param_groups:
            group["lr"] = LR * float(rate)
        loss = torch.zeros(())
        for stream, rows in zip(streams, (3 * BATCH, BATCH), strict=True):
            ids, targets = batch([next(stream) for _ in range(rows)], tokenizer)
            logits = model(ids).logits[:, :-1]
            loss = loss + cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 250 == 0:
            log.info("step %d %ds loss %.3f", step, time.monotonic() - begun, loss.item())


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Builds the policy of the small environments.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # sums in another order are other sums: one thread makes the build repeatable to the bit
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = start_model(tokenizer)
    train(model, tokenizer, options.seed)
    save_model(options.out, model, tokenizer)


if __name__ == "__main__":
    main()
