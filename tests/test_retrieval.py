"""TF-IDF, indexes and the retriever, against plain sorting and with vectors chosen by hand."""

import copy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from rllib_mhgpo.data import Corpus, Passage, load_questions
from rllib_mhgpo.errors import ConfigError, RetrievalError
from rllib_mhgpo.retrieval import (
    BaseRetriever,
    Retriever,
    TfidfEncoder,
    build_retriever,
    open_retriever,
    save_retriever,
)
from rllib_mhgpo.retrieval.bm25 import BM25Retriever
from rllib_mhgpo.retrieval.index import FlatIndex, Index, SparseIndex
from tests.real_data import real_file

PAGES = [
    ("Red Sand", "Red Sand is a film that Ada Holm wrote."),
    ("Ada Holm", "Ada Holm was born in Ostby."),
    ("Ostby", "Ostby is a town in the north."),
    ("Red Sand", "Red Sand is a band from Ostby."),
]


class TableEncoder:
    """Vectors looked up by text; passages are looked up by what follows the title's line."""

    lexical = False

    def __init__(self, table: dict[str, list[float]], cosine: bool = False, name: str = "table") -> None:
        self.table, self.cosine, self.name = table, cosine, name
        self.width = len(next(iter(table.values())))
        self.fingerprint = name
        self.encoded: list[str] = []

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.encoded += texts
        return np.array([self.table[text.split("\n")[-1]] for text in texts], dtype=np.float32)

    encode_passages = encode_queries

    def state(self) -> dict[str, Any]:
        return {"kind": "table"}


def corpus_of(*texts: str) -> Corpus:
    return Corpus.from_passages([("", text) for text in texts])


def ids(hits: list[list[Passage]]) -> list[list[int]]:
    return [[passage.id for passage in found] for found in hits]


def index_of(retriever: BaseRetriever) -> Index:
    assert isinstance(retriever, Retriever)
    return retriever.index


def test_fewer_passages_than_asked_for() -> None:
    encoder = TableEncoder({"a": [1, 0], "b": [0, 1], "c": [0, -1], "q": [1, 0.5]})
    retriever = Retriever.build(corpus_of("a", "b", "c"), encoder)
    assert ids(retriever.search(["q"], 5)) == [[0, 1, 2]]
    assert ids(build_retriever(Corpus.from_passages(PAGES[:3])).search(["film Ada town is"], 5)) == [[0, 2, 1]]


def test_cosine_scales_both_sides() -> None:
    table = {"short": [0.1, 0.0], "long": [0.5, 0.5], "q": [1.0, 0.0]}
    corpus = corpus_of("short", "long")
    assert ids(Retriever.build(corpus, TableEncoder(table, cosine=True)).search(["q"], 2)) == [[0, 1]]
    assert ids(Retriever.build(corpus, TableEncoder(table)).search(["q"], 2)) == [[1, 0]]  # inner product: 0.1 < 0.5


def test_widths_must_agree() -> None:
    narrow = TableEncoder({"a": [0.0] * 384}, name="MiniLM")
    index = FlatIndex.of([np.zeros((1, 768), dtype=np.float32)], 768)
    with pytest.raises(
        RetrievalError, match=r"'MiniLM' makes vectors of width 384, the Contriever index holds width 768"
    ):
        Retriever(corpus_of("a"), narrow, index, index_name="the Contriever index")


def test_counts_must_agree() -> None:
    encoder = TableEncoder({"a": [1.0, 0.0]})
    index = FlatIndex.of([np.zeros((1000, 2), dtype=np.float32)], 2)
    with pytest.raises(RetrievalError, match=r"holds 1000 vectors, the corpus .* 990 passages"):
        Retriever(corpus_of(*["a"] * 990), encoder, index)


def test_bm25s_counts_must_agree_too(tmp_path: Path) -> None:
    BM25Retriever.build(corpus_of(*["a"] * 10)).save(tmp_path / "bm25")
    for count in (9, 11):
        with pytest.raises(RetrievalError, match=rf"bm25 holds 10 passages, the corpus .* {count}; expected the same"):
            BM25Retriever.open(tmp_path / "bm25", corpus_of(*["a"] * count))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_vectors_that_are_not_finite_name_their_text(bad: float) -> None:
    encoder = TableEncoder({"a": [1, 0], "broken text": [1, bad], "q": [1, 0], "broken query": [bad, bad]})
    with pytest.raises(RetrievalError, match=r"encoder 'table'.*text 'broken text'"):
        Retriever.build(corpus_of("a", "broken text"), encoder)
    retriever = Retriever.build(corpus_of("a"), encoder)
    with pytest.raises(RetrievalError, match="text 'broken query'"):
        retriever.search(["q", "broken query"], 1)
    assert ids(retriever.search(["q"], 1)) == [[0]]


def test_a_vector_without_direction_has_no_cosine() -> None:
    encoder = TableEncoder({"a": [1, 0], "zero": [0, 0]}, cosine=True)
    with pytest.raises(RetrievalError, match="text 'zero'"):
        Retriever.build(corpus_of("a"), encoder).search(["zero"], 1)


