"""Every published layout of questions and passages, plain and compressed, small and large."""

import bz2
import gzip
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rllib_mhgpo.data import Corpus, Passage, hops_found, load_corpus, load_questions, question_files, streams
from rllib_mhgpo.data.passages import split_contents
from rllib_mhgpo.data.records import iterate_records
from rllib_mhgpo.errors import DataError
from tests.real_data import real_file

MUSIQUE: dict[str, Any] = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Canon law", "paragraph_text": "Of one church.", "is_supporting": True},
        {"idx": 1, "title": "Rome", "paragraph_text": "A city.", "is_supporting": True},
        {"idx": 2, "title": "Canon law", "paragraph_text": "Of another.", "is_supporting": False},
    ],
    "question": "Where?",
    "question_decomposition": [{"paragraph_support_idx": 1}, {"paragraph_support_idx": 0}],
    "answer": "Rome",
    "answer_aliases": ["Roma", "Rome"],
    "answerable": True,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLLIB_MHGPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# --- questions --------------------------------------------------------------------------------------------------------


def test_musique_keeps_aliases_and_which_paragraph_supports(tmp_path: Path) -> None:
    (question,) = load_questions(write(tmp_path / "q", MUSIQUE))
    assert question.answers == ("Rome", "Roma")
    assert question.evidence == (1, 0)  # hop by hop, as the decomposition says
    assert question.supporting == (("Rome", 0), ("Canon law", 0))
    assert question.hops == (("Rome", ""), ("Canon law", "Of one church."))
    assert hops_found(question, [Passage(0, "Canon law", "Of another."), Passage(1, "Rome", "x")]) == (True, False)
    assert hops_found(question, [Passage(0, "Canon law", "Of one church.")]) == (False, True)


def test_flashrag_and_hugging_face_columns(tmp_path: Path) -> None:
    metadata = {
        "type": "bridge",
        "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 3]},
        "context": {"title": ["A", "B"], "sentences": [["a.", " b."], ["c."]]},
    }
    (question,) = load_questions(
        write(tmp_path / "q", {"id": "d_0", "question": "?", "golden_answers": ["x", "y"], "metadata": metadata})
    )
    assert (question.answers, question.kind) == (("x", "y"), "bridge")
    assert question.supporting == (("A", 0), ("B", 3))
    assert question.context == (("A", ("a.", " b.")), ("B", ("c.",)))
    assert [passage.text for passage in load_corpus(tmp_path / "q")] == ["a. b.", "c."]


def test_limit_and_shuffle_are_seeded(tmp_path: Path) -> None:
    path = write(tmp_path / "q", *({"question": f"{i}", "answer": "x"} for i in range(50)))

    def ids(**how: Any) -> list[str]:
        return [question.id for question in load_questions(path, False, **how)]

    assert ids(limit=3) == ["0", "1", "2"]
    assert ids(shuffle=1) == ids(shuffle=1) != ids(shuffle=2)
    assert sorted(ids(shuffle=1), key=int) == ids()
    assert ids(shuffle=1, limit=5) == ids(shuffle=1)[:5]
    assert ids(limit=99) == ids()
    with pytest.raises(DataError, match="limit: expected at least 1, found 0"):
        ids(limit=0)


def test_a_large_file_comes_from_the_cache_and_is_the_same(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "q", *({**MUSIQUE, "id": f"q{i}", "answer": f"a{i}\n\u2028"} for i in range(3000)))
    plain = load_questions(path)
    monkeypatch.setattr(question_files, "SMALL", 1)
    cached = load_questions(path)
    assert cached.fingerprint == plain.fingerprint
    assert list(cached) == list(plain)
    assert (len(cached), cached[-1], cached[1024]) == (3000, plain[2999], plain[1024])
    (entry,) = own_cache.iterdir()
    before = entry.stat().st_mtime_ns
    assert load_questions(path)[5] == plain[5]
    assert entry.stat().st_mtime_ns == before  # not made again
    write(path, {**MUSIQUE, "id": "other"})
    assert [question.id for question in load_questions(path)] == ["other"]  # a changed file is read again
    write(path, MUSIQUE, MUSIQUE)
    with pytest.raises(DataError, match="records 1 and 2 have the same id"):
        load_questions(path)
    assert len(list(own_cache.iterdir())) == 2  # nothing of the refused file


def test_a_hub_data_set_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match="hf:owner/name: needs the package datasets"):
        load_questions("hf:owner/name")


