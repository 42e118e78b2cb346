"""What the agents said, kept on disk: a sample of the rollout trees as Parquet, one row a generation.

Not the numbers of a run (Ray's result.json has them) and not a picture of it. The one idea: a file holds the trees of
one iteration and is whole or absent, so that a run can be read while it is written, by anything that reads Parquet.
"""

import json
import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from rllib_mhgpo.errors import DataError
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.tree import FlatTrees, Generation, RolloutTree

FOLDER, VERSION, VERSION_KEY = "records", 1, b"rllib_mhgpo.records"
LONGEST_CHARACTER = 16
"""Ids over which a character may be spread; bytes that never become one are not waited for."""
NUMBERS = pa.map_(pa.string(), pa.float64())
SCHEMA = pa.schema(
    [
        ("iteration", pa.int32()),  # train: the iteration it trained; dev: after how many iterations
        ("split", pa.string()),
        ("root", pa.int64()),  # index of the question in its split
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("node", pa.int32()),  # index within the tree
        ("previous", pa.int32()),  # who acted before, null at the root
        ("parents", pa.list_(pa.int32())),  # whose responses the prompt contains
        ("path", pa.list_(pa.int32())),
        ("agent", pa.string()),
        ("act", pa.int32()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response", pa.string()),  # without special tokens, as the environment reads it
        ("response_ids", pa.list_(pa.int32())),
        ("response_tokens", pa.list_(pa.string())),  # the text of each id
        ("logprobs", pa.list_(pa.float32())),
        ("said", pa.list_(pa.bool_())),  # null: the policy said all of it
        ("truncated", pa.bool_()),
        ("reward", pa.float64()),
        ("reward_shared", pa.float64()),
        ("reward_specific", pa.float64()),
        ("advantage", pa.float64()),
        ("token_advantages", pa.list_(pa.float32())),  # null where all tokens have the same
        ("group", pa.int64()),
        ("zero_std", pa.bool_()),
        ("trained", pa.bool_()),  # whether it carried loss
        ("metrics", NUMBERS),
        ("scores", NUMBERS),  # of the trajectory that ends here, null elsewhere
        ("episode", pa.string()),  # what the environment says of that trajectory, as JSON
    ],
    metadata={VERSION_KEY: str(VERSION).encode()},
)
Credit = Mapping[str, NDArray[Any]]
Row = dict[str, Any]
logger = logging.getLogger(__name__)


def sample_roots(roots: Sequence[int], share: float) -> frozenset[int]:
    """Chooses a share of the roots, rounded up: every root has its rank, so that iterations and runs can be compared.

    >>> len(sample_roots(range(8), 0.25)), len(sample_roots(range(8), 0.0))
    (2, 0)
    >>> sample_roots(range(8), 0.25) == sample_roots(range(7, -1, -1), 0.25)
    True
    """
    ranked = sorted(roots, key=lambda root: (zlib.crc32(str(root).encode()), root))
    return frozenset(ranked[: ceil(share * len(ranked))])


# --- rows -----------------------------------------------------------------------------------------------------------


def tree_rows(trees: Sequence[RolloutTree], flat: FlatTrees, credit: Credit, tokenizer: Any) -> Iterator[list[Row]]:
    """Yields the rows of each tree that is recorded, without ``iteration`` and ``split``.

    Args:
        flat: the trees laid out.
        credit: arrays over the N generations; what is missing is null.
    """
    for place, tree in enumerate(trees):
        if not tree.recorded:
            continue
        rows = np.flatnonzero(flat.tree == place).tolist()
        episode = next((g.record for row in rows if (g := flat.generations[row]).record), None) or {}
        asked = {"root": tree.root, "question_id": _text(episode.get("id")), "question": _text(episode.get("question"))}
        yield [
            {
                **asked,
                "node": node,
                **_said(flat.generations[row], tokenizer),
                **_earned(credit, row),
            }
            for node, row in enumerate(rows)
        ]


def _said(g: Generation, tokenizer: Any) -> Row:
    return {
        "previous": g.previous, "parents": list(g.parents), "path": list(g.path), "agent": g.agent, "act": g.act,
        "prompt": _decoded(tokenizer, g.prompt, False), "prompt_ids": g.prompt,
        "response": _decoded(tokenizer, g.response, True), "response_ids": g.response,
        "response_tokens": token_texts(tokenizer, g.response), "logprobs": g.logprobs, "said": g.said,
        "truncated": g.truncated, "metrics": g.metrics, "scores": g.scores or None,
        "episode": None if g.record is None else json.dumps(g.record, ensure_ascii=False, default=str),
    }  # fmt: skip


def _earned(credit: Credit, row: int) -> Row:
    names = {"reward", "reward_shared", "reward_specific", "advantage", "group", "zero_std"} & credit.keys()
    earned = {name: credit[name][row].item() for name in names}
    if "token_advantage" in credit:
        earned["token_advantages"] = np.asarray(credit["token_advantage"][row], dtype=np.float32)
    return {**earned, "trained": bool(credit["counted"][row]) if "counted" in credit else False}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _decoded(tokenizer: Any, ids: Tokens, skip_special: bool) -> str:
    return _whole(str(tokenizer.decode(ids, skip_special_tokens=skip_special)))


def _whole(text: str) -> str:
    """Parquet holds UTF-8, in which a lone surrogate has no place."""
    return text.encode("utf-8", "replace").decode()


def token_texts(tokenizer: Any, ids: Tokens) -> list[str]:
    """Returns the text of each id, special tokens included; put together they are the text of all.

    Where a character is spread over several ids, it stands at the last of them.
    """
    texts, start, told = [], 0, ""
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[start:end], skip_special_tokens=False))
        if text.endswith("\ufffd") and end < len(ids) and end - start <= LONGEST_CHARACTER:
            texts.append("")  # an unfinished character
            continue
        texts.append(_whole(text[len(told) :]))
        # one id of context: some tokenizers write a word's first piece without its space at the start of a text
        start = end - 1
        told = str(tokenizer.decode(ids[start:end], skip_special_tokens=False))
    return texts


