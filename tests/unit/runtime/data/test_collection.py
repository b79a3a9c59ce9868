"""Queries, documents and what is relevant, from three files: what is wrong with them is named with file and row."""

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.errors import DataError
from vramfit.runtime.retrieval import Collection, CollectionFiles, read_collection

QUERIES = [{"_id": "q1", "text": "where"}, {"_id": "q2", "text": "who"}]
DOCUMENTS = [
    {"_id": "d1", "title": "Paris", "text": "a town"},
    {"_id": "d2", "title": "", "text": "a river"},
    {"_id": "3", "title": "Anna", "text": ""},
]
RELEVANT = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq2\t3\t1\nq1\td2\t0\n"


def read(folder: Path, queries: Any = QUERIES, documents: Any = DOCUMENTS, **more: Any) -> Collection:
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    relevant = more.pop("relevant", RELEVANT)
    (folder / "test.tsv").write_text(relevant)
    paths = {"queries": "queries.jsonl", "documents": "corpus.jsonl", "relevant": "test.tsv"}
    return read_collection(
        CollectionFiles(**{name: str(folder / path) for name, path in paths.items()}, task="embedding", **more)
    )


def test_files_of_beir_are_read_as_they_are(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert [q["texts"] for q in found.queries] == [("where",), ("who",)]
    assert [d["texts"] for d in found.documents] == [("Paris a town",), ("a river",), ("Anna",)]
    assert found.relevant == [(0, 0, 2.0), (1, 2, 1.0)]
    assert found.bad_rows == ()


def test_other_files_have_other_names(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("id,query\n7,where\n")
    (tmp_path / "d.tsv").write_text("doc_id\tpassage\n8\ta town\n9\ta river\n")
    (tmp_path / "r.jsonl").write_text('{"query_id": 7, "doc_id": 9}\n')
    found = read_collection(
        CollectionFiles(
            queries=str(tmp_path / "q.csv"),
            documents=str(tmp_path / "d.tsv"),
            relevant=str(tmp_path / "r.jsonl"),
            task="embedding",
        )
    )
    assert found.relevant == [(0, 1, 1.0)]


@pytest.mark.parametrize(
    ("changes", "file", "row", "what"),
    [
        ({"relevant": RELEVANT + "q9\td1\t1\n"}, "test.tsv", 5, "the id 'q9' is not in "),
        ({"relevant": RELEVANT + "q2\td7\t1\n"}, "test.tsv", 5, "the id 'd7' is not in "),
        ({"relevant": RELEVANT + "q1\td1\t1\n"}, "test.tsv", 5, "query 'q1' and document 'd1' were in row 2 already"),
        ({"relevant": RELEVANT + "q2\td1\tmuch\n"}, "test.tsv", 5, "score is 'much', not a finite number"),
        ({"relevant": RELEVANT + "q2\td1\tnan\n"}, "test.tsv", 5, "not a finite number"),
        ({"relevant": RELEVANT + "\td1\t1\n"}, "test.tsv", 5, "no query-id"),
        (
            {"relevant": RELEVANT.replace("q2\t3\t1", "q2\t3\t0")},
            "queries.jsonl",
            2,
            "no relevant document for query 'q2'",
        ),
        ({"queries": [*QUERIES, QUERIES[0]]}, "queries.jsonl", 3, "the id 'q1' was in row 1 already"),
        ({"documents": [*DOCUMENTS, DOCUMENTS[1]]}, "corpus.jsonl", 4, "the id 'd2' was in row 2 already"),
        ({"documents": [*DOCUMENTS, {"_id": "d4", "text": " "}]}, "corpus.jsonl", 4, "text is empty"),
        ({"documents": [*DOCUMENTS, {"_id": 1.5, "text": "x"}]}, "corpus.jsonl", 4, "_id is 1.5, not a name"),
        ({"documents": [*DOCUMENTS, {"text": "x"}]}, "corpus.jsonl", 4, "no _id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_named_with_file_and_row_and_may_be_left_out(
    tmp_path: Path, changes: dict[str, Any], file: str, row: int, what: str
) -> None:
    with pytest.raises(DataError) as info:
        read(tmp_path, **changes)
    assert str(info.value).startswith(f"{tmp_path / file}: 1 of ")
    assert f"row {row}: {what}" in str(info.value) or what in str(info.value)
    assert list(info.value.rows) == [row]
    kept = read(tmp_path, **changes, skip_bad_rows=True)
    assert [(Path(bad.file).name, bad.row) for bad in kept.bad_rows] == [(file, row)]
    assert {query for query, _, _ in kept.relevant} == set(range(len(kept.queries)))


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of its columns looks like the id of a document: query-id, x"):
        read(tmp_path, relevant="query-id\tx\nq1\td1\n")
    with pytest.raises(DataError, match=r"queries\.jsonl: none of its columns looks like an id: text"):
        read(tmp_path, queries=[{"text": "where"}])
    with pytest.raises(DataError, match="there are no rows in it"):
        read(tmp_path, relevant="query-id\tcorpus-id\n")


@pytest.mark.parametrize("empty", [{"relevant": ""}, {"queries": []}, {"documents": []}])
def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, empty: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="there are no rows in it"):
        read(tmp_path, **empty)


def test_nothing_left_of_a_file_is_an_error_however_much_may_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not in"):
        read(tmp_path, relevant="query-id\tcorpus-id\nq8\td1\n", skip_bad_rows=True)