def test_refused_queries() -> None:
    retriever = build_retriever(Corpus.from_passages(PAGES))
    for blank in ("", "   ", "\n"):
        with pytest.raises(RetrievalError, match="query 1 of 2: expected words"):
            retriever.search(["Ada", blank], 3)
    for k in (0, -1):
        with pytest.raises(RetrievalError, match=f"at least 1, found {k}"):
            retriever.search(["Ada"], k)
    assert retriever.search([], 3) == []


def test_words_that_no_passage_holds_find_nothing() -> None:
    retriever = build_retriever(Corpus.from_passages(PAGES))
    assert retriever.search(["zebra quagga"], 3) == [[]]
    assert ids(retriever.search(["zebra north"], 3)) == [[2]]  # one passage shares a word: no other is made up


def test_tfidf_weights_by_hand() -> None:
    # 2 passages; df: a 2, b 1, c 1. idf = ln(3 / (1 + df)) + 1; tf enters as 1 + ln tf
    encoder = TfidfEncoder.fit(["a b b", "a c"])
    rare, common = np.log(1.5) + 1, 1.0
    rows = encoder.encode_passages(["a b b", "a c", "É c.", "z"]).toarray()
    expected = [[common, (1 + np.log(2)) * rare, 0], [common, 0, rare], [0, 0, rare], [0, 0, 0]]
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    assert encoder.width == 3


def test_every_word_has_a_column_of_its_own() -> None:
    words = [f"w{i}" for i in range(3000)]
    encoder = TfidfEncoder.fit(words)
    rows = encoder.encode_passages(words)
    assert encoder.width == rows.nnz == len(set(rows.indices)) == 3000


def test_accents_letters_and_digits() -> None:
    retriever = build_retriever(corpus_of("Beyoncé sings", "V is a film", "Apollo 9 flew"))
    assert ids(retriever.search(["beyonce", "v", "9"], 3)) == [[0], [1], [2]]


def test_a_corpus_without_words_is_refused() -> None:
    with pytest.raises(RetrievalError, match="expected words in the passages, found none"):
        build_retriever(corpus_of("...", "!"))


def test_equal_scores_are_ordered_by_row_and_cut_there() -> None:
    texts = ["same words"] * 50 + ["same words better"] + ["same words"] * 50
    for retriever in (
        Retriever.build(corpus_of(*texts), TableEncoder({"same words": [0.3, 0.4], "same words better": [0.6, 0.8]})),
        build_retriever(corpus_of(*texts)),
    ):
        query = "same words better"
        assert ids(retriever.search([query], 4)) == [[50, 0, 1, 2]]
        assert ids(retriever.search([query], 70)) == [[50, *range(50), *range(51, 70)]]


numbers = st.integers(-2, 2)


@settings(deadline=None)
@given(
    st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=40),
    st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=30),
    st.integers(1, 12),
    st.booleans(),
)
def test_both_indexes_rank_as_plain_sorting_does(
    rows: list[list[int]], queries: list[list[int]], k: int, positive: bool
) -> None:
    vectors, asked = np.array(rows, dtype=np.float32), np.array(queries, dtype=np.float32)
    expected = []
    for scores in asked @ vectors.T:  # small whole numbers: exact
        kept = [row for row in range(len(rows)) if scores[row] > 0 or not positive]
        expected.append(sorted(kept, key=lambda row: (-scores[row], row))[:k])
    flat, sparse = FlatIndex.of([vectors[:5], vectors[5:]], 3), SparseIndex(csr_matrix(vectors))
    assert [found.tolist() for found in flat.search(asked, k, positive)] == expected
    assert [found.tolist() for found in sparse.search(asked, k, positive)] == expected


def test_dense_and_sparse_agree_on_real_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = load_questions(real_file("hotpotqa/hipporag_train100.json"))
    corpus = Corpus.from_questions(questions)
    asked = [question.question for question in questions]
    dense = build_retriever(corpus)
    monkeypatch.setattr("rllib_mhgpo.retrieval.index.DENSE_LIMIT", 0)
    sparse = build_retriever(corpus)
    assert (type(index_of(dense)), type(index_of(sparse))) == (FlatIndex, SparseIndex)
    found = dense.search(asked, 10)
    assert found == sparse.search(asked, 10)
    alone = build_retriever(corpus)
    assert [alone.search([query], 10)[0] for query in asked] == found  # whatever is asked together
    titles = [{passage.title for passage in hits} for hits in found]
    whole = [{title for title, _ in q.supporting} <= kept for q, kept in zip(questions, titles, strict=True)]
    assert np.mean(whole) >= 0.75  # what plain TF-IDF gives for these questions


