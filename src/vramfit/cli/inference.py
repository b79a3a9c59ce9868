"""`vramfit evaluate` and `vramfit predict`: a saved model on the rows of a file, or as a search."""

import json as json_format
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import look_at_data_for, look_at_file, look_at_gpu, look_at_model
from vramfit.cli.options import Json, Trust, argument, checked_choice, opt, option, parse_names, verb
from vramfit.cli.terminal import say, show, working, write_out
from vramfit.errors import WorkloadError
from vramfit.records.codec import check_place, replace_file
from vramfit.report.run import render_metrics
from vramfit.settings import having
from vramfit.settings.precision import Precision
from vramfit.stages import tell
from vramfit.tasks import find_task, ranking_task, vector_task
from vramfit.units import counted
from vramfit.workload import CHOICES

if TYPE_CHECKING:
    from vramfit.runtime.data.source import DataSource
    from vramfit.runtime.retrieval import Collection, Search

Model = Annotated[str, argument("A folder that vramfit train or transformers saved.", "MODEL")]
TaskName = Annotated[str | None, option("Task (head) to use. Default: the model's own.", "NAME")]
PRECISIONS = ", ".join(Precision.value.names)
PrecisionName = Annotated[str, option(f"Number format. One of {PRECISIONS}.", "NAME")]
Memory = Annotated[str | None, option("Memory that PyTorch may reserve, such as 2GiB.", "SIZE")]
GPUName = Annotated[str | None, option("Choose a batch that fits this GPU of the catalogue.", "NAME")]
DATA = argument("CSV, TSV, JSON lines or plain text; - reads standard input (CSV by header or --text-column).", "DATA")
Seq = Annotated[int | None, option("Truncate sequences to N tokens.", "N", min=1)]

NUM_OF_SEARCH = 3
"""Files of a search."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """A saved model, a file of rows, and how they are computed."""

    model: Model
    task: TaskName = None
    text_column: str | None = opt(None, "Column of the texts; two for pairs.", "NAME,…")
    max_rows: int | None = opt(None, "Read at most N rows.", "N", min=1)
    batch: int | None = opt(None, "Samples of full length per batch. Default: as many as fit.", "N", min=1)
    seq: Seq = None
    precision: PrecisionName = "fp32"
    attention: str | None = opt(None, "sdpa, eager or packed. Default: packed where the GPU has the kernel.", "NAME")
    fused: bool = opt(False, "Run each layer as one fused function in packed batches on a GPU.")
    memory: Memory = None
    gpu: GPUName = None
    device: str | None = opt(None, "cuda, cuda:N, cpu or emulated.", "NAME")
    trust_remote_code: Trust = False

    def look(self, *files: str) -> None:
        """Refuse wrong names and missing files before torch is imported."""
        for name in {f.name for f in fields(self)} & set(CHOICES):
            if getattr(self, name) is not None:  # else it is chosen for the model or the GPU
                checked_choice(name, getattr(self, name))
        look_at_gpu(self.gpu)
        look_at_model(self.model)
        for file in files:
            look_at_file(file)

    def source(self, data: str, task: str, **more: Any) -> "DataSource":
        """The rows, as they are read for a task."""
        from vramfit.runtime.data.source import DataSource

        columns = parse_names(self.text_column)
        return DataSource(path=data, task=task, text_columns=columns, max_rows=self.max_rows, **more)

    def open(self, task: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
        """The model, the device it is to run on, and the settings to take there.

        Args:
            task: the one to take where none is named; None takes the model's own.
        """
        from vramfit.runtime.device import RunDevice
        from vramfit.runtime.trained import open_model

        trained = open_model(self.model, task=self.task or task, seq=self.seq, trust_remote_code=self.trust_remote_code)
        trained.check_head()
        run_device = RunDevice(self.device, memory=self.memory)
        names = {f.name for f in fields(self)} & set(having(in_inference=True)) - {"model", "task", "seq"}
        return trained, run_device, trained.suited(run_device, **{name: getattr(self, name) for name in names})

    def load(self, trained: Any, run_device: Any, samples: Any, settings: dict[str, Any]) -> Any:
        """The model on its device, with a batch that fits beside it."""
        return trained.load(run_device, samples, batch=self.batch, **settings)


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """How a model that gives vectors of texts is evaluated."""

    queries: str | None = opt(None, "Search: queries with id and text.", "FILE")
    documents: str | None = opt(None, "Search: documents with id and text.", "FILE")
    relevant: str | None = opt(None, "Search: query id, document id and grade, as BEIR's qrels have them.", "FILE")
    dims: str | None = opt(None, "Also report the figures of vectors truncated to these lengths.", "N,…")
    rerank: str | None = opt(None, "Search: model that reorders the best documents of each query.", "MODEL")
    top: int = opt(100, "Search: documents per query that --rerank reorders.", "N", min=1)

    @property
    def files(self) -> tuple[str, ...]:
        """Those of a search."""
        return tuple(file for file in (self.queries, self.documents, self.relevant) if file is not None)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of vectors."""
        parts = parse_names(self.dims)
        wrong = [part for part in parts if not part.isdecimal() or int(part) < 1]
        if wrong:
            raise typer.BadParameter(f"--dims {wrong[0]!r} is not a whole number from 1")
        return tuple(map(int, parts))

    def look(self, data: str | None) -> None:
        """Refuse what contradicts itself, before anything is read."""
        if data is not None and self.files:
            raise typer.BadParameter("DATA and --queries both say what is evaluated: give one")
        if data is None and len(self.files) < NUM_OF_SEARCH:
            raise typer.BadParameter("give DATA; or for a search all of --queries, --documents and --relevant")
        if data is not None and self.rerank is not None:
            raise typer.BadParameter("--rerank is for a search: give --queries, --documents and --relevant, not DATA")
        assert self.lengths is not None


