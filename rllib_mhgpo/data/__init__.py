"""Question files and corpora: what is asked, and what can be found."""

from rllib_mhgpo.data.corpus import Corpus, Passage, load_corpus
from rllib_mhgpo.data.questions import Question, Questions, load_questions

__all__ = ["Corpus", "Passage", "Question", "Questions", "load_corpus", "load_questions"]
