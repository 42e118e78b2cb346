"""Measures a policy on minipedia without the trainer: whole episodes, and each role by itself.

Not the evaluation that users run. One idea: every role can be played by the perfect policy, so that what one role can
do is seen apart from what the others spoil.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from rllib_mhgpo.envs.minipedia.perfect import PERFECT
from rllib_mhgpo.envs.minipedia.world import LEVELS
from rllib_mhgpo.envs.search import SearchEnv
from rllib_mhgpo.envs.transcript import TranscriptEnv
from rllib_mhgpo.spaces import Tokens

AGENTS = ("rewriter", "reranker", "answerer")
PAGES_A_SEARCH = 4
Write = Callable[[Sequence[Tokens]], list[Tokens]]
"""Prompts -> responses, token ids both."""


@dataclass
class Episode:
    """One played question: each agent's output, how many of its outputs were illegal, and the answer's scores."""

    outputs: dict[str, str] = field(default_factory=dict)
    illegal: dict[str, list[float]] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


def writer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, temperature: float = 0.0, tokens: int = 40
) -> Write:
    """Returns a function that continues prompts, greedily at temperature 0; a closing tag ends a response."""
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(TranscriptEnv.stop))]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    @torch.inference_mode()
    def write(prompts: Sequence[Tokens]) -> list[Tokens]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        written: dict[int, Tokens] = {}
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            batch = tokenizer.pad(
                {"input_ids": [prompts[i].tolist() for i in rows]}, return_tensors="pt", padding_side="left"
            )
            kept = {name: batch[name] for name in ("input_ids", "attention_mask")}
            ids = model.generate(
                **kept, max_new_tokens=tokens, eos_token_id=ends, **(sampling if temperature else {"do_sample": False})
            )
            for i, row in zip(rows, ids[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
                length = next((k + 1 for k, token in enumerate(row) if token in ends), len(row))
                written[i] = np.array(row[:length], dtype=np.int32)
        return [written[i] for i in range(len(prompts))]

    return write


def play_all(
    env: SearchEnv, split: str, count: int, write: Write, perfect: Sequence[str] = (), repeats: int = 1
) -> list[Episode]:
    """Plays the first ``count`` questions, each ``repeats`` times; roles in ``perfect`` are played by hand."""
    envs = [copy.deepcopy(env) for _ in range(count * repeats)]
    for number, each in enumerate(envs):
        each.reset(seed=0, options={"index": number // repeats, "split": split})
    episodes = [Episode() for _ in envs]
    live = list(zip(envs, episodes, strict=True))
    while live:
        acting = [each.agent_selection for each, _ in live]
        asked = [i for i, agent in enumerate(acting) if agent not in perfect]
        said = dict(zip(asked, write([live[i][0].observe(acting[i]) for i in asked]) if asked else [], strict=True))
        actions = [
            said[i] if i in said else each.encode_text(PERFECT[each.kinds[agent]](*each.told(agent)))
            for i, ((each, _), agent) in enumerate(zip(live, acting, strict=True))
        ]
        type(env).step_batch([each for each, _ in live], actions)
        for (each, episode), agent in zip(live, acting, strict=True):
            episode.outputs[agent] = each.outputs[agent]
            episode.illegal.setdefault(agent, []).append(each.infos[agent]["metrics"]["illegal"])
            episode.scores = each.infos[agent].get("scores", {})
        live = [(each, episode) for each, episode in live if not episode.scores]
    return episodes


def mean(episodes: Sequence[Episode], name: str = "f1") -> float:
    """Mean of a score."""
    return fmean(episode.scores[name] for episode in episodes)


def illegal(episodes: Sequence[Episode], agent: str) -> float:
    """Share of an agent's outputs that were illegal."""
    return fmean(value for episode in episodes for value in episode.illegal.get(agent, ()))


def environments(tokenizer: PreTrainedTokenizerBase) -> dict[str, SearchEnv]:
    """By name: three agents at both levels, and the single context."""
    built: dict[str, SearchEnv] = {}
    for level, world in LEVELS.items():
        train, dev = f"minipedia:train?level={level}", f"minipedia:dev?level={level}"
        built[level] = SearchEnv(tokenizer, train, dev, prompts="minipedia", top_k=world.top_k)
    built["single context"] = TranscriptEnv(
        tokenizer, retriever=built["standard"].retriever, prompts="minipedia", top_k=PAGES_A_SEARCH
    )
    return built


def report(
    envs: Mapping[str, SearchEnv], greedy: Write, sampled: Write, count: int = 100, group: int = 4
) -> dict[str, float]:
    """Returns the figures that a base policy is judged by, on the first ``count`` dev questions."""
    env = envs["standard"]
    played = play_all(env, "dev", count, greedy)
    figures = {"greedy": mean(played)}
    kinds = [question.kind for question in env.splits["dev"][:count]]
    for kind in ("bridge", "comparison"):
        figures[f"greedy, {kind}"] = mean([e for e, k in zip(played, kinds, strict=True) if k == kind])
    for agent in AGENTS:
        others = [other for other in AGENTS if other != agent]
        alone = play_all(env, "dev", count, greedy, others)
        figures[f"only {agent}, F1"], figures[f"only {agent}, Acc"] = mean(alone), mean(alone, "acc")
        compared = [e for e, kind in zip(alone, kinds, strict=True) if kind == "comparison"]
        figures[f"only {agent}, Acc of comparisons"] = mean(compared, "acc")
    rollouts = play_all(env, "dev", count, sampled, repeats=group)
    figures["sampled"] = mean(rollouts)
    for agent in AGENTS:
        figures[f"sampled, illegal {agent}"] = illegal(rollouts, agent)
    groups = [rollouts[i : i + group] for i in range(0, len(rollouts), group)]
    figures["groups without spread"] = fmean(len({e.scores["f1"] for e in members}) == 1 for members in groups)
    for name in ("single context", "harder"):
        alone = play_all(envs[name], "dev", count, greedy)
        drawn = play_all(envs[name], "dev", count, sampled)
        figures |= {f"{name}, greedy": mean(alone), f"{name}, sampled": mean(drawn)}
        for agent in envs[name].possible_agents:
            figures[f"{name}, sampled, illegal {agent}"] = illegal(drawn, agent)
    return figures
