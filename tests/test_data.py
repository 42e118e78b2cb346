"""Question files and corpora: what is read, what is refused and how the refusal reads."""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_mhgpo.data import Corpus, Passage, Question, Questions, load_corpus, load_questions
from rllib_mhgpo.errors import DataError
from tests.real_data import real_file

RECORD: dict[str, Any] = {
    "_id": "5a8b",
    "question": "Where was the author of Red Sand born?",
    "answer": "Ostby",
    "supporting_facts": [["Red Sand", 0], ["Ada Holm", 7]],
    "context": [["Red Sand", ["Red Sand is a film.", " Ada Holm wrote it."]], ["Ada Holm", ["She was born in Ostby."]]],
    "type": "bridge",
    "level": "hard",
}
QUESTION = Question(
    id="5a8b",
    question="Where was the author of Red Sand born?",
    answers=("Ostby",),
    supporting=(("Red Sand", 0), ("Ada Holm", 7)),
    context=(
        ("Red Sand", ("Red Sand is a film.", " Ada Holm wrote it.")),
        ("Ada Holm", ("She was born in Ostby.",)),
    ),
    kind="bridge",
    level="hard",
)
PARAGRAPH = {"idx": 0, "title": "A", "paragraph_text": "a"}


def record(**changes: Any) -> dict[str, Any]:
    """The record with some keys changed; None removes a key."""
    return {key: value for key, value in {**RECORD, **changes}.items() if value is not None}


def write(path: Path, *records: Any, lines: bool = False) -> Path:
    text = "\n".join(map(json.dumps, records)) if lines else json.dumps(list(records), indent=1)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("name", ["q.json", "q.jsonl", "q.data"])
def test_array_and_lines_are_told_by_content(tmp_path: Path, lines: bool, name: str) -> None:
    questions = load_questions(write(tmp_path / name, RECORD, record(_id="second"), lines=lines))
    assert questions[0] == QUESTION
    assert [question.id for question in questions] == ["5a8b", "second"]
    assert questions.source == str(tmp_path / name)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    array = load_questions(write(tmp_path / "a", RECORD, record(_id="second")))
    lines = load_questions(write(tmp_path / "b", RECORD, record(_id="second"), lines=True))
    other = load_questions(write(tmp_path / "c", RECORD, record(_id="second", answer="Ostbo")))
    assert array.fingerprint == lines.fingerprint != other.fingerprint
    assert array[:1].fingerprint != array.fingerprint
    assert copy.deepcopy(array) is array


@pytest.mark.parametrize("lines", [False, True])
def test_byte_order_mark_and_missing_last_newline(tmp_path: Path, lines: bool) -> None:
    path = write(tmp_path / "q", RECORD, lines=lines)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [question.id for question in load_questions(path)] == ["5a8b"]


def test_line_separators_inside_strings_and_blank_lines(tmp_path: Path) -> None:
    odd = json.dumps(record(answer="a\u2028b\u0085c"), ensure_ascii=False)
    (tmp_path / "q").write_text(f"\n{odd}\r\n\n{json.dumps(record(_id='2'))}\n", encoding="utf-8", newline="")
    assert [question.answers for question in load_questions(tmp_path / "q")] == [("a\u2028b\u0085c",), ("Ostby",)]


def test_ids_are_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "q", record(_id=9223372036854775808), record(_id="007"), record(_id=0), record(_id=-1))
    assert [question.id for question in load_questions(path)] == ["9223372036854775808", "007", "0", "-1"]


def test_several_golds_and_other_optional_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path / "q",
        record(answer=["Pirates", "Pittsburgh Pirates"], type=None, level=None, supporting_facts=None, extra={"x": 1}),
        record(_id=None, id="b"),
    )
    first, second = load_questions(path)
    assert first.answers == ("Pirates", "Pittsburgh Pirates")
    assert (first.kind, first.level, first.supporting) == ("", "", ())
    assert second.id == "b"