def test_a_hub_data_set_is_read_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Rows(list[dict[str, Any]]):
        _fingerprint = "0123"

    class Hub:
        @staticmethod
        def load_dataset(path: str, *config: str, split: str) -> Rows:
            asked.append((path, *config, split))
            return Rows([MUSIQUE])

    monkeypatch.setitem(__import__("sys").modules, "datasets", Hub)
    assert load_questions("hf:owner/name/distractor:validation")[0].id == "2hop__1_2"
    assert load_questions("hf:owner/name")[0].answers == ("Rome", "Roma")
    assert asked == [("owner/name", "distractor", "validation"), ("owner/name", "train")]


# --- passages ---------------------------------------------------------------------------------------------------------


def texts(corpus: Corpus) -> list[tuple[str, str]]:
    return [(passage.title, passage.text) for passage in corpus]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"id": 0, "contents": "\\"A B\\"\\nText\\nmore"}', [("0", "A B", "Text\nmore")]),
        ('{"id": "x", "contents": "A\\tText"}', [("x", "A", "Text")]),
        ('{"id": "x", "contents": "\\"Heroes\\" (album)\\nText"}', [("x", '"Heroes" (album)', "Text")]),
        ('[{"title": "A", "text": "a"}, {"title": "A", "text": "b"}]', [("0", "A", "a"), ("1", "A", "b")]),
        ('{"_id": "7", "title": "A", "text": ["One.", " Two.", "Three."]}', [("7", "A", "One. Two. Three.")]),
        ('{"A": ["One.", " Two."], "B": "Three."}', [("0", "A", "One. Two."), ("1", "B", "Three.")]),
        (
            '{"wikipedia_id": "9", "wikipedia_title": "A", "text": ["A\\n", "Section::::S.\\n", "One.\\n", '
            '"BULLET::::- Two\\n"]}',
            [("9:2", "A", "One."), ("9:3", "A", "- Two")],
        ),
        (
            'id\ttext\ttitle\n1\tText, "so"\tA\n2\t"Text ""two"""\tB',
            [("1", "A", 'Text, "so"'), ("2", "B", 'Text "two"')],
        ),
        ('title\ttext\nA\t"unbalanced\nB\tb"', [("0", "A", '"unbalanced'), ("1", "B", 'b"')]),
        ('id\ttext\ttitle\n1\t"a\tb"\tA\r\n\n', [("1", "A", "a\tb")]),
        (
            '\ufeff0\t"Title: A Text:  One ""two""."\n1\tTitle: B Text: Three',
            [("0", "A", 'One "two".'), ("1", "B", "Three")],
        ),
    ],
)
def test_layouts_of_passages(tmp_path: Path, content: str, expected: list[tuple[str, str, str]]) -> None:
    (tmp_path / "c.any").write_text(content, encoding="utf-8", newline="")
    corpus = load_corpus(tmp_path / "c.any")
    ids = corpus.source_ids(range(len(corpus)))
    assert [(id_, *pair) for id_, pair in zip(ids, texts(corpus), strict=True)] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "0\tAlbert Einstein was born in Ulm.\n1\tOttawa",
            "line 1: expected a header with the columns id, text, title",
        ),
        ("id\ttext\ttitle\n1\ta\tA\n2\tb", r"line 3: expected 3 columns parted by tabs, found 2"),
        ('id\ttext\ttitle\n1\t"two\nlines"\tA', r"line 2: expected 3 columns .*must stand on one line"),
        ("0\tTitle: A Text: a\n1\tb", "line 2: expected 'ID<tab>Title: … Text: …'"),
        ('{"id": 1.5, "title": "A", "text": "a"}', "record 1 .*Numbers with a point lose digits"),
        ('{"title": "A", "text": "a"}\n{"title": "A"}', "record 2 .*found keys 'title'"),
        ('{"title": "A", "text": "a"}\n[1]', r"record 2 .*expected a passage \(a JSON object\), found list"),
        ('{"title": "A", "text": 3}', "record 1 .*found keys 'title', 'text'"),
        ('{"question": "?", "answer": "x"}', "found a question without any"),
        ("[1]", "expected a passage .*found int 1"),
        ("[]", "holds no passages"),
        ("id\ttext\ttitle\n", "holds no passages"),
        ("id\ttext\ttitle\ttext\n1\ta\tA\tb", "expected each column once, found 'text' twice"),
        ('{"A": ["a"], "A": ["b"]}', "the key 'A' twice in one object"),
        ("", "the file is empty"),
        ('{"title": "A", "text": "half \\ud83d"}', "passage 1 holds half a character"),
        ('{"wikipedia_title": "A", "text": "a"}', "expected a page of KILT"),
    ],
)
def test_refused_corpora(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_corpus(tmp_path / "c")


@pytest.mark.parametrize("small", [1 << 30, 1])
def test_repeats_are_left_out_once_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr("rllib_mhgpo.data.corpus_files.SMALL", small)
    monkeypatch.setattr("rllib_mhgpo.data.corpus._ROWS_PER_BATCH", 2)
    rows = [("A", "a"), ("B", "a"), ("A", "a"), ("A", "b"), ("A", "a"), ("C", "c"), ("C", "c")]
    path = write(tmp_path / "c", *({"id": str(i), "title": t, "text": x} for i, (t, x) in enumerate(rows)))
    corpus = load_corpus(path)
    assert texts(corpus) == [("A", "a"), ("B", "a"), ("A", "b"), ("C", "c")]
    assert corpus.source_ids([0, 3, 2]) == ["0", "5", "3"]
    assert corpus.repeats == 3
    corpus.save(tmp_path / "c.arrow")
    again = load_corpus(tmp_path / "c.arrow")
    assert (again.repeats, again.source_ids([3]), texts(again)) == (3, ["5"], texts(corpus))
    assert again.fingerprint == Corpus.from_passages(texts(corpus)).fingerprint == corpus.fingerprint


def test_rows_of_equal_hash_are_compared_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rllib_mhgpo.data import corpus

    monkeypatch.setattr(corpus, "hash", lambda _: 7, raising=False)
    triples = [("", "A", "a"), ("", "B", "b"), ("", "A", "a"), ("", "B", "b"), ("", "C", "c")]
    corpus.write_corpus(iter(triples), tmp_path / "c", "made")
    assert texts(load_corpus(tmp_path / "c")) == [("A", "a"), ("B", "b"), ("C", "c")]


def test_rows_are_read_from_many_batches() -> None:
    batches = [pa.record_batch({"title": [f"t{i}"] * i, "text": [f"{i}.{j}" for j in range(i)]}) for i in range(1, 5)]
    corpus = Corpus(pa.Table.from_batches(batches), "made")
    assert [corpus[row].text for row in range(10)] == [f"{i}.{j}" for i in range(1, 5) for j in range(i)]


def test_contents_are_split_where_title_and_text_part() -> None:
    assert split_contents('"') == ("", '"')
    assert split_contents('""\nx') == ("", "x")
    assert split_contents("A\tb\nc") == ("A", "b\nc")


# --- files ------------------------------------------------------------------------------------------------------------


def zstandard(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


PACKERS: list[Callable[[bytes], bytes]] = [gzip.compress, bz2.compress, zstandard]


@pytest.mark.parametrize("pack", PACKERS)
def test_compressed_files_are_told_by_their_content(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    plain = json.dumps([MUSIQUE]).encode()
    (tmp_path / "q.json").write_bytes(pack(plain))
    assert load_questions(tmp_path / "q.json")[0].id == "2hop__1_2"
    packed = pack(b"[" + b", ".join([plain[1:-1]] * 50) + b"]")
    (tmp_path / "cut.json").write_bytes(packed[: len(packed) * 2 // 3])
    with pytest.raises(DataError, match=r"compressed data end too early|ends in the middle|damaged"):
        load_questions(tmp_path / "cut.json")


@pytest.mark.parametrize("pack", PACKERS)
def test_what_expands_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(streams, "_FREE", 1 << 20)
    (tmp_path / "bomb").write_bytes(pack(b" " * (1 << 25)))
    for load in (load_questions, load_corpus):
        with pytest.raises(DataError, match="compressed bytes expand to more than"):
            load(tmp_path / "bomb")


def test_an_archive_in_a_compressed_file_is_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "q.tar.gz", "w:gz") as archive:
        archive.add(write(tmp_path / "q", MUSIQUE))
    for load in (load_questions, load_corpus):
        with pytest.raises(DataError, match=r"expected text, found a tar archive\. Unpack it"):
            load(tmp_path / "q.tar.gz")


def test_long_lines_are_read_and_longer_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "c", {"title": "A", "text": "word " * 400_000})
    assert len(load_corpus(path)[0].text) == 2_000_000
    monkeypatch.setattr(streams, "MAX_RECORD", 1_000_000)
    with pytest.raises(DataError, match="line 1 has more than 1,000,000 characters"):
        load_corpus(path)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_records_do_not_depend_on_where_the_file_is_cut_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    for module in ("streams", "records"):
        monkeypatch.setattr(f"rllib_mhgpo.data.{module}.CHUNK", chunk)
    values = [12345, 678, {"é\u2028": 'ü\n\\"'}, [], "x", -1.5e-7]
    spaced = "\ufeff [ " + " ,\n ".join(json.dumps(value, ensure_ascii=False) for value in values) + "\r\n]\n "
    (tmp_path / "a").write_text(spaced, encoding="utf-8", newline="")
    found = list(iterate_records(tmp_path / "a"))
    assert [value for _, value in found] == values
    assert [place.rpartition("line ")[2] for place, _ in found] == ["1)", "2)", "3)", "4)", "5)", "6)"]
    (tmp_path / "a").write_text(spaced[:-6], encoding="utf-8", newline="")
    with pytest.raises(DataError, match=r"record 6|after record 6.*line 6.*The file ends in the middle"):
        list(iterate_records(tmp_path / "a"))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "[" + "1" * 5000 + "]", "1" * 5000])
def test_values_that_json_alone_would_choke_on_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "q").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="expected a JSON array of records"):
        load_questions(tmp_path / "q")


