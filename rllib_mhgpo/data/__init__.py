"""Question files and corpora: what is asked, and what can be found."""

from rllib_mhgpo.data.corpus import Corpus, Passage
from rllib_mhgpo.data.corpus_files import load_corpus
from rllib_mhgpo.data.peek import peek_corpus, peek_questions
from rllib_mhgpo.data.predictions import Predictions, load_predictions
from rllib_mhgpo.data.question_files import load_questions
from rllib_mhgpo.data.questions import Question, Questions, hops_found

__all__ = [
    "Corpus",
    "Passage",
    "Predictions",
    "Question",
    "Questions",
    "hops_found",
    "load_corpus",
    "load_predictions",
    "load_questions",
    "peek_corpus",
    "peek_questions",
]