# --- files ----------------------------------------------------------------------------------------------------------


class RecordFolder:
    """The records of one run: one file for each split and iteration, older ones thinned out when they grow too large.

    Args:
        filesystem: where the run's results are kept.
        path: the folder, made when something is written.
        most_bytes: of all files together; one file holds at most a quarter of it.
    """

    def __init__(self, filesystem: fs.FileSystem, path: str, most_bytes: int) -> None:
        self.filesystem, self.path, self.most_bytes = filesystem, path, most_bytes

    def write(self, split: str, iteration: int, trees: Iterable[list[Row]]) -> None:
        """Writes the trees' rows as one file; it appears under its name when it is whole, replacing an earlier one.

        A disk that is full or not writable costs the records, not the run: it is said in the log.
        """
        head, limit, rows = {"split": split, "iteration": iteration}, self.most_bytes // 4, []
        for tree in trees:
            limit -= sum(_size(row) for row in tree)
            if limit < 0:
                break
            rows += [{**head, **row} for row in tree]
        if not rows:
            return
        name = f"{split}-{iteration:06d}.parquet"
        try:
            self.filesystem.create_dir(self.path, recursive=True)
            part = f"{self.path}/.{name}.part"  # readers of a folder pass over names with a dot
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), part, filesystem=self.filesystem, compression="zstd")
            self.filesystem.move(part, f"{self.path}/{name}")
            self.thin()
        except OSError as error:
            logger.warning("records of iteration %d cannot be written: %s; the run goes on.", iteration, error)

    def thin(self) -> None:
        """Removes every second file of the larger split, but its first and last, until all fit."""
        while True:
            files = self._files()
            if sum(file.size for file in files) <= self.most_bytes:
                return
            splits = {split: [f for f in files if f.base_name.startswith(f"{split}-")] for split in ("train", "dev")}
            larger = max(splits.values(), key=lambda those: sum(f.size for f in those) * (len(those) > 2))
            if len(larger) <= 2:
                return
            for file in larger[1:-1:2]:
                self.filesystem.delete_file(file.path)

    def _files(self) -> list[fs.FileInfo]:
        found = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        return sorted((f for f in found if _is_record(f.base_name)), key=lambda file: file.base_name)


def _size(row: Row) -> int:
    """Roughly what a row takes before it is compressed."""
    text = len(row["prompt"]) + len(row["episode"] or "") + 2 * len(row["response"])
    return text + 4 * len(row["prompt_ids"]) + 8 * len(row["response_ids"])


def _is_record(name: str) -> bool:
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def record_files(folder: Path, iterations: Collection[int] | None = None) -> list[Path]:
    """Returns a run's files of records, in order.

    Raises:
        DataError: there are none, or none of these iterations.
    """
    found = sorted(file for file in folder.glob("*.parquet") if _is_record(file.name))
    files = [file for file in found if iterations is None or iteration_of(file) in (None, *iterations)]
    if not files:
        there = sorted({number for file in found if (number := iteration_of(file)) is not None})
        raise DataError(
            f"{folder}: expected records (*.parquet) of iterations {list(iterations or ())}, found those of {there}."
            if found
            else f"{folder}: expected records (*.parquet), found none."
        )
    return files


def iteration_of(file: Path) -> int | None:
    """Reads the iteration from a file's name, None where the name has none."""
    number = file.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else None


def read_records(
    folder: Path, iterations: Collection[int] | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Reads the records of a run, of every version so far; columns that an older one lacks are null.

    Args:
        folder: the run's folder of records.
        iterations: only these; None: all.
        columns: only these; None: all.

    Raises:
        DataError: no records there, a file that is none, or one of a newer version.
    """
    return pa.concat_tables([read_file(file, columns) for file in record_files(folder, iterations)])


def read_file(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads one file of records as :func:`read_records` does; one that was thinned out meanwhile is empty."""
    wanted = pa.schema([SCHEMA.field(name) for name in columns or SCHEMA.names])
    try:
        there = pq.read_schema(file)
        _check_version(file, (there.metadata or {}).get(VERSION_KEY, b"").decode())
        table = pq.read_table(file, columns=[name for name in wanted.names if name in there.names])
    except FileNotFoundError:
        return wanted.empty_table()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as Parquet: {error}. Remove it to see the others.") from None
    made = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in wanted
    ]
    return pa.table(made, schema=wanted)


def _check_version(file: Path, version: str) -> None:
    if not version.isdecimal():
        raise DataError(f"{file}: expected records of rollouts, found another Parquet file; remove it.")
    if int(version) > VERSION:
        raise DataError(f"{file}: its schema is version {version}, this package reads up to {VERSION}; upgrade it.")
