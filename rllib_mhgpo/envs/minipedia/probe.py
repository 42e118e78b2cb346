"""Measures a policy on minipedia without the trainer: whole episodes, and each role by itself.

Not the evaluation that users run. One idea: every role can be replaced by the perfect one, so that what one role can
do is seen apart from what the others spoil.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from rllib_mhgpo.data import Passage, Question
from rllib_mhgpo.envs.minipedia.forms import ROLES
from rllib_mhgpo.envs.minipedia.perfect import PERFECT
from rllib_mhgpo.metrics import f1

AGENTS = ("rewriter", "reranker", "answerer")
Write = Callable[[Sequence[str]], list[str]]
Search = Callable[[Sequence[str], int], list[list[Passage]]]


@dataclass(frozen=True)
class Episode:
    """One played question: each agent's output, whether it was legal, and the answer's F1."""

    outputs: dict[str, str]
    legal: dict[str, bool]
    f1: float


def writer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, temperature: float = 0.0, tokens: int = 24
) -> Write:
    """Returns a function that continues prompts, greedily at temperature 0."""

    @torch.inference_mode()
    def write(prompts: Sequence[str]) -> list[str]:
        ordered = sorted(set(prompts), key=len) if not temperature else list(prompts)
        written: list[str] = []
        for start in range(0, len(ordered), 64):
            batch = tokenizer(ordered[start : start + 64], return_tensors="pt", padding=True, padding_side="left")
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            batch.pop("token_type_ids", None)
            ids = model.generate(**batch, max_new_tokens=tokens, **(sampling if temperature else {"do_sample": False}))
            written += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return [dict(zip(ordered, written, strict=True))[p] for p in prompts] if not temperature else written

    return write


def play_all(questions: Sequence[Question], search: Search, write: Write, perfect: Sequence[str] = ()) -> list[Episode]:
    """Plays all questions; the agents named in ``perfect`` are played by the hand-written policy."""

    def act(agent: str, fields: Sequence[tuple[object, ...]]) -> list[str]:
        if agent in perfect:
            asked = [
                (q, *rest) if agent == "reranker" else (q, rest[-1]) if agent == "answerer" else (q,)
                for q, *rest in fields
            ]
            return [PERFECT[agent](*arguments) for arguments in asked]
        return write([ROLES[agent].messages(*arguments)[0]["content"] for arguments in fields])  # type: ignore[arg-type]

    asked = [q.question for q in questions]
    rewrites = act("rewriter", [(q,) for q in asked])
    parsed = [ROLES["rewriter"].parse(text) for text in rewrites]
    queries = [lines or [q] for (lines, _), q in zip(parsed, asked, strict=True)]
    shown = [retrieve(search, lines) for lines in queries]
    picks = act("reranker", list(zip(asked, queries, shown, strict=True)))
    chosen = [ROLES["reranker"].parse(text, pages) for text, pages in zip(picks, shown, strict=True)]
    read = [[pages[i] for i in numbers] for (numbers, _), pages in zip(chosen, shown, strict=True)]
    answers = act("answerer", [(q, (), pages) for q, pages in zip(asked, read, strict=True)])
    return [
        Episode(
            dict(zip(AGENTS, (rewrites[i], picks[i], answers[i]), strict=True)),
            dict(zip(AGENTS, (parsed[i][1], chosen[i][1], ROLES["answerer"].parse(answers[i])[1]), strict=True)),
            f1(answers[i], question.answers),
        )
        for i, question in enumerate(questions)
    ]


def retrieve(search: Search, queries: Sequence[str]) -> list[Passage]:
    """Ten pages over the queries, without repeats."""
    shares = [10 // len(queries) + (i < 10 % len(queries)) for i in range(len(queries))]
    hits = (pages[:k] for pages, k in zip(search(queries, 10), shares, strict=True))
    return list(dict.fromkeys(page for pages in hits for page in pages))


def report(
    questions: Sequence[Question], search: Search, greedy: Write, sampled: Write, group: int = 4
) -> Mapping[str, float]:
    """Returns the figures that a base policy is judged by."""
    played = play_all(questions, search, greedy)
    figures = {"greedy": fmean(e.f1 for e in played)}
    for kind in ("bridge", "comparison"):
        figures[f"greedy, {kind}"] = fmean(e.f1 for e, q in zip(played, questions, strict=True) if q.kind == kind)
    for agent in AGENTS:
        others = [other for other in AGENTS if other != agent]
        figures[f"greedy, only {agent} is the model"] = fmean(e.f1 for e in play_all(questions, search, greedy, others))
    rollouts = [play_all(questions, search, sampled) for _ in range(group)]
    figures["sampled"] = fmean(e.f1 for rollout in rollouts for e in rollout)
    for agent in AGENTS:
        figures[f"sampled, illegal {agent}"] = fmean(not e.legal[agent] for rollout in rollouts for e in rollout)
    figures["groups without spread"] = fmean(len({e.f1 for e in group}) == 1 for group in zip(*rollouts, strict=True))
    return figures
