"""What is wrong with a file is said with its rows, before anything is tokenized; or the rows are kept out."""

import json
from typing import Any

import pytest

from vramfit.errors import DataError, WorkloadError
from vramfit.runtime.data.source import DataSource

GOOD_QUESTION = {"question": "where is anna", "context": "anna is in berlin", "answers": ["berlin"]}


def lines(*rows: dict[str, Any]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


BAD: dict[str, tuple[str, str, str | bytes, int, str]] = {
    "empty text": ("sequence-classification", "a.csv", "text,label\ngood,1\n  ,0\n", 3, "text is empty"),
    "no label": ("sequence-classification", "a.csv", "text,label\ngood,\nbad,0\n", 2, "label is missing"),
    "fields": ("sequence-classification", "a.csv", "text,label\ngood,1\na,b,0\n", 3, "3 fields, where the first row"),
    "open quote": ("sequence-classification", "a.csv", 'text,label\ngood,1\n"bad,0\na,1\n', 3, "never closed"),
    "not utf-8": ("sequence-classification", "a.csv", b"text,label\ngood,1\nb\xe9d,0\n", 3, "0xe9 at offset 19"),
    "not utf-8 in json": ("masked-lm", "a.jsonl", b'{"text": "good"}\n{"text": "\xff"}', 2, "0xff at offset 27"),
    "broken json": ("masked-lm", "a.jsonl", '{"text": "good"}\n{"text": ', 2, "not JSON"),
    "not an object": ("masked-lm", "a.jsonl", '{"text": "good"}\n[1]', 2, "not a JSON object"),
    "no field": ("masked-lm", "a.jsonl", '{"text": "good"}\n{"txt": "b"}', 2, "no text"),
    "not a text": ("masked-lm", "a.jsonl", '{"text": "good"}\n{"text": ["b"]}', 2, "not a text"),
    "surrogate": ("masked-lm", "a.jsonl", '{"text": "good"}\n{"text": "\\ud800"}', 2, "surrogate"),
    "tags": (
        "token-classification",
        "a.jsonl",
        lines({"tokens": ["a"], "tags": ["O"]}, {"tokens": ["a", "b"], "tags": ["O"]}),
        2,
        "1 tag for 2 tokens",
    ),
    "no tokens": (
        "token-classification",
        "a.jsonl",
        lines({"tokens": ["a"], "tags": ["O"]}, {"tokens": [], "tags": []}),
        2,
        "tokens is empty",
    ),
    "a token without a tag": ("token-classification", "a.conll", "a\tO\n\nb\tO\nc\n", 3, "'c' in line 4 has no tag"),
    "answer": (
        "question-answering",
        "a.jsonl",
        lines(GOOD_QUESTION, GOOD_QUESTION | {"answers": ["paris"]}),
        2,
        "'paris' is not in its context",
    ),
    "no answers": (
        "question-answering",
        "a.jsonl",
        lines(GOOD_QUESTION, GOOD_QUESTION | {"answers": None}),
        2,
        "no answers",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_an_error_with_its_number(write: Any, read: Any, kind: str) -> None:
    task, name, content, row, what = BAD[kind]
    path = write(name, content)
    with pytest.raises(DataError) as caught:
        read(path, task)
    assert caught.value.file == path
    assert caught.value.rows == (row,)
    assert what in str(caught.value)
    assert f"row {row}" in str(caught.value)
    assert "--skip-bad-rows" in str(caught.value.hint)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_reported_and_kept_out_when_asked(write: Any, read: Any, kind: str) -> None:
    task, name, content, row, what = BAD[kind]
    samples = read(write(name, content), task, skip_bad_rows=True)
    assert len(samples) == 1
    (bad,) = samples.bad_rows
    assert bad.row == row
    assert what in bad.what


def test_five_bad_rows_are_shown_and_all_are_counted(write: Any, read: Any) -> None:
    with pytest.raises(DataError) as caught:
        read(write("a.csv", "text,label\n" + "good,1\n ,1\n" * 20))
    assert len(caught.value.rows) == 20
    assert "20 of 40 rows" in str(caught.value)
    assert str(caught.value).count("is empty") == 5
    assert "and 15 more" in str(caught.value)


def test_a_label_outside_the_names(write: Any, read: Any) -> None:
    path = write("a.csv", "text,label\ngood,pos\nbad,neutral\n")
    with pytest.raises(DataError, match="'neutral' is not one of the 2 known: neg, pos"):
        read(path, label_names=["neg", "pos"])
    with pytest.raises(DataError, match="its labels are 2; known are neg, pos"):
        read(write("b.csv", "text,label\ngood,2\n"), label_names=["neg", "pos"])


def test_data_of_other_labels_than_the_models_names_both(write: Any, read: Any) -> None:
    path = write("a.csv", "text,label\ngood,pos\nbad,neg\nwell,pos\n")
    with pytest.raises(DataError, match=r"no row .*: its labels are neg, pos; known are LABEL_0, LABEL_1") as caught:
        read(path, label_names=["LABEL_0", "LABEL_1"])
    assert "other labels" in str(caught.value.hint)
    assert "skip" not in str(caught.value.hint)
    with pytest.raises(DataError, match="2 of 3 rows"):
        read(path, label_names=["neg", "LABEL_1"])


def test_a_file_in_another_encoding_is_to_be_saved_as_utf8(write: Any, read: Any) -> None:
    path = write("my été.csv", "text,label\nbon,1\nété,0\n".encode("latin-1"))
    with pytest.raises(DataError, match="0xe9 at offset 17") as caught:
        read(path)
    assert f"iconv -f WINDOWS-1252 -t UTF-8 '{path}' > 'my été-utf8.csv'" in str(caught.value.hint)
    assert "--skip-bad-rows" in str(caught.value.hint)


@pytest.mark.parametrize("header", ["text,label", "review,sentiment"])
def test_texts_with_a_label_each_are_no_tagged_tokens_and_the_forms_are_named(
    write: Any, read: Any, header: str
) -> None:
    path = write("a.csv", f"{header}\ngood and well,pos\nbad and poor,neg\n")
    with pytest.raises(DataError) as caught:
        read(path, task="token-classification")
    assert ".conll" in str(caught.value.hint)
    assert "JSON lines with the lists tokens and tags" in str(caught.value.hint)


def test_a_missing_column_names_those_there_and_the_nearest(write: Any, read: Any) -> None:
    path = write("a.csv", "id,sentence_text,label\n1,good,1\n")
    with pytest.raises(DataError, match="no column 'sentense'; it has id, sentence_text, label") as caught:
        read(path, text_columns=("sentense",))
    assert "'sentence_text'" in str(caught.value.hint)
    with pytest.raises(DataError, match="looks like the text"):
        read(path)
    with pytest.raises(DataError) as caught:
        read(path, text_columns=("sentence_text",), label_column="lable")
    assert "'label'" in str(caught.value.hint)
    with pytest.raises(DataError, match="looks like the label"):
        read(write("b.csv", "id,text,y\n1,good,1\n"))


@pytest.mark.parametrize("name", ["nope", "sentment"])
def test_a_column_of_labels_is_not_what_was_meant_for_the_texts(write: Any, read: Any, name: str) -> None:
    path = write("a.csv", "review,sentiment\ngood,1\n")
    with pytest.raises(DataError, match="it has review, sentiment") as caught:
        read(path, text_columns=(name,))
    assert caught.value.hint == "name one of them"


def test_two_columns_of_one_name_are_refused_where_one_of_them_is_wanted(write: Any, read: Any) -> None:
    path = write("a.csv", "text,text,note,note,label\nb,good,1,2,3\n")
    with pytest.raises(DataError, match="2 columns called 'text'"):
        read(path)
    assert len(read(write("b.csv", "text,note,note,label\ngood,1,2,3\n"))) == 1


@pytest.mark.parametrize("content", ["", "text,label\n", "\n\n"])
def test_zero_rows(write: Any, read: Any, content: str) -> None:
    with pytest.raises(DataError, match="no rows"):
        read(write("a.csv", content))
    with pytest.raises(DataError):
        read(write("a.jsonl", content if "text" not in content else ""))


def test_nothing_but_bad_rows_is_an_error_even_when_they_may_be_skipped(write: Any, read: Any) -> None:
    with pytest.raises(DataError, match="all 2 rows are bad, the first: text is empty"):
        read(write("a.csv", "text,label\n ,1\n ,0\n"), skip_bad_rows=True)


def test_one_row_is_one_row(write: Any, read: Any) -> None:
    path = write("a.csv", "text,label\n ,1\n")
    with pytest.raises(DataError, match="its only row is bad: text is empty"):
        read(path, skip_bad_rows=True)
    with pytest.raises(DataError, match="1 of 1 row cannot be used"):
        read(path)


def test_what_is_not_text_at_all(write: Any, read: Any) -> None:
    with pytest.raises(DataError, match="UTF-16"):
        read(write("a.csv", "text,label\ngood,1\n".encode("utf-16")))
    with pytest.raises(DataError, match="zero byte at offset 2"):
        read(write("b.csv", b"PK\x00\x00"))
    with pytest.raises(DataError, match=r"row 1: not JSON"):
        read(write("c.json", '{"data": [}'), "question-answering")
    with pytest.raises(DataError, match="does not say how to read it"):
        read(write("d.parquet", b"PAR1"))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_a_line_that_is_too_long_is_said_with_its_size(
    write: Any, read: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vramfit.runtime.data.source.MAX_LINE_BYTES", 1024)
    long = '{"text": "' + 3061 * "é" + '"}'
    content = f"text,label\n{long}\ngood,1\n" if name == "a.csv" else f'{{"text": "a"}}\n{long}\n{{"text": "b"}}\n'
    with pytest.raises(DataError, match=r"line 2 has 5\.99 KiB, and at most 1\.00 KiB are read of a line") as caught:
        read(write(name, content), "masked-lm")
    assert caught.value.rows == (2,)
    assert "UTF-8" not in f"{caught.value} {caught.value.hint}"


def test_a_line_of_the_most_bytes_is_read(write: Any, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.runtime.data.source.MAX_LINE_BYTES", 64)
    assert len(read(write("a.txt", "a" * 63 + "\n" + "b" * 64), "masked-lm")) == 2


def test_a_file_that_is_not_there(read: Any) -> None:
    with pytest.raises(DataError, match=r"cannot read nowhere\.csv: No such file"):
        read("nowhere.csv")


def test_a_source_checks_itself() -> None:
    with pytest.raises(WorkloadError, match="features"):
        DataSource(path="a.csv", task="features")
    with pytest.raises(WorkloadError, match="reads 2 columns of text, not 1; max_rows 0"):
        DataSource(path="a.csv", task="question-answering", text_columns=("a",), max_rows=0)


def test_a_length_without_room_is_refused(write: Any, read: Any) -> None:
    with pytest.raises(WorkloadError, match="the least is 3"):
        read(write("a.csv", "text,label\ngood,1\n"), max_length=2)


def test_columns_of_another_task_name_it(write: Any, read: Any) -> None:
    path = write("words.conll", "EU B-ORG\nrejects O\n\nPeter B-PER\n")
    with pytest.raises(DataError) as caught:
        read(path, "sequence-classification")
    assert caught.value.hint == "these are the columns of another task: --task token-classification"


@pytest.mark.parametrize(
    ("task", "name", "content", "other"),
    [
        ("question-answering", "a.csv", "text,label\ngood,1\n", "sequence-classification"),
        ("question-answering", "a.jsonl", lines({"text": "good", "label": 1}), "sequence-classification"),
        ("question-answering", "a.jsonl", lines({"text": ["a"], "label": ["O"]}), "token-classification"),
        ("token-classification", "a.csv", "review,sentiment\ngood,1\n", "sequence-classification"),
        ("token-classification", "a.jsonl", lines(GOOD_QUESTION), "question-answering"),
        ("sequence-classification", "a.jsonl", lines(GOOD_QUESTION), "question-answering"),
    ],
)
def test_the_task_that_is_named_can_read_the_columns(
    write: Any, read: Any, task: str, name: str, content: str, other: str
) -> None:
    path = write(name, content)
    with pytest.raises(DataError) as caught:
        read(path, task)
    assert f"another task: --task {other}" in str(caught.value.hint)
    assert len(read(path, other)) == 1
    with pytest.raises(DataError) as caught:
        read(path, task, of_model=True)
    assert f"the model does {task}" in str(caught.value.hint)
    assert "--task" not in str(caught.value.hint)


def test_a_model_of_tags_is_not_to_read_other_labels(write: Any, read: Any) -> None:
    path = write("a.csv", "text,label\ngood and well,pos\n")
    with pytest.raises(DataError) as caught:
        read(path, "token-classification")
    assert "--task sequence-classification" in str(caught.value.hint)
    with pytest.raises(DataError) as caught:
        read(path, "token-classification", label_names=["O", "B-x"])
    assert "--task" not in str(caught.value.hint)


def test_question_answering_names_the_columns_it_looks_for(write: Any, read: Any) -> None:
    path = write("a.csv", "x,y\ngood,1\n")
    with pytest.raises(DataError, match="looks like question, context and answers: x, y") as caught:
        read(path, "question-answering")
    assert "--text-column QUESTION,CONTEXT" in str(caught.value.hint)
    with pytest.raises(DataError, match="looks like question and context: x, y"):
        read(path, "question-answering", needs_labels=False)
    with pytest.raises(DataError, match="looks like the answers: question, context, y"):
        read(write("b.csv", "question,context,y\na,b,c\n"), "question-answering")
