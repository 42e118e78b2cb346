"""A page of rollout trees: an index of questions, and every tree packed by itself, so that a page opens at once."""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_mhgpo.errors import DataError
from rllib_mhgpo.records import read_records
from rllib_mhgpo.views.page import finite, make_page
from rllib_mhgpo.views.runs import Trial, find_trials

MOST_BYTES = 18_000_000
"""Of the packed trees of a page."""

Row = dict[str, Any]
Key = tuple[str, int, int]


def tree_page(run: Path, iterations: Sequence[int] | None, question: str | None) -> tuple[str, int, int]:
    """Makes the page of one run.

    Args:
        iterations: only these; None: all that are kept.
        question: only questions with this text, this id or this index.

    Returns:
        The page, how many trees are in it, and how many were found.

    Raises:
        DataError: no run, several trials, no records, or none that were asked for.
    """
    trial = only_trial(run)
    trees = group_trees(read_records(trial.records, iterations).to_pylist())
    if question is not None:
        trees = {key: rows for key, rows in trees.items() if _is_asked(rows[0], question)}
    if not trees:
        raise DataError(f"{trial.folder}: no records of a question {question!r}.")
    index: list[dict[str, Any]] = []
    packed: list[str] = []
    size = 0
    for key in by_use(trees):
        tree = packed_tree(trees[key])
        size += len(tree)
        if size > MOST_BYTES and packed:
            break
        index.append(summary(key, trees[key]))
        packed.append(tree)
    data = {"index": {"run": trial.name, "trees": index, "found": len(trees)}, "trees": packed}
    return make_page("trees", f"Rollouts of {trial.name}", data), len(packed), len(trees)


def only_trial(run: Path) -> Trial:
    """Returns the run's one trial that has records."""
    trials = find_trials(run)
    recorded = [trial for trial in trials if any(trial.records.glob("*.parquet"))]
    if not recorded:
        raise DataError(f"{run}: the run kept no records of its rollouts; record_share must be above 0.")
    if len(recorded) > 1:
        names = "\n  ".join(str(trial.folder) for trial in recorded)
        raise DataError(f"{run}: expected one trial, found {len(recorded)}; name one of\n  {names}")
    return recorded[0]


def group_trees(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    """Puts the rows of each tree together, in the order of their nodes."""
    trees: dict[Key, list[Row]] = {}
    for row in rows:
        trees.setdefault((row["split"], row["iteration"], row["root"]), []).append(row)
    for tree in trees.values():
        tree.sort(key=lambda row: row["node"])
    return trees


def by_use(trees: Iterable[Key]) -> list[Key]:
    """Sorts trees by what one looks at first: dev before and after, the last iterations, then back in time."""
    keys = sorted(trees)
    last = {split: max(i for s, i, _ in keys if s == split) for split in {s for s, _, _ in keys}}

    def rank(key: Key) -> tuple[int, int]:
        split, iteration, _ = key
        at_an_end = iteration in (0, last[split])
        return (0 if split == "dev" and at_an_end else 1 if at_an_end else 2, -iteration)

    return sorted(keys, key=rank)


def summary(key: Key, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns a tree's line in the list of questions."""
    split, iteration, root = key
    return {
        "split": split, "iteration": iteration, "root": root, "id": rows[0]["question_id"],
        "question": rows[0]["question"], "score": tree_score(rows), "nodes": len(rows),
        "zero": any(row["zero_std"] for row in rows),
        "illegal": any((dict(row["metrics"] or ()).get("illegal") or 0) > 0 for row in rows),
    }  # fmt: skip


def tree_score(rows: Iterable[Row]) -> float | None:
    """Mean over trajectories of EM, else of F1, else of the shared reward at their end.

    >>> tree_score([{"scores": None}, {"scores": [("f1", 0.5), ("em", 0.0)]}, {"scores": [("em", 1.0)]}])
    0.5
    """
    ends = [row for row in rows if row["scores"] is not None]
    scores: list[dict[str, float]] = [dict(row["scores"]) for row in ends] or [{}]
    for name in ("em", "f1"):
        if any(name in score for score in scores):
            return sum(score.get(name, 0.0) for score in scores) / len(scores)
    rewards: list[float] = [row["reward_shared"] for row in ends if row.get("reward_shared") is not None]
    return sum(rewards) / len(rewards) if rewards else None


def packed_tree(rows: Sequence[Row]) -> str:
    """Packs what the page shows of a tree: JSON, deflated, in base 64."""
    prompts: dict[str, int] = {}
    nodes = [_node(row, prompts) for row in rows]
    text = json.dumps(finite({"nodes": nodes, "prompts": list(prompts)}), ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode()


SHOWN = {
    "node": "node", "previous": "previous", "parents": "parents", "agent": "agent", "act": "act",
    "response": "response", "response_tokens": "tokens", "said": "said", "truncated": "truncated",
    "reward": "reward", "reward_shared": "shared", "reward_specific": "specific", "advantage": "advantage",
    "group": "group", "zero_std": "zero", "trained": "trained",
}  # fmt: skip


def _node(row: Row, prompts: dict[str, int]) -> dict[str, Any]:
    node = {short: row[name] for name, short in SHOWN.items()}
    return {
        **node,
        "prompt": prompts.setdefault(row["prompt"] or "", len(prompts)),
        "logprobs": [round(value, 3) for value in row["logprobs"] or ()],
        "advantages": row["token_advantages"] and [round(value, 3) for value in row["token_advantages"]],
        "metrics": dict(row["metrics"] or ()),
        "scores": None if row["scores"] is None else dict(row["scores"]),
        "episode": _episode(row["episode"]),
    }


def _episode(text: str | None) -> Mapping[str, Any] | None:
    try:
        episode = json.loads(text or "null")
    except ValueError:
        return None
    return episode if isinstance(episode, dict) else None


def _is_asked(row: Row, question: str) -> bool:
    is_it = question in (row["question_id"], str(row["root"]))
    return is_it or question.lower() in (row["question"] or "").lower()
