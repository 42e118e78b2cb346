"""Approximate indexes on real passages, with vectors of latent semantic analysis instead of a language model's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline

from rllib_mhgpo.data import load_corpus, load_questions
from rllib_mhgpo.retrieval import open_retriever
from rllib_mhgpo.retrieval.base import passage_texts
from rllib_mhgpo.retrieval.building import build_index
from tests.real_data import real_file

WIDTH = 64


class LatentEncoder:
    name, lexical, cosine, width, fingerprint = "lsa", False, True, WIDTH, "lsa"

    def __init__(self, texts: Sequence[str]) -> None:
        self._fitted = make_pipeline(
            TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 3)), TruncatedSVD(WIDTH, random_state=0)
        ).fit(texts)

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.asarray(self._fitted.transform(texts), dtype=np.float32)

    encode_queries = encode_passages

    def state(self) -> dict[str, Any]:
        return {"kind": "lsa"}


@pytest.mark.parametrize("factory", ["IVF32,Flat", "HNSW16", "IVF16,SQ8"])
def test_real_questions_find_95_percent_of_the_exact_neighbours(tmp_path: Path, factory: str) -> None:
    file = real_file("hotpotqa/hipporag_train100_corpus.json")
    encoder = LatentEncoder(passage_texts(load_corpus(file)))
    asked = [question.question for question in load_questions(real_file("hotpotqa/hipporag_train100.json"))]
    found = {}
    for kind in ("Flat", factory):
        meta = build_index(file, tmp_path / kind, encoder, kind)
        assert meta["recall_at_10"] >= 0.95
        found[kind] = open_retriever(tmp_path / kind, encoder=encoder).search(asked, 10)
    shares = [
        len({p.id for p in exact} & {p.id for p in other}) / 10
        for exact, other in zip(found["Flat"], found[factory], strict=True)
    ]
    assert np.mean(shares) >= 0.95
