"""Finds passages: encoders, indexes exact and approximate, and the retrievers over them, here and elsewhere."""

from rllib_mhgpo.retrieval.base import BaseRetriever, RetrievalCounts
from rllib_mhgpo.retrieval.build import build_retriever
from rllib_mhgpo.retrieval.encoder import Encoder
from rllib_mhgpo.retrieval.retriever import CorpusRetriever, Retriever
from rllib_mhgpo.retrieval.store import open_retriever, save_retriever
from rllib_mhgpo.retrieval.tfidf import TfidfEncoder

__all__ = [
    "BaseRetriever",
    "CorpusRetriever",
    "Encoder",
    "RetrievalCounts",
    "Retriever",
    "TfidfEncoder",
    "build_retriever",
    "open_retriever",
    "save_retriever",
]