@verb("vramfit evaluate my-model dev.csv --memory 2GiB")
def evaluate(
    options: InferenceOptions,
    vectors: VectorOptions,
    data: Annotated[str | None, DATA] = None,
    label_column: Annotated[str | None, option("Column of the labels.", "NAME")] = None,
    skip_bad_rows: Annotated[bool, option("Leave out rows that cannot be used.", None, "--skip-bad-rows")] = False,
    json: Json = False,
) -> None:
    """Evaluate a saved model; the batch is chosen to fit, and halved if memory runs out.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when not even one sample fits,
    130 when interrupted.
    """
    vectors.look(data)
    options.look(*([data] if data is not None else vectors.files))
    if data is None:
        show(evaluate_search(options, vectors, skip_bad_rows=skip_bad_rows), render_metrics, json=json)
        return
    rows = data

    def source(task: str) -> "DataSource":
        return options.source(rows, task, label_column=label_column, skip_bad_rows=skip_bad_rows)

    look_at_data_for(options.model, source, options.task)
    with working("Reading"):
        from vramfit.runtime.data.samples import make_metrics

        trained, run_device, settings = options.open()
        samples = trained.read(source(trained.task))
        metrics = make_metrics(samples)
    say_what_was_cut(samples)
    with working("Evaluating"):
        inference = options.load(trained, run_device, samples, settings)
        compare_dims(metrics, inference.model, vectors.lengths)
        inference.run(
            samples,
            lambda output, rows, numbers: metrics.update(output, rows, [samples.references[i] for i in numbers]),
            lambda done, total: tell(f"{done:,} of {total:,} done"),
        )
    read: dict[str, Any] = {"num_samples": samples.num_samples, "num_bad_rows": len(samples.bad_rows)}
    result = {**read, **metrics.result(), "notes": trained.notes_on(samples)}
    took = {"num_recoveries": inference.num_recoveries, "reserved_bytes": run_device.reserved_bytes}
    show(result | took if json else result, render_metrics, json=json)


