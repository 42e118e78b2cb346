"""A first look at question files and corpora: a few records of each, as a run would find them at its start."""

from itertools import islice
from pathlib import Path

from rllib_mhgpo.data.corpus import Corpus
from rllib_mhgpo.data.corpus_files import is_arrow
from rllib_mhgpo.data.hub import HUB
from rllib_mhgpo.data.layouts import to_question
from rllib_mhgpo.data.passages import read_passages
from rllib_mhgpo.data.questions import checked_questions
from rllib_mhgpo.data.records import iterate_records

RECORDS = 8


def peek_questions(name: str, require_context: bool) -> None:
    """Reads the first questions of a file; a data set of the hub is left alone.

    Raises:
        DataError: as :func:`rllib_mhgpo.data.load_questions`, for what the first records show.
    """
    if name.startswith(HUB):
        return
    path = Path(name).expanduser()
    found = enumerate(islice(iterate_records(path), RECORDS))
    placed = ((place, to_question(place, value, str(number), require_context)) for number, (place, value) in found)
    list(checked_questions(placed, str(path)))


def peek_corpus(name: str) -> None:
    """Reads the first passages of a file; a saved corpus is left alone.

    Raises:
        DataError: as :func:`rllib_mhgpo.data.load_corpus`, for what the first records show.
    """
    path = Path(name).expanduser()
    if not is_arrow(path):
        Corpus.distinct(islice(read_passages(path), RECORDS), str(path))
