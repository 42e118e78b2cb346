"""Finds passages: encoders, an exact index, and the retriever over both."""

from rllib_mhgpo.retrieval.build import build_retriever
from rllib_mhgpo.retrieval.encoder import Encoder
from rllib_mhgpo.retrieval.retriever import RetrievalCounts, Retriever
from rllib_mhgpo.retrieval.store import open_retriever, save_retriever
from rllib_mhgpo.retrieval.tfidf import TfidfEncoder

__all__ = [
    "Encoder",
    "RetrievalCounts",
    "Retriever",
    "TfidfEncoder",
    "build_retriever",
    "open_retriever",
    "save_retriever",
]