def compare_dims(metrics: Any, model: Any, dims: tuple[int, ...]) -> None:
    """Have metrics of vectors compare lengths of them.

    Raises:
        WorkloadError: metrics of something else, or vectors that are shorter.
    """
    if not dims:
        return
    if not hasattr(metrics, "dims"):
        raise WorkloadError(["--dims is for models that give vectors of texts"])
    from vramfit.runtime.retrieval import check_dims

    check_dims(model, dims)
    metrics.dims = dims


def say_what_was_cut(*parts: Any) -> None:
    """Rows left out and samples cut, on stderr.

    Args:
        parts: the samples, as one or in parts; each part knows all bad rows.
    """
    bad_rows = parts[0].bad_rows
    if bad_rows:
        first = bad_rows[0]
        say(f"{counted(len(bad_rows), 'row')} cannot be used; the first is row {first.row}: {first.what}")
    num_truncated = sum(samples.num_truncated for samples in parts)
    if num_truncated:
        are, were = ("is", "was") if num_truncated == 1 else ("are", "were")
        longest = max(max(samples.lengths) for samples in parts)
        before = max(samples.longest_before_truncation for samples in parts)
        how = find_task(parts[0].task).long_texts
        say(
            f"{counted(num_truncated, 'row')} {are} longer than {longest:,} tokens and {were} {how}; "
            f"the longest has {before:,}"
        )


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """What is predicted of a row, and where that is written."""

    output: str | None = opt(None, "Write to this file, not to stdout.", "FILE", "--output", "-o")
    top_k: int | None = opt(None, "Also give the scores of the N best labels or tokens.", "N", min=1)
    all_scores: bool = opt(False, "Also give the scores of all labels.")
    json: bool = opt(False, "No effect: predictions are JSON lines anyway.")

    def look(self, data: str, model: str) -> None:
        """Refuse what contradicts itself or cannot be written, before anything is predicted."""
        if self.top_k is not None and self.all_scores:
            raise typer.BadParameter("--top-k and --all-scores both say how many scores there are: give one")
        if self.output is not None:
            check_place(Path(self.output), data, model, what="predictions")

    def num_scores(self, trained: Any) -> int | None:
        """How many scores are given; None for the best alone."""
        from vramfit.tasks.parts.heads import REGRESSION
        from vramfit.tasks.parts.results import wrong_top_k

        if trained.problem == REGRESSION and (self.all_scores or self.top_k is not None):
            raise WorkloadError([f"{trained.model} predicts numbers: there are no scores of labels to choose from"])
        if self.all_scores and not trained.label_names:
            most = trained.kind.max_scores
            more = f": take --top-k, up to {most}" if most is not None else ""
            raise WorkloadError([f"--all-scores is for models with labels, and this one does {trained.task}{more}"])
        if self.all_scores:
            return len(trained.label_names)
        wrong = None if self.top_k is None else wrong_top_k(self.top_k, trained.task)
        if wrong is not None:
            raise WorkloadError([wrong])
        return self.top_k


@verb("echo 'A film to remember.' | vramfit predict my-model -")
def predict(options: InferenceOptions, own: PredictOptions, data: Annotated[str, DATA]) -> None:
    """Predict every row of a file; a row that cannot be used gives {"row": …, "error": …} in its place.

    row is the line on which a row begins, counted from 1 (the first row below a header is 2). index counts the rows
    of data from 0.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when not even one sample fits,
    130 when interrupted.
    """
    options.look(data)
    own.look(data, options.model)

    def source(task: str) -> "DataSource":
        return options.source(data, task, needs_labels=False, skip_bad_rows=True)

    look_at_data_for(options.model, source, options.task)
    with _unwritten(own.output), working("Reading"):
        trained, run_device, settings = options.open()
        packs = trained.workload(**settings).is_packed
        wanted = own.num_scores(trained)
        rows = source(trained.task)
        parts = trained.read_ahead(rows) if packs else iter([trained.read(rows)])
        first = next(parts)
    found: list[dict[str, Any]] = []
    read: list[Any] = []
    with _unwritten(own.output), working("Predicting"):

        def take(samples: Any, output: Any, batch: Any, numbers: list[int]) -> None:
            references = [samples.references[i] | {"top_k": wanted} for i in numbers]
            found.extend(trained.kind.predictions(output, batch, references, trained.tokenizing))

        def pass_on() -> Iterator[Any]:
            for samples in chain([first], parts):
                read.append(samples)
                yield samples

        inference = options.load(trained, run_device, None if packs else first, settings)
        inference.run_parts(pass_on(), take, lambda done: tell(f"{done:,} done"))
    for note in trained.notes_on(first):
        say(f"Note: {note}")
    say_what_was_cut(*read)
    found = trained.kind.merged(found)
    bad = [{"row": row.row, "index": row.index, "error": row.what} for row in first.bad_rows]
    _write(sorted([*found, *bad], key=lambda row: row["index"]), own.output)


