"""Files whose keys, columns or values are not those that are read: refused by name, never read as something else."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rllib_mhgpo.data import load_corpus, load_predictions, load_questions, peek_corpus
from rllib_mhgpo.errors import DataError

PARAGRAPH = {"idx": 0, "title": "A", "paragraph_text": "a", "is_supporting": True}
FILM = {"Title": "Red Sand", "Text": "Red Sand is a film."}


def write(path: Path, *values: Any, lines: bool = True) -> Path:
    path.write_text("\n".join(map(json.dumps, values)) if lines else json.dumps(values), encoding="utf-8")
    return path


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("record", "message"),
    [
        (FILM, r"found keys 'Title', 'Text'\. Did you mean 'title'\?"),
        ({"title": "Red Sand", "Text": "A film."}, r"found keys 'title', 'Text'\. Did you mean 'text'\?"),
        ({"title": "Red Sand", "body": "A film."}, r"found keys 'title', 'body'\."),
        ({"id": "1", "content": "A film."}, r"found keys 'id', 'content'\. Did you mean 'contents'\?"),
        ({"Contents": "Red Sand\nA film."}, r"found keys 'Contents'\. Did you mean 'contents'\?"),
        ({"wikipedia_title": "A", "Wikipedia_Id": "7", "text": ["a"]}, "key 'wikipedia_id', found 'Wikipedia_Id'"),
        ({"ID": "7", "title": "Red Sand", "text": "A film."}, r"expected key 'id', found 'ID' .*Rename it"),
    ],
)
def test_passages_of_other_keys(tmp_path: Path, record: Any, message: str, count: int, lines: bool) -> None:
    path = write(tmp_path / "c", *[record] * count, lines=lines)
    for read in (load_corpus, peek_corpus):
        with pytest.raises(DataError, match=rf"c: record 1 \(line 1\): .*{message}"):
            read(str(path))


@pytest.mark.parametrize(("lines", "count"), [(True, 2), (False, 1), (False, 2)])
@pytest.mark.parametrize("record", [{"doc_id": "1", "passage": "A film."}, {"Red Sand": ["A film."]}])
def test_titles_and_sentences_stand_alone(tmp_path: Path, record: Any, count: int, lines: bool) -> None:
    message = "record 1 .*titles and sentences alone in its file, or a question with passages; found keys"
    with pytest.raises(DataError, match=message):
        load_corpus(write(tmp_path / "c", *[record] * count, lines=lines))


def test_a_title_may_be_called_as_a_key_is(tmp_path: Path) -> None:
    pages = {**{f"Page {i}": ["A page."] for i in range(9)}, "Text": ["Text is written."], "question": "A question."}
    assert [passage.title for passage in load_corpus(write(tmp_path / "c", pages))] == list(pages)


@pytest.mark.parametrize(
    "row",
    ['2\tb text\t"title\textra', '2\t"b" text\t"title\textra"x', '2\tx "y\tz" w\tC'],
)
def test_a_quote_that_stays_open_does_not_swallow_a_column(tmp_path: Path, row: str) -> None:
    (tmp_path / "c").write_text(f"id\ttext\ttitle\n1\ta\tA\n{row}\n3\tc\tC\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 3: expected 3 columns parted by tabs, found 4"):
        load_corpus(tmp_path / "c")


def test_a_missing_column_is_not_made_of_a_tab_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "c").write_text('id\ttext\ttitle\n1\t"a\tb"\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 2: expected 3 columns"):
        load_corpus(tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answerable": "false"}, "'answerable': expected true or false, found str 'false'"),
        ({"paragraphs": [{**PARAGRAPH, "is_supporting": 1}]}, "'is_supporting': expected true or false, found int 1"),
        ({"paragraphs": [{"title": "A", "paragraph_text": "a", "Is_supporting": True}]}, "found 'Is_supporting'"),
        ({"paragraphs": [{**PARAGRAPH, "idx": False}]}, "a whole number under 'idx', each once, found bool False"),
        ({"question_decomposition": {}}, "key 'question_decomposition': expected a list"),
        ({"question_decomposition": [3]}, "under 'paragraph_support_idx', found int 3"),
        ({"question_decomposition": [{"paragraph_support_idx": "0"}]}, "a whole number or null under"),
        ({"question_decomposition": [{"paragraph_support_idx": True}]}, "a whole number or null under"),
    ],
)
def test_what_supports_an_answer_is_not_guessed(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    record = {"id": "a", "question": "?", "answer": "x", "paragraphs": [PARAGRAPH]}
    nulls = {"answerable": None, "question_decomposition": [{"paragraph_support_idx": None}]}
    for known in (record, {**record, **nulls}, {**record, "question_decomposition": None}):
        assert load_questions(write(tmp_path / "q", known))[0].evidence == (0,)
    with pytest.raises(DataError, match=rf"q: record 1 \(line 1\): .*{message}"):
        load_questions(write(tmp_path / "q", {**record, **changes}))


def test_nulls_are_no_texts(tmp_path: Path) -> None:
    for column in ("title", "text"):
        row = {"title": ["A", "B"], "text": ["a", "b"], column: ["A", None]}
        table = pa.table(row, schema=pa.schema({"title": pa.string(), "text": pa.string()}))
        with pa.OSFile(str(tmp_path / "c"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DataError, match=f"expected a text in every row, found null under '{column}'"):
            load_corpus(tmp_path / "c")


GOLD = {"id": "q1", "answer": "Paris", "supporting_facts": [["A", 0]]}


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"Id": "q1", "answer": "Paris"}, r"an id under .*found keys 'Id', 'answer'\. Did you mean '_?id'\?"),
        ({"ID": "q1", "Answer": "Paris"}, r"found keys 'ID', 'Answer'\. Did you mean '_?id'\?"),
        ({"id": "q1", "Answer": "Paris"}, "expected key 'answer', found 'Answer'"),
        ({"id": "q1", "answer": "Paris", "SP": [["A", 0]]}, "expected key 'sp', found 'SP'"),
        ({"id": "q1", "answer": "Paris", "Supporting_facts": []}, "expected key 'supporting_facts', found 'Supp"),
        (GOLD, "an 'answer' beside 'supporting_facts', as files of questions"),
        ({"id": "\ud83d", "answer": "Paris"}, "an id of valid Unicode, found half a character"),
        ({"id": " ", "answer": "Paris"}, "expected the id as a string .*found str ' '"),
    ],
)
def test_predictions_of_other_keys(tmp_path: Path, record: Any, message: str, count: int, lines: bool) -> None:
    with pytest.raises(DataError, match=rf"p: record 1 \(line 1\): .*{message}"):
        load_predictions(write(tmp_path / "p", *[record] * count, lines=lines))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"answer": {"q1": "Paris"}, "SP": {"q1": [["A", 0]]}}, "expected key 'sp', found 'SP'"),
        ({"answer": {"q1": "Paris"}, "supporting_facts": {}}, "Write predictions under 'predicted_answer' and 'sp'"),
        ({"Answer": {"q1": "Paris"}, "sp": {}}, "found keys 'Answer', 'sp'"),
    ],
)
def test_answers_and_facts_by_id(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_predictions(write(tmp_path / "p", value))


@pytest.mark.parametrize(("lines", "count"), [(True, 2), (False, 1), (False, 2)])
def test_answers_by_id_stand_alone(tmp_path: Path, lines: bool, count: int) -> None:
    with pytest.raises(DataError, match=r"record 1 .*answers by id alone in its file; found keys 'q', 'said'"):
        load_predictions(write(tmp_path / "p", *[{"q": "q1", "said": "Paris"}] * count, lines=lines))


@pytest.mark.parametrize("said", ["Rome", None])
@pytest.mark.parametrize("key", ["predicted_answer", "prediction", "pred", "pred_answer"])
def test_beside_a_prediction_an_answer_is_the_gold(tmp_path: Path, key: str, said: str | None) -> None:
    rows = [{**GOLD, key: said}, {"id": "q2", "answer": "Oslo"}]
    found = load_predictions(write(tmp_path / "p", *rows))
    assert found.answers == {**({"q1": said} if said else {}), "q2": "Oslo"}
    assert not found.facts