def test_without_passages_only_where_none_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "q", {"question": "Q?", "answer": "A"}, {"question": "R?", "answer": "B"})
    with pytest.raises(DataError, match=r"record 1 \(line 2\): expected key 'context', found 'question', 'answer'"):
        load_questions(path)
    questions = load_questions(path, require_context=False)
    assert [question.id for question in questions] == ["0", "1"]
    with pytest.raises(DataError, match="no passages"):
        Corpus.from_questions(questions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": None, "Question": "Q?"}, r"expected key 'question', found 'Question' \(keys found: '_id'"),
        ({"question": None, "questoin": "Q?"}, r"expected key 'question', found .*Did you mean 'questoin'"),
        ({"answer": None}, r"expected key 'answer', found '_id', 'question'.*with answers"),
        ({"context": None}, r"expected key 'context'.*with passages"),
        ({"context": None, "paragraphs": [{"title": "A"}]}, r"'paragraphs': expected objects with texts 'title' and"),
        (
            {"context": None, "paragraphs": [{**PARAGRAPH, "idx": [1]}]},
            r"a whole number under 'idx', each once, found list",
        ),
        (
            {"context": None, "paragraphs": [PARAGRAPH, PARAGRAPH]},
            r"a whole number under 'idx', each once, found int 0",
        ),
        ({"answerable": False}, "answerable: false"),
        ({"answer_aliases": "x"}, "'answer_aliases': expected a list"),
        ({"_id": 1.0}, r"whole number, found float 1\.0"),
        ({"_id": 1e19}, "whole number, found float"),
        ({"_id": True}, "whole number, found bool"),
        ({"_id": " "}, "the id as a string"),
        ({"_id": ["a"]}, "found list"),
        ({"_id": "5a8b"}, "records 1 and 2 have the same id '5a8b'"),
        ({"answer": ""}, r"'answer': expected a text that is not blank, found str ''"),
        ({"answer": []}, "'answer'.*found list"),
        ({"answer": ["x", 3]}, "'answer'.*found int 3"),
        ({"answer": 1914}, "'answer'.*found int 1914"),
        ({"question": "  "}, "'question'.*not blank"),
        ({"supporting_facts": [["Red Sand"]]}, "'supporting_facts': expected"),
        ({"supporting_facts": [["Red Sand", True]]}, "'supporting_facts': expected"),
        (
            {"supporting_facts": {"title": ["Red Sand"], "sent_id": [0, 1]}},
            "'supporting_facts': expected pairs, or lists of equal length under 'title', 'sent_id'",
        ),
        ({"context": {"title": ["A"], "text": [["a"]]}}, "'context': expected pairs, or lists of equal length"),
        ({"context": [["A", "text"]]}, r"'context': expected \[title, \[sentences\]\]"),
        ({"context": [["A", ["x", None]]]}, r"'context': expected \[title, \[sentences\]\]"),
        ({"answer": "half \ud83d"}, "half a character"),
    ],
)
@pytest.mark.parametrize("lines", [False, True])
def test_refused_records_are_named(tmp_path: Path, changes: dict[str, Any], message: str, lines: bool) -> None:
    path = write(tmp_path / "q", RECORD, record(**{"_id": "second", **changes}), lines=lines)
    with pytest.raises(DataError, match=message) as caught:
        load_questions(path)
    assert str(path) in str(caught.value)
    assert "record 2" in str(caught.value) or "records 1 and 2" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"[]", "holds no questions"),
        (b"id\ttext\ttitle\n1\tx\ty\n", "expected a JSON array of records or one JSON record a line"),
        (b"\xff\xfe[\x00", "expected UTF-8 text, found byte 0xff at offset 0"),
        (b"[1, 2]", r"record 1 \(line 1\): expected a question record .* found int 1"),
        (b'"text"', "found str 'text'"),
        (b'{"Red Sand": ["Red Sand is a film."], "Ada": ["She."]}', "corpus"),
        (b'{\n "Red Sand": ["Red Sand is a film."]\n}', "corpus"),
        (b'[{"title": "Red Sand", "text": "x"}]', "corpus"),
        (b'{"id": "0", "contents": "x"}\n{"id": "1", "contents": "y"}', "corpus"),
        (b'{"data": []}', "corpus|wrapped"),
        (b'{"version": 1, "data": [1]}', "wrapped"),
        (b'[{"question": "q", "answer": "a", "answer": "b"}]', "record 1 .*the key 'answer' twice in one object"),
        (b'{"question": "q", "answer": "a", "metadata": {"x": 1, "x": 2}}', "the key 'x' twice in one object"),
        (b"PK\x03\x04\x14\x00", "expected text, found a ZIP archive. Unpack it"),
        (b"\xfd7zXZ\x00\x00", "found an xz file"),
        (b"PAR1\x15\x04", r"found a Parquet file\. Give its folder to the package datasets"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"found the address .*git lfs pull"),
    ],
)
def test_files_that_are_not_question_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "q.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_questions(tmp_path / "q.json")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: cannot be read: No such file"):
        load_questions(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("lines", [False, True])
def test_no_cut_is_taken_for_a_shorter_file(tmp_path: Path, lines: bool) -> None:
    whole = write(tmp_path / "whole", RECORD, record(_id="second"), lines=lines).read_bytes().rstrip()
    cut_line = whole.index(b"\n") if lines else -1  # JSONL cut exactly after a record is a whole file
    for length in range(1, len(whole)):
        if length in (cut_line, cut_line + 1):
            continue
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"line \d+, character \d+|holds no questions|expected"):
            load_questions(tmp_path / "cut")


