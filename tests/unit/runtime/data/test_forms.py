"""Every form a data set may come in gives the same samples."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vramfit.errors import DataError, MissingExtra

ROWS = [("good film", "pos"), ("bad, bad film", "neg"), ("where is\nanna", "pos")]
TEXTS = [text for text, _ in ROWS]


def texts(samples: Any) -> list[str]:
    return [reference["texts"][0] for reference in samples.references]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_csv_with_any_delimiter_quotes_line_breaks_and_a_byte_order_mark(write: Any, read: Any, separator: str) -> None:
    lines = [separator.join(("label", "text"))] + [f'{label}{separator}"{text}"' for text, label in ROWS]
    samples = read(write("a.csv", b"\xef\xbb\xbf" + "\r\n".join(lines).encode()))
    assert texts(samples) == TEXTS
    assert samples.label_names == ("neg", "pos")
    assert [r["label"] for r in samples.references] == ["pos", "neg", "pos"]


def test_rows_are_numbered_by_the_line_they_begin_on(write: Any, read: Any) -> None:
    samples = read(write("a.csv", 'text,label\n"good\nfilm",x\n\nbad film,y\n'))
    assert [r["row"] for r in samples.references] == [2, 5]


def test_tsv_is_literal_because_glue_is(write: Any, read: Any) -> None:
    samples = read(write("a.tsv", 'sentence\tlabel\n"good\t1\nbad" film\t0\n'))
    assert texts(samples) == ['"good', 'bad" film']


HEADLESS = [("a good film", "pos"), ("a bad film", "neg"), ("a very good film", "pos"), ("a very bad film", "neg")]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_file_without_a_header_is_understood_where_its_values_tell(
    write: Any, read: Any, name: str, order: tuple[int, int]
) -> None:
    separator = "\t" if name == "a.tsv" else ","
    path = write(name, "".join(separator.join(row[place] for place in order) + "\n" for row in HEADLESS))
    samples = read(path)
    assert [(r["row"], r["texts"][0], r["label"]) for r in samples.references] == [
        (number, *row) for number, row in enumerate(HEADLESS, 1)
    ]
    text, label = order.index(0) + 1, order.index(1) + 1
    assert samples.notes[0].startswith(f"no header: column {text} is read as the text, column {label} as the label;")
    predicted = read(path, needs_labels=False)
    assert texts(predicted) == [text for text, _ in HEADLESS]
    assert "label" not in predicted.notes[0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_column_of_few_numbers_is_of_labels_though_the_first_comes_once(
    write: Any, read: Any, order: tuple[int, int]
) -> None:
    rows = [("a good film", "5"), *((f"a bad film {'very ' * n}", str(n % 2)) for n in range(5))]
    samples = read(write("a.csv", "".join(",".join(row[place] for place in order) + "\n" for row in rows)))
    assert [r["label"] for r in samples.references] == [label for _, label in rows]


@pytest.mark.parametrize("wanted", [{}, {"label_column": "stars"}])
def test_plain_text_has_no_column_of_labels_to_name(write: Any, read: Any, wanted: dict[str, str]) -> None:
    with pytest.raises(DataError) as caught:
        read(write("a.txt", "a good film\na bad film\n"), **wanted)
    assert "--label-column" not in str(caught.value.hint)
    assert ".csv or .jsonl file that has both" in str(caught.value.hint)


def test_columns_that_are_named_come_before_what_values_tell(write: Any, read: Any) -> None:
    path = write("a.csv", "".join(f"{text},{label}\n" for text, label in HEADLESS))
    assert texts(read(path, text_columns=("2",), label_column="1")) == [label for _, label in HEADLESS]
    with pytest.raises(DataError, match="no column 'review'"):
        read(path, text_columns=("review",))


@pytest.mark.parametrize(
    "rows",
    [
        [("body", "kind"), *HEADLESS],
        HEADLESS[:2],
        [("1", "pos"), ("2", "neg"), ("3", "pos"), ("4", "neg")],
        [("yes", "pos"), ("no", "neg"), ("yes", "pos"), ("no", "neg")],
        [(*row, "x") for row in HEADLESS],
    ],
)
def test_values_that_do_not_tell_are_no_reason_to_guess(write: Any, read: Any, rows: list[tuple[str, ...]]) -> None:
    with pytest.raises(DataError, match="none of its columns looks like the text") as caught:
        read(write("a.csv", "".join(",".join(row) + "\n" for row in rows)))
    assert "--text-column" in str(caught.value.hint)


def test_a_header_that_is_known_is_a_header_whatever_is_below(write: Any, read: Any) -> None:
    rows = "".join(f"{text},{label}\n" for text, label in HEADLESS)
    samples = read(write("a.csv", f"text,label\n{rows}"))
    assert (len(samples), samples.notes) == (4, ())


def test_a_file_without_a_header_is_read_by_position(write: Any, read: Any) -> None:
    path = write("a.tsv", "ham\tgood film\nspam\tbad film\n")
    samples = read(path, text_columns=("2",), label_column="1")
    assert texts(samples) == ["good film", "bad film"]
    assert samples.label_names == ("ham", "spam")
    with pytest.raises(DataError, match="looks like the text") as caught:
        read(path)
    assert "--text-column 2 --label-column 1" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_lines(write: Any, read: Any, name: str) -> None:
    lines = [json.dumps({"text": text, "intent": label}) for text, label in ROWS]
    assert texts(read(write(name, "\n\n".join(lines)))) == TEXTS


def test_a_json_list_and_a_json_document_with_data(write: Any, read: Any) -> None:
    rows = [{"text": text, "category": label} for text, label in ROWS]
    assert texts(read(write("a.json", json.dumps(rows, indent=1)))) == TEXTS
    assert texts(read(write("b.json", json.dumps({"data": rows})))) == TEXTS


def test_pairs_are_guessed_and_have_token_types(write: Any, read: Any) -> None:
    samples = read(write("a.csv", "premise,hypothesis,label\ngood film,bad film,1\n"))
    assert samples.references[0]["texts"] == ("good film", "bad film")
    assert samples.collate([0])["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1]]


def test_text_lines_are_masked_texts_and_blank_lines_are_nothing(write: Any, read: Any) -> None:
    samples = read(write("a.txt", "good film\n\nbad film\n"), "masked-lm")
    assert [r["row"] for r in samples.references] == [1, 3]


CONLL = "Anna\tB-person\nis\tO\nin\tO\nBerlin\tB-place\n\t\nvery\tO\ngood\tO\n"


@pytest.mark.parametrize("name", ["a.conll", "a.txt", "a.annotated"])
def test_conll_and_json_lines_with_tokens_are_the_same(write: Any, read: Any, name: str) -> None:
    samples = read(write(name, "-DOCSTART- O\n\n" + CONLL), "token-classification")
    assert [r["row"] for r in samples.references] == [3, 8]
    rows = [
        {"tokens": ["Anna", "is", "in", "Berlin"], "ner_tags": ["B-person", "O", "O", "B-place"]},
        {"tokens": ["very", "good"], "ner_tags": ["O", "O"]},
    ]
    same = read(write("b.jsonl", "\n".join(map(json.dumps, rows))), "token-classification")
    assert same.fingerprint == samples.fingerprint
    assert samples.label_names == ("B-person", "B-place", "O")


def squad(**changes: Any) -> dict[str, Any]:
    answers = [{"text": "berlin", "answer_start": 11}]
    question = {"id": "q1", "question": "where is anna", "answers": answers} | changes
    return {"data": [{"title": "t", "paragraphs": [{"context": "anna is in berlin .", "qas": [question]}]}]}


def test_squad_json_json_lines_and_csv_are_the_same(write: Any, read: Any) -> None:
    task = "question-answering"
    samples = read(write("a.json", json.dumps(squad())), task)
    row = {"question": "where is anna", "context": "anna is in berlin ."}
    flat = row | {"answers": {"text": ["berlin"], "answer_start": [11]}}
    assert read(write("b.jsonl", json.dumps(flat)), task).fingerprint == samples.fingerprint
    assert read(write("c.jsonl", json.dumps(row | {"answer": "berlin"})), task).fingerprint == samples.fingerprint
    table = "question,context,answer\nwhere is anna,anna is in berlin .,berlin\n"
    assert read(write("d.csv", table), task).fingerprint == samples.fingerprint
    assert samples.references[0]["id"] == "q1"


def test_a_question_without_an_answer_points_at_the_first_token(write: Any, read: Any) -> None:
    samples = read(write("a.json", json.dumps(squad(is_impossible=True, answers=[]))), "question-answering")
    batch = samples.collate([0])
    assert batch["start_positions"].tolist() == batch["end_positions"].tolist() == [0]
    assert samples.references[0]["answers"] == []


@pytest.mark.parametrize("content", ['{"text": "good film"}\n{"text": "bad"}\n', "good film\nbad\n"])
def test_standard_input_is_json_lines_or_text(monkeypatch: pytest.MonkeyPatch, read: Any, content: str) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content.encode())))
    samples = read("-", needs_labels=False)
    assert texts(samples) == ["good film", "bad"]
    assert samples.label_names == ()
    assert "labels" not in samples.collate([0, 1])


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("text,label\ngood film,pos\nbad,neg\n", ()),
        ('\n"Text"\t"id"\ngood film\t1\nbad\t2\n', ()),
        ("film,notes\n1,good film\n2,bad\n", ("notes",)),
        ("text\ngood film\nbad\n", ("text",)),
        ("1;good film\n2;bad\n", ("2",)),
    ],
)
def test_standard_input_is_a_table_where_its_header_or_a_named_column_says_so(
    monkeypatch: pytest.MonkeyPatch, read: Any, content: str, columns: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content.encode())))
    assert texts(read("-", needs_labels=False, text_columns=columns)) == ["good film", "bad"]


@pytest.mark.parametrize("content", ["Text, film and music\nbad\n", "text\nbad\n", "good film, bad film\nbad\n"])
def test_sentences_on_standard_input_are_no_table(monkeypatch: pytest.MonkeyPatch, read: Any, content: str) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content.encode())))
    assert texts(read("-", needs_labels=False)) == content.splitlines()


def test_a_column_that_a_table_on_standard_input_has_not_is_named(monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"review,stars\nbad,1\n")))
    with pytest.raises(DataError, match="standard input has no column 'reviews'; it has review, stars") as error:
        read("-", needs_labels=False, text_columns=("reviews",))
    assert error.value.hint == "did you mean 'review'?"


def test_words_of_plain_text_are_found_for_prediction(write: Any, read: Any) -> None:
    samples = read(write("a.txt", "anna is in berlin.\n"), "token-classification", needs_labels=False)
    (reference,) = samples.references
    assert [reference["text"][a:b] for a, b in reference["spans"]] == ["anna", "is", "in", "berlin", "."]
    assert list(reference["first"]) == [1, 2, 3, 4, 5]


def saved(folder: Path) -> str:
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def test_a_datasets_folder_needs_datasets(tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match="datasets"):
        read(saved(tmp_path))


def test_a_datasets_folder_gives_names_for_numbers_of_classes(
    tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Data(list[dict[str, Any]]):
        column_names: tuple[str, ...] = ("text", "label")
        features: dict[str, Any] = {"text": object(), "label": SimpleNamespace(names=["neg", "pos"])}  # noqa: RUF012

    data = Data([{"text": "good film", "label": 1}, {"text": "bad film", "label": 0}])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path: data))
    assert [r["label"] for r in read(saved(tmp_path)).references] == ["pos", "neg"]


def test_a_folder_of_several_data_sets_names_them(tmp_path: Path, read: Any) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="train"):
        read(str(tmp_path))


def test_max_rows_stops_reading(write: Any, read: Any) -> None:
    assert len(read(write("a.csv", "text,label\n" + "good,1\n" * 9), max_rows=4)) == 4


def test_an_index_counts_rows_of_data_whatever_lines_they_take(write: Any, read: Any) -> None:
    content = 'text,label\n"good\nfilm",1\n\n ,0\nbad,0\n"very\n\nbad",0\na,b,c\ngood,1\n'
    samples = read(write("a.csv", content), skip_bad_rows=True)
    assert [(r["row"], r["index"]) for r in samples.references] == [(2, 0), (6, 2), (7, 3), (11, 5)]
    assert [(bad.row, bad.index) for bad in samples.bad_rows] == [(5, 1), (10, 4)]