def test_the_cache_answers_without_encoding() -> None:
    encoder = TableEncoder({"a": [1, 0], "b": [0.5, 0], "c": [0, 1], "x": [1, 0.1], "y": [0, 1]})
    retriever = Retriever.build(corpus_of("a", "b", "c"), encoder, cache_size=2)
    encoder.encoded.clear()
    first = retriever.search(["x", "y", "x"], 3)
    assert encoder.encoded == ["x", "y"]
    assert (retriever.counts.queries, retriever.counts.cache_hits) == (3, 1)
    assert retriever.search(["x", "y"], 3) == [first[0], first[1]]
    assert retriever.search(["x"], 1) == [first[0][:1]]  # the answer for a smaller k is a prefix
    assert encoder.encoded == ["x", "y"]
    assert (retriever.counts.queries, retriever.counts.cache_hits) == (6, 4)
    retriever.search(["a"], 1)  # y was used longest ago and goes
    retriever.search(["x"], 3)
    assert encoder.encoded == ["x", "y", "a"]
    retriever.search(["y", "a"], 3)  # gone, and known only for k = 1
    assert encoder.encoded == ["x", "y", "a", "y", "a"]


def test_without_a_cache_and_with_more_queries_than_it_holds() -> None:
    for size in (0, 1):
        retriever = build_retriever(Corpus.from_passages(PAGES), {"cache_size": size})
        queries = ["Ada Holm", "north", "band", "Ada Holm"]
        once = retriever.search(queries, 2)
        assert once[0] == once[3]
        assert retriever.search(queries, 2) == once


def test_copies_share_the_retriever() -> None:
    retriever = build_retriever(Corpus.from_passages(PAGES))
    assert copy.deepcopy({"retriever": retriever})["retriever"] is retriever


@pytest.mark.parametrize("limit", [2**20, 0])
def test_saved_and_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr("rllib_mhgpo.retrieval.index.DENSE_LIMIT", limit)
    corpus = Corpus.from_passages(PAGES)
    retriever = build_retriever(corpus)
    save_retriever(retriever, tmp_path / "index")
    names = {path.name for path in (tmp_path / "index").iterdir()}
    assert names == {"meta.json", "corpus.arrow", "encoder.json", "index.faiss" if limit else "index.npz"}
    queries = ["who wrote the film Red Sand", "town", "zebra"]
    for again in (open_retriever(tmp_path / "index"), build_retriever(corpus, str(tmp_path / "index"))):
        assert again.search(queries, 3) == retriever.search(queries, 3)
        assert type(index_of(again)) is type(index_of(retriever))
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    with pytest.raises(RetrievalError, match="exists already"):
        save_retriever(retriever, tmp_path / "index")


def test_saved_indexes_open_only_with_what_they_were_built_of(tmp_path: Path) -> None:
    corpus = Corpus.from_passages(PAGES)
    folder = tmp_path / "index"
    save_retriever(build_retriever(corpus), folder)
    with pytest.raises(RetrievalError, match=r"holds 4 vectors, the corpus .* 3 passages"):
        open_retriever(folder, Corpus.from_passages(PAGES[:3]))
    with pytest.raises(RetrievalError, match="another corpus"):
        open_retriever(folder, Corpus.from_passages(PAGES[::-1]))
    with pytest.raises(RetrievalError, match=r"'MiniLM' makes vectors of width 3, .*\(tfidf\) holds width \d+"):
        open_retriever(folder, encoder=TableEncoder({"a": [1, 2, 3]}, name="MiniLM"))
    words = TfidfEncoder.fit([f"{title}\n{text}" for title, text in PAGES]).state()
    other = TfidfEncoder(words["words"], [weight + 1 for weight in words["idf"]])
    with pytest.raises(RetrievalError, match="another encoder"):
        open_retriever(folder, encoder=other)


@pytest.mark.parametrize("name", ["index.faiss", "encoder.json", "meta.json"])
def test_damaged_index_folders(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "index"
    save_retriever(build_retriever(Corpus.from_passages(PAGES)), folder)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RetrievalError, match="Index anew"):
        open_retriever(folder)
    (folder / name).unlink()
    with pytest.raises(RetrievalError, match=r"Index anew|a folder without meta\.json"):
        open_retriever(folder)


def test_an_index_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(RetrievalError, match="cannot be written"):
        save_retriever(build_retriever(Corpus.from_passages(PAGES)), tmp_path / "file" / "index")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tfidff", r"'tfidff'.*Did you mean 'tfidf'"),
        ("/no/such/folder", "existing folder of a sentence encoder or of a saved index"),
        ({"encodr": "tfidf"}, r"unknown key 'encodr'.*Did you mean 'encoder'"),
        ({"encoder": "tfidf", "pooling": "cls"}, "expected no key but cache_size, found 'pooling'"),
        ({"cache_size": -1}, "cache_size: expected a number of queries of at least 0, found -1"),
    ],
)
def test_refused_specifications(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_retriever(Corpus.from_passages(PAGES), spec)


def test_torch_is_loaded_for_sentence_encoders_alone() -> None:
    code = (
        "import sys; from rllib_mhgpo.retrieval import build_retriever; from rllib_mhgpo.data import Corpus;"
        "build_retriever(Corpus.from_passages([('a', 'b')])).search(['a'], 1);"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
