"""A page of rollout trees: an index of questions, and every tree packed by itself, so that a page opens at once."""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_mhgpo.errors import DataError
from rllib_mhgpo.records import SCHEMA, iteration_of, read_file, record_files
from rllib_mhgpo.views.page import finite, make_page
from rllib_mhgpo.views.runs import Trial, find_trials

MOST_BYTES = 18_000_000
"""Of the packed trees of a page."""

NAMES = ("split", "iteration", "root", "node", "question_id", "question")
COLUMNS = [name for name in SCHEMA.names if name not in ("prompt_ids", "response_ids", "path")]

Row = dict[str, Any]
Key = tuple[str, int, int]


def tree_page(run: Path, iterations: Sequence[int] | None, question: str | None) -> tuple[str, int, int]:
    """Makes the page of one run, the last of a folder of several.

    Args:
        iterations: only these; None: all that are kept.
        question: only questions with this text, this id or this index.

    Returns:
        The page, how many trees are in it, and how many were found.

    Raises:
        DataError: no run, no records, or none that were asked for.
    """
    trial = last_trial(run)
    index: list[dict[str, Any]] = []
    packed: list[str] = []
    found = size = 0
    for file in by_use(record_files(trial.records, iterations)):
        full = size > MOST_BYTES  # what is left is only counted
        trees = group_trees(read_file(file, NAMES if full else COLUMNS).to_pylist())
        asked = [key for key, rows in trees.items() if _is_asked(rows[0], iterations, question)]
        found += len(asked)
        for key in [] if full else asked:
            packed_tree = pack(trees[key])
            size += len(packed_tree)
            if size > MOST_BYTES and packed:
                break
            index.append(summary(key, trees[key]))
            packed.append(packed_tree)
    if not found:
        raise DataError(
            f"{trial.folder}: no records of " + ("any" if question is None else f"a question {question!r}.")
        )
    data = {"index": {"run": trial.name, "trees": index, "found": found}, "trees": packed}
    return make_page("trees", f"Rollouts of {trial.name}", data), len(packed), found


def last_trial(run: Path) -> Trial:
    """Returns the run's trial that has written records last."""
    written = {trial: [file.stat().st_mtime for file in trial.records.glob("*.parquet")] for trial in find_trials(run)}
    recorded = [trial for trial in written if written[trial]]
    if not recorded:
        raise DataError(f"{run}: the run kept no records of its rollouts; record_share must be above 0.")
    return max(recorded, key=lambda trial: max(written[trial]))


def group_trees(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    """Puts the rows of each tree together, in the order of their nodes."""
    trees: dict[Key, list[Row]] = {}
    for row in rows:
        trees.setdefault((row["split"], row["iteration"], row["root"]), []).append(row)
    for tree in trees.values():
        tree.sort(key=lambda row: row["node"])
    return trees


def by_use(files: Iterable[Path]) -> list[Path]:
    """Sorts files by what one looks at first: dev before and after, the last training, then back in time."""
    numbers = {file: (file.name.startswith("dev"), iteration_of(file) or 0) for file in files}
    last = {split: max(i for each, i in numbers.values() if each == split) for split, _ in numbers.values()}

    def rank(file: Path) -> tuple[int, int]:
        is_dev, iteration = numbers[file]
        at_an_end = iteration in (0, last[is_dev])
        return (0 if is_dev and at_an_end else 1 if at_an_end else 2, -iteration)

    return sorted(numbers, key=rank)


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


def pack(rows: Sequence[Row]) -> str:
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


def _is_asked(row: Row, iterations: Sequence[int] | None, question: str | None) -> bool:
    if iterations and row["iteration"] not in iterations:
        return False
    if question is None or question in (row["question_id"], str(row["root"])):
        return True
    return question.lower() in (row["question"] or "").lower()
