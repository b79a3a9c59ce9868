"""A model's vectors as a search: queries and documents through the model, and where relevant documents are found."""

from collections.abc import Sequence
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.runtime.data.collection import Collection
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.device import RunDevice
from vramfit.runtime.inference import Inference, OnProgress
from vramfit.runtime.trained import TrainedModel
from vramfit.tasks.parts import vector_metrics
from vramfit.tasks.parts.joint import width_of
from vramfit.tasks.parts.pooling import head_of


class Search:
    """The texts of a collection, tokenized.

    Args:
        trained: whose vectors are asked for.
        collection: what is searched, and what is to be found.
    """

    def __init__(self, trained: TrainedModel, collection: Collection) -> None:
        self._collection = collection
        how = trained.tokenizing
        self.queries = Samples(trained.task, trained.kind.encode(collection.queries, how), how)
        self.documents = Samples(trained.task, trained.kind.encode(collection.documents, how), how)

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