# --- the published files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("hotpotqa/hipporag_train100.json", 100),
        ("hotpotqa/benchfortir_dev500.jsonl", 500),
        ("2wiki/migres_train500.json", 500),
        ("musique/hipporag_train100.json", 100),
    ],
)
def test_real_question_files(name: str, count: int) -> None:
    assert len(load_questions(real_file(name))) == count


@pytest.mark.parametrize(
    ("name", "count", "first", "titles"),
    [
        ("hotpotqa/hipporag_train100_corpus.json", 994, "Demon Dice", 994),
        ("2wiki/hipporag_corpus6119.json", 6119, "Teutberga", 6119),
        ("musique/hipporag_train100_corpus.json", 1890, "Journal of Mathematical Physics", 1764),
        ("corpus/flashrag_wiki18_sample1000.jsonl", 1000, "Evan Morris", None),
        ("corpus/psgs_w100_layout_from_flashrag_1000.tsv", 1000, "Evan Morris", None),
        ("corpus/search_r1_example_corpus.jsonl", 10, "Evan Morris", None),
        ("corpus/dpr_layout_primeqa_xorqa_collection.tsv", 6, "Kangxi Emperor", None),
        ("corpus/psgs_w100_pyserini_layout_100.jsonl", 100, "John Sawbridge", None),
        ("corpus/r1searcher_title_abs_BOM_two_column.tsv", 100, "Professional Football League of Ukraine", None),
    ],
)
def test_real_corpora(name: str, count: int, first: str, titles: int | None) -> None:
    corpus = load_corpus(real_file(name))
    assert (len(corpus), corpus.repeats, corpus[0].title) == (count, 0, first)
    if titles is not None:
        assert len({passage.title for passage in corpus}) == titles


