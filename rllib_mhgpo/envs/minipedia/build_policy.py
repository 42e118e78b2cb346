"""Builds the tiny base policy from nothing: ``python -m rllib_mhgpo.envs.minipedia.build_policy --out DIR``.

Supervised steps on sloppy lessons, not reinforcement. One idea: everything follows from one seed, and the folder that
comes out is an ordinary Hugging Face folder.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_mhgpo.envs.minipedia import questions
from rllib_mhgpo.envs.minipedia.lessons import SLOPPY, Lesson, Renaming, Teacher, forked, in_one_row
from rllib_mhgpo.envs.minipedia.probe import AGENTS, PAGES_A_SEARCH, environments, report, writer
from rllib_mhgpo.envs.minipedia.start import start_model
from rllib_mhgpo.envs.minipedia.tokenizer import build_tokenizer
from rllib_mhgpo.envs.minipedia.world import LEVELS
from rllib_mhgpo.envs.search import SearchEnv
from rllib_mhgpo.llms import save_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How the policy is trained.

    Attributes:
        seed: of everything.
        steps: optimiser steps.
        episodes: lessons made before the first step, each shown under many namings.
        harder: share of them at level ``harder``.
        batch: rows of each role in a step, twice as many of the answerer's; a row has four responses, in the single
            context one episode.
        lr: peak learning rate; it rises for ``warmup`` steps, then falls to a tenth along a cosine.
        short: steps during which only ``short_pages`` pages are shown.
        settling: further steps at a tenth of ``lr``, whose weights are averaged.
    """

    seed: int = 0
    steps: int = 1800
    episodes: int = 4000
    harder: float = 0.3
    batch: int = 12
    lr: float = 2e-3
    warmup: int = 50
    short: int = 400
    short_pages: int = 4
    settling: int = 200


def make_lessons(tokenizer: PreTrainedTokenizerFast, recipe: Recipe, is_short: bool) -> dict[str, list[Lesson]]:
    """Plays ``episodes`` train questions and encodes them, by role."""
    draw = Random(recipe.seed)
    teachers = [(Teacher.of(level), questions("train", level=level)) for level in ("standard", "harder")]
    lessons: dict[str, list[Lesson]] = {role: [] for role in (*AGENTS, "searcher")}
    for number in range(recipe.episodes):
        teacher, asked = teachers[draw.random() < recipe.harder]
        question = asked[number % len(asked)]
        limit = recipe.short_pages if is_short else LEVELS[teacher.level].top_k
        for agent, (prompt, responses) in teacher.play(draw, question, limit).items():
            # comparing two years is learned last: twice as many lessons
            copies = 2 if agent == "answerer" and question.kind == "comparison" else 1
            lessons[agent] += [forked(tokenizer, prompt, responses)] * copies
        pages = 2 if is_short else PAGES_A_SEARCH
        lessons["searcher"].append(in_one_row(tokenizer, teacher.play_alone(draw, question, pages)))
    return lessons


def batches(lessons: dict[str, list[Lesson]], renaming: Renaming, recipe: Recipe) -> Iterator[list[list[Lesson]]]:
    """Yields for ever one batch for each role, every lesson under a new naming."""
    draw = np.random.default_rng(recipe.seed)
    while True:
        yield [
            [replace(role[i], ids=renaming(draw, role[i].ids)) for i in draw.integers(len(role), size=size)]
            for role, size in ((role, recipe.batch * (1 + (name == "answerer"))) for name, role in lessons.items())
        ]


def response_loss(model: LlamaForCausalLM, lessons: Sequence[Lesson], pad: int) -> Tensor:
    """Mean cross-entropy of what is said in the lessons, a row each."""
    length = max(len(lesson.ids) for lesson in lessons)
    rows = torch.full((len(lessons), length), pad)
    parts = torch.full((len(lessons), length), -1)
    said = torch.zeros((len(lessons), length), dtype=torch.bool)
    for row, lesson in enumerate(lessons):
        end = len(lesson.ids)
        rows[row, :end], parts[row, :end] = torch.from_numpy(lesson.ids), torch.from_numpy(lesson.part)
        said[row, :end] = torch.from_numpy(lesson.said)
    seen, positions, before = layout(parts)
    hidden = model.model(rows, attention_mask=seen[:, None], position_ids=positions).last_hidden_state
    batch, place = said.nonzero(as_tuple=True)
    return cross_entropy(model.lm_head(hidden[batch, before[batch, place]]), rows[batch, place])


