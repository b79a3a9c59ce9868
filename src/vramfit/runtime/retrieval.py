"""A model's vectors as a search: queries and documents through the model, and where relevant documents are found.

`Collection` reads queries, documents and relevance from three files, as BEIR has them (`queries.jsonl`, `corpus.jsonl`,
`qrels/test.tsv`), and checks them before a model is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vramfit.errors import DataError, WorkloadError
from vramfit.models.sentence_folder import find_prompt
from vramfit.runtime.data.examples import BadRow, refuse, shown_columns
from vramfit.runtime.data.rows import Table, open_table
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.device import RunDevice
from vramfit.runtime.inference import Inference, OnProgress
from vramfit.runtime.trained import TrainedModel
from vramfit.tasks.parts import vector_metrics
from vramfit.tasks.parts.joint import width_of
from vramfit.tasks.parts.pooling import head_of
from vramfit.tasks.parts.reading import BadValue, Reference, Row, number_of, text_in
from vramfit.units import shown

IDS = ("_id", "id", "query-id", "query_id", "qid", "corpus-id", "corpus_id", "document_id", "doc_id", "docid", "pid")
TEXTS = ("text", "query", "question", "document", "passage", "content", "body", "sentence")
TITLE = "title"
"""What documents may have beside their text; it comes before it, as BEIR has it."""
OF_QUERY = ("query-id", "query_id", "qid", "query")
OF_DOCUMENT = ("corpus-id", "corpus_id", "document-id", "document_id", "doc_id", "docid", "pid", "document")
GRADES = ("score", "grade", "relevance", "rel", "label")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionFiles:
    """The three files, as the user names them."""

    queries: str
    documents: str
    relevant: str
    task: str
    """Of the model."""
    skip_bad_rows: bool = False
    """Keep bad rows out and report them, where otherwise they are an error."""

    def source(self, path: str) -> DataSource:
        """One of the files."""
        return DataSource(path=path, task=self.task, needs_labels=False)


@dataclass(frozen=True, slots=True)
class Collection:
    """What was read."""

    queries: list[Reference]
    documents: list[Reference]
    relevant: list[tuple[int, int, float]]
    """Numbers of a query and of a document, and the grade, above 0; every query has one."""
    bad_rows: tuple[BadRow, ...]


class _Reader:
    """Rows of one file after another; bad ones are kept or refused."""

    def __init__(self, files: CollectionFiles) -> None:
        self._files = files
        self.bad: list[BadRow] = []

    def each(self, path: str, begin: Callable[[DataSource, Table], Callable[[Row], None]]) -> None:
        """Hand every row of a file to what `begin` gives for its columns."""
        source, bad, num_rows = self._files.source(path), [], 0
        with open_table(source) as table:
            if not table.columns:
                raise _empty(source)
            take = begin(source, table)
            for row in table.rows:
                try:
                    if row.problem:
                        raise BadValue(row.problem)
                    take(row)
                except BadValue as error:
                    bad.append(BadRow(source.name, row.number, str(error), error.hint, num_rows))
                num_rows += 1
        if not num_rows:
            raise _empty(source)
        self.keep_out(bad, num_rows)

    def keep_out(self, bad: list[BadRow], num_rows: int) -> None:
        """Raises DataError for bad rows, unless they may be skipped."""
        if bad and (not self._files.skip_bad_rows or len(bad) == num_rows):
            raise refuse(bad, num_rows)
        self.bad += bad


def read_collection(files: CollectionFiles) -> Collection:
    """Reads and checks the three files.

    Raises:
        DataError: a file or a column that is not there; or rows that cannot be used: an id that comes twice or does not
            exist, a text that is empty, a grade that is no number, a query without a relevant document.
    """
    reader = _Reader(files)
    queries, documents = _texts(reader, files.queries), _texts(reader, files.documents)
    relevant = _relevant(reader, files, queries, documents)
    answered = {query for query, _, _ in relevant}
    silent = [q for number, q in enumerate(queries.values()) if number not in answered]
    bad = [BadRow(files.queries, q["row"], f"no relevant document for query {shown(q['id'])}") for q in silent]
    reader.keep_out(bad, len(queries))
    kept = {number: place for place, number in enumerate(sorted(answered))}
    found = list(queries.values())
    return Collection(
        [found[number] for number in kept],
        list(documents.values()),
        [(kept[query], document, grade) for query, document, grade in relevant],
        tuple(reader.bad),
    )


def _texts(reader: _Reader, path: str) -> dict[str, Reference]:
    """Id → what it stands for."""
    found: dict[str, Reference] = {}

    def begin(source: DataSource, table: Table) -> Callable[[Row], None]:
        column, text = _column(source, table, IDS, "an id"), _column(source, table, TEXTS, "the text")
        title = next((name for name in table.columns if name.lower() == TITLE and name != text), None)

        def take(row: Row) -> None:
            own = _id_in(row, column)
            if own in found:
                raise BadValue(f"the id {shown(own)} was in row {found[own]['row']} already")
            found[own] = {"row": row.number, "index": len(found), "id": own, "texts": (_text(row, text, title),)}

        return take

    reader.each(path, begin)
    return found


def _text(row: Row, column: str, title: str | None) -> str:
    above = str(row.fields.get(title) or "").strip() if title is not None else ""
    if not above:
        return text_in(row, column)
    below = str(row.fields.get(column) or "").strip()
    return text_in(row._replace(fields={column: f"{above} {below}".strip()}), column)


def _relevant(
    reader: _Reader, files: CollectionFiles, queries: dict[str, Reference], documents: dict[str, Reference]
) -> list[tuple[int, int, float]]:
    rows: dict[tuple[str, str], int] = {}
    found: list[tuple[int, int, float]] = []

    def begin(source: DataSource, table: Table) -> Callable[[Row], None]:
        of_query = _column(source, table, OF_QUERY, "the id of a query")
        of_document = _column(source, table, OF_DOCUMENT, "the id of a document")
        of_grade = next((name for name in table.columns if name.lower() in GRADES), None)

        def take(row: Row) -> None:
            query, document = _id_in(row, of_query), _id_in(row, of_document)
            for own, known, file in ((query, queries, files.queries), (document, documents, files.documents)):
                if own not in known:
                    raise BadValue(f"the id {shown(own)} is not in {file}")
            if (query, document) in rows:
                raise BadValue(
                    f"query {shown(query)} and document {shown(document)} were in row {rows[query, document]} already"
                )
            rows[query, document] = row.number
            grade = 1.0 if of_grade is None else _grade(row.fields.get(of_grade), of_grade)
            if grade > 0:
                found.append((queries[query]["index"], documents[document]["index"], grade))

        return take

    reader.each(files.relevant, begin)
    return found


def _empty(source: DataSource) -> DataError:
    return DataError(f"{source.name}: there are no rows in it", file=source.name, hint="an id and a text a row")


def _column(source: DataSource, table: Table, names: Sequence[str], what: str) -> str:
    known = {name.lower(): name for name in reversed(table.columns)}
    for name in names:
        if name in known:
            return known[name]
    raise DataError(
        f"{source.name}: none of its columns looks like {what}: {shown_columns(table.columns)}",
        file=source.name,
        hint=f"call it one of {', '.join(names[:4])}",
    )


def _id_in(row: Row, column: str) -> str:
    value = row.fields.get(column)
    own = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not own:
        missing = value is None or isinstance(value, str)
        raise BadValue(f"no {column}" if missing else f"{column} is {shown(value)}, not a name or a whole number")
    return own


def _grade(value: Any, column: str) -> float:
    grade = number_of(value)
    if grade is None:
        raise BadValue(f"{column} is {shown(value)}, not a finite number")
    return grade


class Search:
    """The texts of a collection, tokenized.

    Args:
        trained: whose vectors are asked for.
        collection: what is searched, and what is to be found.
    """

    def __init__(self, trained: TrainedModel, collection: Collection) -> None:
        self._collection = collection

        def tokenized(texts: list[Reference], prompt: str) -> Samples:
            how = replace(trained.tokenizing, prompt=find_prompt(trained.parts, name=prompt))
            return Samples(trained.task, trained.kind.encode(texts, how), how)

        self.queries = tokenized(collection.queries, "query")
        self.documents = tokenized(collection.documents, "document")

    @property
    def longest(self) -> Samples:
        """Those with the longest text."""
        return max(self.queries, self.documents, key=lambda samples: max(samples.lengths))

    def figures(
        self, inference: Inference, run_device: RunDevice, dims: Sequence[int], on_progress: OnProgress
    ) -> dict[str, Any]:
        """nDCG, MRR, recall and MAP; `dims`: the same for vectors cut to some lengths.

        Raises:
            WorkloadError: a length beyond that of the vectors.
        """
        check_dims(inference.model, dims)
        rows = self._collection.relevant
        relevant = vector_metrics.Relevant(
            queries=torch.tensor([row[0] for row in rows]),
            documents=torch.tensor([row[1] for row in rows]),
            grades=torch.tensor([row[2] for row in rows], dtype=torch.double),
            num_queries=len(self._collection.queries),
        )

        def found(vectors: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
            with run_device.active():
                ranks = vector_metrics.ranks_of(*vectors, relevant, device=run_device.device)
            return vector_metrics.retrieval_scores(ranks, relevant)

        queries = _vectors(inference, self.queries, on_progress)
        self._made, self._relevant = (queries, _vectors(inference, self.documents, on_progress)), relevant
        return vector_metrics.at_dims(self._made, found, dims)

    def candidates(self, num: int, run_device: RunDevice) -> torch.Tensor:
        """The nearest documents of each query, the nearest first; after `figures`."""
        with run_device.active():
            return vector_metrics.nearest(*self._made, num, device=run_device.device)

    def reranked(self, scorer: "Scorer", run_device: RunDevice, on_progress: OnProgress) -> dict[str, float]:
        """The same figures where a model has put the candidates of each query in another order.

        What is no candidate stays where the search has put it.
        """
        with run_device.active():
            ranks = vector_metrics.ranks_of(*self._made, self._relevant, device=run_device.device)
        places = scorer.places(on_progress)
        for number, (query, document) in enumerate(
            zip(self._relevant.queries.tolist(), self._relevant.documents.tolist(), strict=True)
        ):
            ranks[number] = places[query].get(document, int(ranks[number]))
        return vector_metrics.retrieval_scores(ranks, self._relevant)


class Scorer:
    """Candidates beside their queries, tokenized for a model that scores them.

    Args:
        trained: the model.
        candidates: numbers of documents, a row for each query.
    """

    def __init__(self, trained: TrainedModel, collection: Collection, candidates: torch.Tensor) -> None:
        self._candidates, how = candidates.tolist(), trained.tokenizing
        texts = [reference["texts"][0] for reference in collection.documents]
        asked = [
            {"row": number, "index": number, "texts": (query["texts"][0], *(texts[i] for i in numbers))}
            for number, (query, numbers) in enumerate(zip(collection.queries, self._candidates, strict=True))
        ]
        self.samples = Samples(trained.task, trained.kind.encode(asked, how), how)
        self.inference: Inference | None = None
        """Set before `places`: the model on its device."""

    def places(self, on_progress: OnProgress) -> list[dict[int, int]]:
        """For each query, the place from 1 of each candidate by its score."""
        scores = [[0.0] * len(numbers) for numbers in self._candidates]

        def take(output: Any, batch: Any, rows: list[int]) -> None:
            for row, score in zip(rows, output.logits[:, 0].float().tolist(), strict=True):
                reference = self.samples.references[row]
                scores[reference["index"]][reference["place"]] = score

        assert self.inference is not None
        self.inference.run(self.samples, take, on_progress)
        made = []
        for numbers, own in zip(self._candidates, scores, strict=True):
            order = sorted(range(len(numbers)), key=lambda place: (-own[place], place))
            made.append({numbers[place]: rank for rank, place in enumerate(order, 1)})
        return made


def check_dims(model: torch.nn.Module, dims: Sequence[int]) -> None:
    """Raises WorkloadError for vectors that are to be cut to more than they have."""
    head = head_of(model)
    width = 0 if head is None else width_of(head, model)
    beyond = [dim for dim in dims if dim > width]
    if beyond:
        raise WorkloadError([f"dims {beyond[0]} is more than the {width} numbers of a vector"])


def _vectors(inference: Inference, samples: Samples, on_progress: OnProgress) -> torch.Tensor:
    """One for each text, on the host."""
    found: list[torch.Tensor] = []
    order: list[int] = []

    def take(output: Any, batch: Any, rows: list[int]) -> None:
        found.append(output.embedding.float().cpu())
        order.extend(rows)

    inference.run(samples, take, on_progress)
    vectors = torch.cat(found)
    return torch.empty_like(vectors).index_copy_(0, torch.tensor(order), vectors)