def test_where_a_cut_file_ends(tmp_path: Path) -> None:
    (tmp_path / "cut").write_text('[{"a": 1},\n {"b": 2},\n {"c', encoding="utf-8")
    with pytest.raises(DataError, match=r"expected key"):  # the first record is wrong already
        load_questions(tmp_path / "cut")
    good = json.dumps(RECORD)
    (tmp_path / "cut").write_text(f'[{good},\n {json.dumps(record(_id="2"))},\n {{"c', encoding="utf-8")
    with pytest.raises(DataError, match=r"record 3 \(line 3\).*at line 3, character 3\. The file ends in the middle"):
        load_questions(tmp_path / "cut")
    (tmp_path / "cut").write_text(f"[{good}", encoding="utf-8")
    with pytest.raises(DataError, match=r"after record 1.*The file ends in the middle"):
        load_questions(tmp_path / "cut")
    (tmp_path / "cut").write_text(f"[{good} {good}]", encoding="utf-8")
    with pytest.raises(DataError, match=r"after record 1.*neither ',' nor '\]'.*Mend"):
        load_questions(tmp_path / "cut")
    (tmp_path / "cut").write_text(f"[{good}]\n{good}", encoding="utf-8")
    with pytest.raises(DataError, match=r"text after the closing"):
        load_questions(tmp_path / "cut")
    (tmp_path / "cut").write_text(f"[{good},]", encoding="utf-8")
    with pytest.raises(DataError, match=r"record 2.*Mend"):
        load_questions(tmp_path / "cut")


@settings(deadline=None)  # no timing in tests
@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=8))
def test_a_corpus_gives_back_what_it_was_made_of(pairs: list[tuple[str, str]]) -> None:
    corpus = Corpus.from_passages(pairs)
    assert [(passage.title, passage.text) for passage in corpus] == pairs
    assert [passage.id for passage in corpus] == list(range(len(pairs)))


def test_rows_are_identities() -> None:
    corpus = Corpus.from_passages([("A", "a"), ("B", "b"), ("A", "a")])
    assert corpus[1] == corpus[-2] == Passage(1, "B", "b")
    assert corpus[1:] == [Passage(1, "B", "b"), Passage(2, "A", "a")]
    assert corpus.take([2, 0, 2]) == [Passage(2, "A", "a"), Passage(0, "A", "a"), Passage(2, "A", "a")]
    assert corpus.take([]) == []
    for rows in ([3], [-1]):  # what FAISS pads with must never be a passage
        with pytest.raises(IndexError, match=r"expected a row in 0\.\.2"):
            corpus.take(rows)
    assert copy.deepcopy(corpus) is corpus


def test_the_questions_own_passages_once_each(tmp_path: Path) -> None:
    second = record(_id="2", context=[["Red Sand", ["Another page."]], *RECORD["context"]])
    corpus = load_corpus(write(tmp_path / "q", RECORD, second))
    assert list(corpus) == [
        Passage(0, "Red Sand", "Red Sand is a film. Ada Holm wrote it."),
        Passage(1, "Ada Holm", "She was born in Ostby."),
        Passage(2, "Red Sand", "Another page."),
    ]


