"""Large files, read once: what was made of them lies as Arrow in the user's cache, mapped by all processes.

The one idea: an entry is named by the file's place, size, time and the reader's version, so that a changed file is
read again; an entry is whole or absent.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from rllib_mhgpo.errors import DataError

#: Files of fewer bytes are read anew each time.
SMALL = 16 << 20
_VERSION = "2"


def cache_folder() -> Path:
    """``$RLLIB_MHGPO_CACHE``, or ``rllib-mhgpo`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("RLLIB_MHGPO_CACHE") or Path(base) / "rllib-mhgpo").expanduser()


def cached_table(path: Path, kind: str, write: Callable[[Path], None]) -> pa.Table:
    """The table that ``write(place)`` makes of the file at ``path``, mapped; made where it is not there.

    Raises:
        DataError: when the cache cannot be written.
    """
    file = path.resolve()
    status = file.stat()
    return kept_table(file.name, [str(file), str(status.st_size), str(status.st_mtime_ns)], kind, write)


def kept_table(name: str, state: Sequence[str], kind: str, write: Callable[[Path], None]) -> pa.Table:
    """As :func:`cached_table`, of anything whose ``state`` changes when it does."""
    key = sha256("\0".join([*state, kind, _VERSION]).encode())
    name = re.sub(r"[^\w.-]", "_", name)[:60]
    place = cache_folder() / f"{name}.{kind}.{key.hexdigest()[:16]}.arrow"
    if not place.is_file():
        write_whole(place, write)
    return map_table(place)


def write_whole(place: Path, write: Callable[[Path], None]) -> None:
    """Calls ``write(file)`` on a file beside ``place`` and moves it there when it is whole.

    Raises:
        DataError: when it cannot be written; nothing is left behind.
    """
    part = place.with_name(f"{place.name}.part{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        os.replace(part, place)
    except OSError as error:
        raise DataError(f"{place}: cannot be written: {error.strerror or error}. Make room or name another.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_arrow(
    place: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, finish: Callable[[], dict[bytes, bytes]]
) -> None:
    """Streams batches into an Arrow IPC file whose metadata (``finish()``) are known only after the last of them."""
    rows = place.with_name(f"{place.name}.rows")
    try:
        with pa.OSFile(str(rows), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        copy_arrow(rows, place, finish())
    finally:
        rows.unlink(missing_ok=True)


def copy_arrow(source: Path, place: Path, metadata: dict[bytes, bytes]) -> None:
    """Copies an Arrow IPC file batch by batch, with other metadata."""
    with pa.OSFile(str(source), "rb") as file, pa.OSFile(str(place), "wb") as sink:  # read, not mapped: bounded
        reader = pa.ipc.open_file(file)
        with pa.ipc.new_file(sink, reader.schema.with_metadata(metadata)) as writer:
            for number in range(reader.num_record_batches):
                writer.write_batch(reader.get_batch(number).replace_schema_metadata(metadata))


def map_table(place: Path) -> pa.Table:
    """The table of an Arrow IPC file, mapped into memory.

    Raises:
        DataError: for a file that is not whole.
    """
    try:
        return pa.ipc.open_file(pa.memory_map(str(place))).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{place}: expected a whole Arrow file, found: {error}. Write it again.") from error
