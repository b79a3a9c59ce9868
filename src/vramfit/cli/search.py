"""`vramfit evaluate --queries …`: a model's vectors as a search."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vramfit.cli.terminal import say, working
from vramfit.errors import WorkloadError
from vramfit.stages import tell
from vramfit.tasks import find_task, ranking_task, vector_task
from vramfit.units import counted

if TYPE_CHECKING:
    from vramfit.cli.inference import InferenceOptions, VectorOptions
    from vramfit.runtime.data.collection import Collection
    from vramfit.runtime.retrieval import Search


def evaluate_search(options: "InferenceOptions", vectors: "VectorOptions", *, skip_bad_rows: bool) -> dict[str, Any]:
    """The figures of a search; the files are read and checked before torch is imported.

    Raises:
        DataError: what is wrong with the files.
        WorkloadError: a task without vectors, or lengths beyond those of the vectors.
    """
    from vramfit.runtime.data.collection import CollectionFiles, read_collection

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
    options: "InferenceOptions", vectors: "VectorOptions", search: "Search", collection: "Collection", run_device: Any
) -> dict[str, float]:
    """The figures after a second model has ordered the best documents of each query."""
    from vramfit.runtime.retrieval import Scorer

    with working("Reranking"):
        second = replace(options, model=vectors.rerank or "", task=None)
        trained, _, settings = second.open(ranking_task().name)
        scorer = Scorer(trained, collection, search.candidates(vectors.top, run_device))
        scorer.inference = second.load(trained, run_device, scorer.samples, settings)
        return search.reranked(scorer, run_device, lambda done, total: tell(f"{done:,} of {total:,} done"))