def test_the_same_passages_in_two_layouts() -> None:
    lines = load_corpus(real_file("corpus/flashrag_wiki18_sample1000.jsonl"))
    table = load_corpus(real_file("corpus/psgs_w100_layout_from_flashrag_1000.tsv"))
    assert texts(lines) == texts(table)
    assert (lines.source_ids([0, 999]), table.source_ids([0, 999])) == (["0", "999"], ["1", "1000"])
    assert load_corpus(real_file("corpus/r1searcher_title_abs_BOM_two_column.tsv")).source_ids([0]) == ["0"]


def test_a_mislabelled_table_is_refused() -> None:
    with pytest.raises(DataError, match=r"line 1: expected a header .*found 2 columns"):
        load_corpus(real_file("corpus/MISLABELLED_psgs_w100_toy_no_header.tsv"))


def test_real_passages_of_questions() -> None:
    wiki = load_corpus(real_file("2wiki/migres_train500.json"))
    assert len(wiki) + wiki.repeats == 5000
    questions = load_questions(real_file("2wiki/migres_train500.json"))
    beyond = [
        (title, sentence)
        for question in questions
        for title, sentence in question.supporting
        if sentence >= len(dict(question.context).get(title, ()))
    ]
    assert len(beyond) == 6
    assert texts(wiki) == texts(Corpus.from_questions(questions))
    musique = load_questions(real_file("musique/hipporag_train100.json"))
    published = load_corpus(real_file("musique/hipporag_train100_corpus.json"))
    assert texts(Corpus.from_questions(musique)) == texts(published)
    assert sum(len(question.answers) > 1 for question in musique) == 28
    several = [question for question in musique if any(text for _, text in question.hops)]
    assert len(several) > 0
    for question in several:
        shown = [p for p in published if (p.title, p.text) in question.hops]
        assert len(shown) == sum(bool(text) for _, text in question.hops)  # the very passages, not their namesakes