@contextmanager
def _unwritten(output: str | None) -> Iterator[None]:
    """Inside, Ctrl-C says that there is no output yet."""
    try:
        yield
    except KeyboardInterrupt:
        said = "" if output is None else f"nothing was written to {output}, which is written at the end"
        raise KeyboardInterrupt(said) from None


def _write(rows: list[dict[str, Any]], output: str | None) -> None:
    lines = (json_format.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if output is not None:
        with _unwritten(output):
            replace_file(Path(output), "".join(lines).encode())
        return
    num_written = 0
    try:
        for line in lines:
            write_out(line)
            num_written += 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{num_written:,} of {len(rows):,} rows were written to stdout") from None


def evaluate_search(options: InferenceOptions, vectors: VectorOptions, *, skip_bad_rows: bool) -> dict[str, Any]:
    """The figures of a search; the files are read and checked before torch is imported.

    Raises:
        DataError: what is wrong with the files.
        WorkloadError: a task without vectors, or lengths beyond those of the vectors.
    """
    from vramfit.runtime.retrieval import CollectionFiles, read_collection

    task = options.task or vector_task().name
    if not find_task(task).pools_itself:
        raise WorkloadError([f"a search is for models that give vectors of texts, not {task}"])
    with working("Reading"):
        files = CollectionFiles(
            queries=vectors.queries or "",
            documents=vectors.documents or "",
            relevant=vectors.relevant or "",
            task=task,
            skip_bad_rows=skip_bad_rows,
        )
        collection = read_collection(files)
        from vramfit.runtime.retrieval import Search

        trained, run_device, settings = options.open(task)
        search = Search(trained, collection)
    if collection.bad_rows:
        first = collection.bad_rows[0]
        say(
            f"{counted(len(collection.bad_rows), 'row')} left out; the first is row {first.row} of {first.file}: "
            f"{first.what}"
        )
    with working("Evaluating"):
        inference = options.load(trained, run_device, search.longest, settings)
        figures = search.figures(
            inference, run_device, vectors.lengths, lambda done, total: tell(f"{done:,} of {total:,} done")
        )
    if vectors.rerank is not None:
        del inference
        second = _reranked(options, vectors, search, collection, run_device)
        figures |= {f"reranked_{name}": value for name, value in second.items()}
    read = {"num_queries": len(collection.queries), "num_documents": len(collection.documents)}
    return {**read, "num_relevant": len(collection.relevant), "num_bad_rows": len(collection.bad_rows), **figures}


def _reranked(
    options: InferenceOptions, vectors: VectorOptions, search: "Search", collection: "Collection", run_device: Any
) -> dict[str, float]:
    """The figures after a second model has ordered the best documents of each query."""
    from vramfit.runtime.retrieval import Scorer

    with working("Reranking"):
        second = replace(options, model=vectors.rerank or "", task=None)
        trained, _, settings = second.open(ranking_task().name)
        scorer = Scorer(trained, collection, search.candidates(vectors.top, run_device))
        scorer.inference = second.load(trained, run_device, scorer.samples, settings)
        return search.reranked(scorer, run_device, lambda done, total: tell(f"{done:,} of {total:,} done"))
