"""Indexes on disk: built in one go or in pieces, described, checked, searched, measured; BM25 and fusion."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.data import Corpus, Passage, Question, load_corpus, load_questions
from rllib_mhgpo.errors import ConfigError, MHGPOError, RetrievalError
from rllib_mhgpo.retrieval import Retriever, build_retriever, open_retriever, save_retriever
from rllib_mhgpo.retrieval import approximate as ann
from rllib_mhgpo.retrieval.bm25 import BM25Retriever
from rllib_mhgpo.retrieval.build import brings_passages
from rllib_mhgpo.retrieval.building import PLACE, build_index, encode_here
from rllib_mhgpo.retrieval.hybrid import HybridRetriever
from rllib_mhgpo.retrieval.measure import hop_recall
from rllib_mhgpo.retrieval.plan import estimate
from rllib_mhgpo.retrieval.retriever import CorpusRetriever
from rllib_mhgpo.retrieval.store import check_files, read_meta
from tests.real_data import real_file

WIDTH = 8


class HashEncoder:
    """Vectors drawn from the words of a text: each word a fixed direction."""

    name, lexical, cosine, width, fingerprint = "hash", False, True, WIDTH, "hash encoder 1"

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.array([self._vector(text) for text in texts], dtype=np.float32)

    encode_queries = encode_passages

    def _vector(self, text: str) -> NDArray[np.float64]:
        seeds = [int.from_bytes(word.encode()[:6].ljust(6), "little") for word in re.findall(r"\w+", text)] or [0]
        return np.asarray(sum(np.random.default_rng(seed).standard_normal(WIDTH) for seed in seeds))

    def state(self) -> dict[str, Any]:
        return {"kind": "hash"}


def write_corpus(path: Path, count: int) -> Path:
    words = ["red", "blue", "town", "north", "film", "band", "river", "king"]
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            text = " ".join([f"w{i}", *rng.choice(words, 4)])
            file.write(json.dumps({"id": str(i), "title": f"T{i}", "text": text}) + "\n")
    return path


def whole(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def opened(folder: Path) -> CorpusRetriever:
    return open_retriever(folder, encoder=HashEncoder())


# --- builds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "HNSW8"])
def test_a_build_that_was_interrupted_equals_one_in_one_go(tmp_path: Path, factory: str) -> None:
    source = write_corpus(tmp_path / "c.jsonl", 3 * PLACE + 17)
    build_index(source, tmp_path / "once", HashEncoder(), factory)
    encoded: list[int] = []

    def stops(folder: Path, encoder: Any, places: Sequence[int]) -> Iterator[Any]:
        for place, block in encode_here(folder, encoder, list(reversed(places))):
            encoded.append(place)
            yield place, block
            if len(encoded) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(source, tmp_path / "twice", HashEncoder(), factory, encode=stops)
    with pytest.raises(RetrievalError, match=r"not complete\. Give the command that builds it once more"):
        opened(tmp_path / "twice")
    build_index(source, tmp_path / "twice", HashEncoder(), factory, encode=stops)
    assert sorted(encoded) == [0, 1, 2, 3]  # nothing was encoded a second time
    assert whole(tmp_path / "once") == whole(tmp_path / "twice")
    assert set(whole(tmp_path / "once")) == {"meta.json", "corpus.arrow", "encoder.json", "index.faiss"}


def test_a_flat_index_finds_what_the_retriever_in_memory_finds(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "c.jsonl", 700)
    meta = build_index(source, tmp_path / "ix", HashEncoder())
    assert (meta["passages"], meta["factory"], meta["recall_at_10"], meta["metric"]) == (700, "Flat", 1.0, "cosine")
    queries = ["red town", "king of the north", "w5"]
    in_memory = Retriever.build(load_corpus(source), HashEncoder())
    assert opened(tmp_path / "ix").search(queries, 20) == in_memory.search(queries, 20)


@pytest.mark.parametrize("factory", ["IVF16,Flat", "HNSW16"])
def test_default_effort_finds_95_percent_of_the_exact_neighbours(tmp_path: Path, factory: str) -> None:
    source = write_corpus(tmp_path / "c.jsonl", 3000)
    meta = build_index(source, tmp_path / "ix", HashEncoder(), factory)
    assert meta["recall_at_10"] >= 0.95
    exact, found = Retriever.build(load_corpus(source), HashEncoder()), opened(tmp_path / "ix")
    queries = [f"w{i} {word} king" for i, word in enumerate(["red", "blue", "town", "river", "film"] * 8)]
    shares = []
    for one, other in zip(exact.search(queries, 10), found.search(queries, 10), strict=True):
        shares.append(len({p.id for p in one} & {p.id for p in other}) / 10)
        assert len({p.id for p in other}) == len(other) <= 10
    assert np.mean(shares) >= 0.9


def test_compressed_vectors_say_what_they_lose(tmp_path: Path) -> None:
    meta = build_index(write_corpus(tmp_path / "c.jsonl", 2000), tmp_path / "ix", HashEncoder(), "IVF8,PQ4x4")
    assert 0.1 < meta["recall_at_10"] < 0.999
    assert meta["search"].startswith("nprobe=")
    assert len(opened(tmp_path / "ix").search(["red king"], 5)[0]) == 5


def test_a_folder_is_not_built_upon_by_another_build(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "c.jsonl", 20)

    def stops(folder: Path, encoder: Any, places: Sequence[int]) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        build_index(source, tmp_path / "ix", HashEncoder(), encode=stops)
    with pytest.raises(RetrievalError, match="another build was begun here: factory 'Flat', now 'HNSW8'"):
        build_index(source, tmp_path / "ix", HashEncoder(), "HNSW8")
    write_corpus(tmp_path / "c.jsonl", 21)
    with pytest.raises(RetrievalError, match="another build was begun here: source_bytes"):
        build_index(source, tmp_path / "ix", HashEncoder())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(RetrievalError, match="expected a new or empty folder"):
        build_index(source, tmp_path / "full", HashEncoder())
    build_index(source, tmp_path / "done", HashEncoder())
    with pytest.raises(RetrievalError, match="holds a whole index already"):
        build_index(source, tmp_path / "done", HashEncoder())


def test_refused_factories(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "c.jsonl", 20)
    for factory in ("IVF", "Flatt", "PQ3"):
        with pytest.raises(ConfigError, match=f"index '{factory}': FAISS's factory refuses it"):
            build_index(source, tmp_path / factory, HashEncoder(), factory)
    with pytest.raises(RetrievalError, match="needs at least 64 passages to be trained, found 20"):
        build_index(source, tmp_path / "small", HashEncoder(), "IVF64,Flat")


# --- folders ----------------------------------------------------------------------------------------------------------


def test_any_changed_file_is_refused(tmp_path: Path) -> None:
    build_index(write_corpus(tmp_path / "c.jsonl", 50), tmp_path / "ix", HashEncoder())
    for name in ("corpus.arrow", "index.faiss", "encoder.json"):
        path = tmp_path / "ix" / name
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(RetrievalError, match=rf"{name}: has changed since it was written"):
            opened(tmp_path / "ix")
        path.write_bytes(before[:-10])
        with pytest.raises(RetrievalError, match=rf"{name}: expected [\d,]+ bytes, found"):
            opened(tmp_path / "ix")
        path.write_bytes(before)
    assert opened(tmp_path / "ix").search(["red"], 1)


def test_large_files_are_checked_in_full_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_index(write_corpus(tmp_path / "c.jsonl", 50), tmp_path / "ix", HashEncoder())
    path = tmp_path / "ix" / "index.faiss"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr("rllib_mhgpo.retrieval.store.CHECKED", 16)
    opened(tmp_path / "ix")
    with pytest.raises(RetrievalError, match="has changed"):
        check_files(tmp_path / "ix", read_meta(tmp_path / "ix"))


def test_another_encoder_is_refused(tmp_path: Path) -> None:
    build_index(write_corpus(tmp_path / "c.jsonl", 50), tmp_path / "ix", HashEncoder())
    other = HashEncoder()
    other.fingerprint = "hash encoder 2"
    with pytest.raises(RetrievalError, match="another encoder"):
        open_retriever(tmp_path / "ix", encoder=other)
    wide = HashEncoder()
    wide.width, wide.name = 768, "wide"
    with pytest.raises(RetrievalError, match=r"'wide' makes vectors of width 768, .* holds width 8"):
        open_retriever(tmp_path / "ix", encoder=wide)


def test_what_brings_its_own_passages(tmp_path: Path) -> None:
    save_retriever(build_retriever(Corpus.from_passages([("A", "a")]), "bm25"), tmp_path / "ix")
    assert brings_passages(str(tmp_path / "ix"))
    assert brings_passages({"encoder": str(tmp_path / "ix"), "cache_size": 3})
    assert brings_passages({"hybrid": [str(tmp_path / "ix"), {"encoder": str(tmp_path / "ix")}]})
    assert not brings_passages({"hybrid": [str(tmp_path / "ix"), "tfidf"]})
    assert brings_passages("http://host:8000/retrieve")
    for spec in ("tfidf", "bm25", {}, {"encoder": "tfidf"}, 3, None):
        assert not brings_passages(spec)
    assert build_retriever(None, str(tmp_path / "ix")).search(["a"], 1) == [[Passage(0, "A", "a")]]
    with pytest.raises(ConfigError, match="'bm25': needs a corpus"):
        build_retriever(None, "bm25")


# --- rankings ---------------------------------------------------------------------------------------------------------


def bm25_by_definition(texts: list[str], query: str, k: int, k1: float = 0.9, b: float = 0.4) -> list[int]:
    """Robertson's sum with Lucene's idf ln(1 + (N - df + 1/2) / (df + 1/2)), term by term."""
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    mean = sum(sum(bag.values()) for bag in bags) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            df = sum(word in other for other in bags)
            if df and bag[word]:
                idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
                norm = k1 * (1 - b + b * sum(bag.values()) / mean)
                score += idf * bag[word] / (bag[word] + norm)
        scores.append(score)
    ranked = sorted(range(len(texts)), key=lambda row: (-round(scores[row], 5), row))
    return [row for row in ranked if scores[row] > 0][:k]


def test_bm25_is_its_definition() -> None:
    texts = ["the red band", "the red red film of the king", "a king", "the the", "north", "the red band"]
    retriever = build_retriever(Corpus.from_passages([("", text) for text in texts]), "bm25")
    for query in ("red king", "red red king", "the", "north pole", "zebra", "The RED, band!"):
        found = [passage.id for passage in retriever.search([query], 5)[0]]
        assert found == bm25_by_definition(texts, query, 5), query


def test_bm25_on_real_passages() -> None:
    corpus = load_corpus(real_file("hotpotqa/hipporag_train100_corpus.json"))[:200]
    texts = [f"{p.title}\n{p.text}" for p in corpus if p.text.isascii()]
    retriever = BM25Retriever.build(Corpus.from_passages([("", text) for text in texts]))
    for question in load_questions(real_file("hotpotqa/hipporag_train100.json"), limit=10):
        if question.question.isascii():
            found = [passage.id for passage in retriever.search([question.question], 10)[0]]
            expected = bm25_by_definition(texts, question.question, 10)
            assert len(set(found) & set(expected)) >= 9  # float32 sums may turn the last places
            assert found[0] == expected[0]


def test_tfidf_finds_what_scikit_learn_finds() -> None:
    corpus = load_corpus(real_file("hotpotqa/hipporag_train100_corpus.json"))
    questions = [q.question for q in load_questions(real_file("hotpotqa/hipporag_train100.json"), limit=20)]
    vectorizer = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b", strip_accents="unicode", sublinear_tf=True)
    pages = vectorizer.fit_transform([f"{p.title}\n{p.text}" for p in corpus])
    scores = (vectorizer.transform(questions) @ pages.T).toarray()
    found = build_retriever(corpus).search(questions, 10)
    for row, passages in zip(scores, found, strict=True):
        expected = sorted(range(len(row)), key=lambda i: (-round(row[i], 9), i))[:10]
        assert [passage.id for passage in passages] == expected


def test_fusion_ranks_by_reciprocal_ranks() -> None:
    corpus = Corpus.from_passages([("", text) for text in ("red red band", "red film", "blue town", "red town king")])
    parts = [build_retriever(corpus, "bm25"), build_retriever(corpus, "tfidf")]
    found = build_retriever(corpus, {"hybrid": ["bm25", "tfidf"]}).search(["red town"], 4)[0]
    scores: Counter[int] = Counter()
    for part in parts:
        for rank, passage in enumerate(part.search(["red town"], 100)[0], start=1):
            scores[passage.id] += 1 / (60 + rank)  # type: ignore[assignment]
    assert [passage.id for passage in found] == sorted(scores, key=lambda row: (-scores[row], row))


def test_refused_fusions(tmp_path: Path) -> None:
    corpus = Corpus.from_passages([("", "red"), ("", "blue")])
    with pytest.raises(RetrievalError, match="at least two retrievers, found 1"):
        build_retriever(corpus, {"hybrid": ["bm25"]})
    save_retriever(build_retriever(Corpus.from_passages([("", "green")])), tmp_path / "ix")
    with pytest.raises(RetrievalError, match=r"holds 1 vectors, the corpus .* 2 passages"):
        build_retriever(corpus, {"hybrid": ["bm25", str(tmp_path / "ix")]})
    other = BM25Retriever.build(Corpus.from_passages([("", "red"), ("", "green")]))
    with pytest.raises(RetrievalError, match="expected retrievers of one corpus"):
        HybridRetriever([BM25Retriever.build(corpus), other])
    with pytest.raises(ConfigError, match="expected a list of retrievers"):
        build_retriever(corpus, {"hybrid": "bm25"})
    with pytest.raises(ConfigError, match="in this process"):
        build_retriever(corpus, {"hybrid": ["bm25", "http://host/retrieve"]})


@pytest.mark.parametrize("kind", ["tfidf", "bm25"])
def test_odd_queries(kind: str) -> None:
    corpus = Corpus.from_passages([("Ünïcode", "日本語 の テキスト"), ("B", "tab\tand\x00nul and \x1b[31mred")])
    retriever = build_retriever(corpus, kind)
    assert [p.id for p in retriever.search(["日本語"], 5)[0]] == [0]
    assert [p.id for p in retriever.search(["unicode"], 5)[0]] == [0]
    assert [p.id for p in retriever.search(["\x00\x1b nul"], 5)[0]] == [1]
    assert [p.id for p in retriever.search(["nul " * 2500], 10**6)[0]] == [1]  # 10,000 characters, k beyond all
    for query in ("", " \t\n"):
        with pytest.raises(RetrievalError, match="expected words"):
            retriever.search([query], 1)
    with pytest.raises(RetrievalError, match="half a character"):
        retriever.search(["a\ud83d"], 1)
    for k in (0, -1, True, 1.5):
        with pytest.raises(RetrievalError, match="at least 1"):
            retriever.search(["nul"], k)  # type: ignore[arg-type]


# --- measures ---------------------------------------------------------------------------------------------------------


def test_recall_hop_by_hop() -> None:
    questions = [
        Question("a", "?", ("x",), supporting=(("A", 0), ("B", 1))),
        Question("b", "?", ("x",), supporting=(("A", 0), ("C", 0), ("D", 0))),
    ]
    found = [[Passage(0, "B", ""), Passage(1, "A", "")], [Passage(1, "A", ""), Passage(3, "D", "")]]
    one, two = hop_recall(questions, found, 1), hop_recall(questions, found, 2)
    assert (one.all_hops, one.by_hop) == (0, (0.5, 0.5, 0))
    assert (two.all_hops, two.by_hop) == (0.5, (1, 0.5, 1))
    assert one.any_hop == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert two.any_hop == pytest.approx((1 + 2 / 3) / 2)


def test_exact_neighbours_over_blocks() -> None:
    rows = np.random.default_rng(1).standard_normal((500, 6)).astype(np.float32)
    queries = rows[:7] + 0.1
    found = ann.exact_neighbours(queries, [rows[:3], rows[3:200], rows[200:]], 10)
    assert found.tolist() == np.argsort(-(queries @ rows.T), axis=1)[:, :10].tolist()
    assert (ann.exact_neighbours(queries, [rows[:4]], 10)[:, 4:] == -1).all()


@pytest.mark.parametrize("factory", ["Flat", "IVF32,Flat", "IVF32,PQ4x4", "HNSW16", "IVF32,SQ8"])
def test_estimates_are_what_faiss_writes(factory: str) -> None:
    rows = np.random.default_rng(1).standard_normal((5_000, 16)).astype(np.float32)
    index = ann.train_and_fill(factory, 16, len(rows), lambda: iter([rows]), 0)
    size = faiss.serialize_index(index).nbytes
    assert estimate(len(rows), 600, 16, factory).index == pytest.approx(size, rel=0.1)


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("encoder", ["tfidf", "bm25"])
def test_the_command_builds_describes_searches_and_measures(tmp_path: Path, encoder: str) -> None:
    rows = [
        ("Red Sand", "Red Sand is a [bold]film[/bold] that Ada Holm wrote.\x1b[31m"),
        ("Ada Holm", "Born in Ostby."),
    ]
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("\n".join(json.dumps({"title": t, "text": x}) for t, x in [*rows, rows[0]]), encoding="utf-8")
    told = run("index", "build", corpus, "--encoder", encoder, "--out", tmp_path / "ix")
    assert f"2 passages, {encoder}" in told
    assert "1 exact repeats left out" in told
    assert "corpus.arrow" in run("index", "info", tmp_path / "ix")
    table = run("index", "search", tmp_path / "ix", "film [red]holm", "-k", 5)
    assert table.index("Red Sand") < table.index("Ada Holm")
    assert "[bold]film[/bold]" in table
    assert "\x1b" not in table
    found = run("index", "search", tmp_path / "ix", "ostby", "--json")
    assert json.loads(found) == {"id": 1, "title": "Ada Holm", "text": "Born in Ostby."}
    questions = tmp_path / "q.jsonl"
    facts = {"supporting_facts": [["Ada Holm", 0], ["Red Sand", 0]], "answer": "x"}
    questions.write_text(json.dumps({"question": "Ostby?", **facts}), encoding="utf-8")
    measured = run("index", "recall", tmp_path / "ix", "--questions", questions, "-k", 2)
    assert re.search(r"2 .* 0\.0 .* 50\.0 .* 100\.0 .* 0\.0", measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "none.jsonl", "--out", "x"), "none.jsonl: no such file"),
        (("info", "none"), "expected the folder of an index, found no such folder"),
        (("search", "none", "x"), "expected the folder of an index, found no such folder"),
        (("build", "FILE", "--out", "x", "--encoder", "tfidff"), "Did you mean 'tfidf'"),
        (("build", "FILE", "--out", "x", "--encoder", "bm25", "--index", "HNSW8"), "has no vectors to encode"),
        (("build", "FILE", "--out", "x", "--gpus", "1"), "--gpus: needs --workers"),
    ],
)
def test_refused_commands(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    file = write_corpus(tmp_path / "c.jsonl", 3)
    result = CliRunner().invoke(app, ["index", *(str(file) if a == "FILE" else a for a in arguments)])
    assert result.exit_code == 1
    assert message in result.stderr
    assert not isinstance(result.exception, MHGPOError)