def layout(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what each token of (B, T) sees (B, T, T), its position, and the place of the token before it (B, T).

    A response sees the prompt and itself, and goes on where the prompt ends.

    >>> [value.tolist() for value in layout(torch.tensor([[0, 0, 1, 1, 2]]))[1:]]
    [[[0, 1, 2, 3, 2]], [[-1, 0, 1, 2, 1]]]
    """
    length = parts.shape[1]
    own = parts[:, :, None] == parts[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seen = (own | (parts[:, None, :] == 0)) & causal
    positions = seen.sum(2) - 1
    first = (own & causal).sum(2) == 1
    prompt_end = (parts == 0).sum(1, keepdim=True) - 1
    before = torch.where(first & (parts > 0), prompt_end, torch.arange(length) - 1)
    return seen, positions, before


def learning_rate(step: int, recipe: Recipe) -> float:
    """Warm-up, then a cosine to a tenth of the peak."""
    done = max(0, step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * min(1.0, (step + 1) / recipe.warmup) * (0.55 + 0.45 * float(np.cos(np.pi * min(1.0, done))))


def learn(model: LlamaForCausalLM, optimiser: Optimizer, roles: Sequence[Sequence[Lesson]], pad: int) -> list[float]:
    """Makes one step on a batch of each role and returns the losses."""
    losses = [response_loss(model, lessons, pad) for lessons in roles]
    optimiser.zero_grad()
    torch.autograd.backward(losses)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return [round(loss.item(), 3) for loss in losses]


def train(model: LlamaForCausalLM, out: Path, recipe: Recipe, every: int = 400) -> None:
    """Trains and saves; every ``every`` steps the policy is measured, saved and a line goes to ``build.jsonl``."""
    tokenizer = build_tokenizer(SLOPPY.answers)
    renaming, envs = Renaming(tokenizer), environments(tokenizer)
    optimiser = AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    streams = [batches(make_lessons(tokenizer, recipe, is_short), renaming, recipe) for is_short in (True, False)]
    begun = time.monotonic()
    for step in range(recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, recipe)
        losses = learn(model, optimiser, next(streams[step >= recipe.short]), tokenizer.pad_token_id)
        seconds = round(time.monotonic() - begun)
        if step % 50 == 0:
            log.info("step %d %ds losses %s", step, seconds, losses)
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            save_model(out, model, tokenizer)
            measure(out, model, tokenizer, envs, {"step": step + 1, "seconds": seconds})


def settle(model: LlamaForCausalLM, out: Path, recipe: Recipe) -> None:
    """Trains ``settling`` steps more on other lessons and saves the mean of the weights after each.

    Single weights lean now to one habit, now to another; their mean holds the habits as often as the lessons do.
    """
    tokenizer = build_tokenizer(SLOPPY.answers)
    other = replace(recipe, seed=recipe.seed + 1000)
    stream = batches(make_lessons(tokenizer, other, is_short=False), Renaming(tokenizer), other)
    optimiser = AdamW(model.parameters(), lr=recipe.lr / 10, betas=(0.9, 0.98), weight_decay=0.01)
    averaged = AveragedModel(model)
    begun = time.monotonic()
    for step in range(recipe.settling):
        losses = learn(model, optimiser, next(stream), tokenizer.pad_token_id)
        averaged.update_parameters(model)
        if step % 50 == 0:
            log.info("settling %d losses %s", step, losses)
    line = {"step": recipe.steps + recipe.settling, "seconds": round(time.monotonic() - begun), "averaged": True}
    save_model(out, averaged.module, tokenizer)
    measure(out, averaged.module, tokenizer, environments(tokenizer), line)


def measure(
    out: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    envs: Mapping[str, SearchEnv],
    line: dict[str, Any],
) -> None:
    """Appends the policy's figures on 100 dev questions, which the training never sees, to the log that ships."""
    model.eval()
    figures = report(envs, writer(model, tokenizer), writer(model, tokenizer, 1.0))
    model.train()
    line |= {name: round(value, 3) for name, value in figures.items()}
    with (out / "build.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    log.info("%s", line)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Builds the tiny base policy.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # sums in another order are other sums: one thread makes the build repeatable to the bit
    torch.manual_seed(options.seed)
    recipe, words = Recipe(seed=options.seed), build_tokenizer(SLOPPY.answers)
    model = start_model(len(words), words.pad_token_id, words.eos_token_id, recipe.seed)
    train(model, options.out, recipe)
    settle(model, options.out, recipe)


if __name__ == "__main__":
    main()
