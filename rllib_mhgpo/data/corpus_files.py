"""Opens a corpus from any file that holds passages.

The one idea: an Arrow file is mapped as it is; anything else is read once, its exact repeats left out, and a large one
is kept in the cache as Arrow.
"""

from pathlib import Path

from rllib_mhgpo.data.cache import SMALL, cached_table, map_table
from rllib_mhgpo.data.corpus import Corpus, write_corpus
from rllib_mhgpo.data.passages import read_passages


def load_corpus(path: str | Path) -> Corpus:
    """Opens a file written by :meth:`Corpus.save` (memory-mapped), or a file of passages in a published layout.

    See :mod:`rllib_mhgpo.data.passages` for the layouts. Of passages of equal title and text the first is kept;
    ``repeats`` counts the others.

    Raises:
        DataError: when the file holds no passages, or is damaged.
    """
    path = Path(path)
    if is_arrow(path):
        return Corpus(map_table(path), str(path))

    def write(place: Path) -> None:
        write_corpus(read_passages(path), place, str(path))

    if path.is_file() and path.stat().st_size >= SMALL:
        return Corpus(cached_table(path, "corpus", write), str(path))
    return Corpus.distinct(read_passages(path), str(path))


def is_arrow(path: Path) -> bool:
    """Whether the file begins as an Arrow IPC file does."""
    try:
        with path.open("rb") as file:
            return file.read(6) == b"ARROW1"
    except OSError:
        return False  # reading it as another file says what is wrong