def test_saved_and_opened_again(tmp_path: Path) -> None:
    corpus = Corpus.from_passages([("A", "a"), ("", "ü\n"), ("9223372036854775808", "2020-01-01")])
    corpus.save(tmp_path / "deep" / "c.arrow")
    again = load_corpus(tmp_path / "deep" / "c.arrow")
    assert list(again) == list(corpus)
    assert again.fingerprint == corpus.fingerprint == Corpus(again.table.replace_schema_metadata(), "x").fingerprint
    assert Corpus.from_passages([("A", "a"), ("", "ü\n2020-01-01")]).fingerprint != corpus.fingerprint
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c.arrow"]


def test_damaged_and_foreign_corpora(tmp_path: Path) -> None:
    Corpus.from_passages([("A", "a" * 1000)]).save(tmp_path / "c.arrow")
    whole = (tmp_path / "c.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(whole[:-200])
    with pytest.raises(DataError, match="expected a whole Arrow file"):
        load_corpus(tmp_path / "cut.arrow")
    with pytest.raises(DataError, match="expected text columns title, text"):
        Corpus(pa.table({"title": ["a"], "contents": ["b"]}), "x")
    with pytest.raises(DataError, match="holds no passages"):
        Corpus.from_passages([])
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be written"):
        Corpus.from_passages([("A", "a")]).save(tmp_path / "file" / "c.arrow")


def test_real_questions() -> None:
    train = load_questions(real_file("hotpotqa/hipporag_train100.json"))
    assert len(train) == 100
    assert train[0].supporting == (("Alû", 3), ("Lilu (mythology)", 0))
    assert len(Corpus.from_questions(train)) == 994
    dev = load_questions(real_file("hotpotqa/benchfortir_dev500.jsonl"))
    assert len(dev) == 500
    assert sorted(len(question.context) for question in dev)[:4] == [2, 2, 4, 10]
    assert len(load_questions(real_file("hotpotqa/react_dev7405_simplified_no_passages.json"), False)) == 7405
    golds = load_questions(real_file("2wiki/trustmargin_dev1000_multi_gold_no_passages.json"), False)
    assert (len(golds), sum(len(question.answers) > 1 for question in golds)) == (
        1000,
        492,
    )  # of 876 lists, the others repeat one gold
    assert golds[1].answers == ("Mask of Fu Manchu", "The Mask of Fu Manchu")
    assert golds[2].answers == ("12 June 1516",)


def test_a_corpus_is_the_published_one() -> None:
    corpus = Corpus.from_questions(load_questions(real_file("hotpotqa/hipporag_train100.json")))
    published = json.loads(real_file("hotpotqa/hipporag_train100_corpus.json").read_text(encoding="utf-8"))
    assert {passage.title for passage in corpus} == published.keys()
    glued = [passage for passage in corpus if passage.text != "".join(published[passage.title])]
    assert len(glued) == 19  # those with sentences that do not bring their own space
    assert all(passage.text.replace(" ", "") == "".join(published[passage.title]).replace(" ", "") for passage in glued)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hotpotqa/TRUNCATED_hotpot_dev_fullwiki_v1_200kB.json", r"record 30 \(line 1\).*The file ends in the middle"),
        ("hotpotqa/hipporag_train100_corpus.json", "looks like a corpus"),
        ("2wiki/hipporag_corpus6119.json", "looks like a corpus"),
        ("corpus/search_r1_example_corpus.jsonl", "looks like a corpus"),
        ("corpus/MISLABELLED_psgs_w100_toy_no_header.tsv", "expected a JSON array"),
    ],
)
def test_real_files_of_other_kinds_are_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_questions(real_file(name))


def test_one_passage_with_many_keys_is_a_passage(tmp_path: Path) -> None:
    """An object of titles and sentences has as many texts."""
    record = {"id": "1", "title": "T", "text": "X about boats", **dict.fromkeys("abcdefgh", "more")}
    (tmp_path / "one.jsonl").write_text(json.dumps(record))
    (passage,) = load_corpus(tmp_path / "one.jsonl")
    assert (passage.title, passage.text) == ("T", "X about boats")


def test_questions_are_a_sequence() -> None:
    questions = Questions([Question(str(i), "q", ("a",)) for i in range(3)], "made")
    assert [question.id for question in questions[1:]] == ["1", "2"]
    assert questions[-1] in questions
    assert "3 from made" in repr(questions)
