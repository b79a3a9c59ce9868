"""Masked language modelling: tokens that were hidden, found from those around them."""

import hashlib
from dataclasses import dataclass
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.tasks.base import IGNORED, BatchRows, References, Rows, Task, zeros
from vramfit.tasks.parts.reading import Tokenizing
from vramfit.tasks.parts.results import MeanLoss, best_labels, class_losses, place_of, rounded

REPLACED = 0.8
"""Of the chosen tokens, this part becomes the mask token, half of the rest another token, and the rest stays (Devlin
et al. 2019)."""
OTHER = 0.9
CHUNK = 256
"""Masked tokens whose logits, one for each word of the vocabulary, are looked at together."""


class MaskedLanguageModel(Task):
    """See the module."""

    name = "masked-lm"
    title = "Masked language model"
    rank = 40
    auto_class = "AutoModelForMaskedLM"
    is_trained = is_served = True
    can_record = can_smooth = True
    why_not_unpacked = "gives a logit for every word of every token"
    max_scores = 100
    reads_blank_lines = False
    request_forms = ('"a text with [MASK] in it"',)

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        return {"labels": zeros(device, batch, seq)}

    def loss(self, model: Any, batch: Any) -> Any:
        from vramfit.tasks.parts.losses import token_labels_loss

        return token_labels_loss(model, batch)

    def hiding(self, tokenizer: Any, seed: int, probability: float) -> "Masking":
        return Masking.of(tokenizer, seed, probability)

    def batch_labels(self, batch: Any, rows: BatchRows, hiding: Any) -> Any:
        """Which tokens are hidden depends on the epoch and the sample, not on the batch."""
        import torch

        if hiding is None:
            return {}
        ids = batch["input_ids"]
        labels = torch.full_like(ids, IGNORED)
        for line, marks, index, length in zip(ids, labels, rows.indices, rows.lengths, strict=True):
            line[:length], marks[:length] = hiding.hide(line[:length].clone(), rows.epoch, index)
        return {"input_ids": ids, "labels": labels}

    def metrics(self, how: Tokenizing, references: References) -> "MaskedMetrics":
        return MaskedMetrics()

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`fills` of mask tokens; without a tokenizer, none."""
        rows, tokenizer = [], how.tokenizer
        for ids, logits, reference in zip(batch["input_ids"], output.logits, references, strict=True):
            places = [] if tokenizer is None else (ids == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
            fills = []
            for place in places:
                values, tokens = best_labels(logits[place], [reference])
                texts = tokenizer.convert_ids_to_tokens(tokens)
                found = [{"token": t, "probability": rounded(p)} for t, p in zip(texts, values, strict=True)]
                fills.append({"position": place, **found[0]} | ({"scores": found} if reference.get("top_k") else {}))
            rows.append(place_of(reference) | {"fills": fills})
        return rows


@dataclass(frozen=True, slots=True)
class Masking:
    """How tokens are hidden: from the seed, the epoch and the sample alone."""

    seed: int
    probability: float
    mask_id: int
    special_ids: Any
    num_ids: int

    @staticmethod
    def of(tokenizer: Any, seed: int, probability: float) -> "Masking":
        """For a tokenizer.

        Raises:
            WorkloadError: it has no mask token, or the probability is none.
        """
        import torch

        problems = []
        if tokenizer.mask_token_id is None:
            problems.append("the tokenizer has no mask token, so there is no masked language modelling with it")
        if not 0 < probability <= 1:
            problems.append(f"mask_probability {probability} is not above 0 and at most 1")
        if problems:
            raise WorkloadError(problems)
        special = torch.tensor(sorted(tokenizer.all_special_ids), dtype=torch.long)
        return Masking(seed, probability, int(tokenizer.mask_token_id), special, len(tokenizer))

    def hide(self, ids: Any, epoch: int, index: int) -> tuple[Any, Any]:
        """A sample with tokens hidden, and its labels; at least one is hidden where any may be."""
        import torch

        key = f"{self.seed}/{epoch}/{index}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        draws = torch.rand(3, len(ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        choice = torch.where(torch.isin(ids, self.special_ids), 2.0, draws[0])
        chosen = choice < self.probability
        if not chosen.any() and bool((choice < 1).any()):
            chosen[choice.argmin()] = True
        labels = torch.where(chosen, ids, IGNORED)
        others = (draws[2] * self.num_ids).long()
        hidden = torch.where(chosen & (draws[1] < REPLACED), self.mask_id, ids)
        return torch.where(chosen & (draws[1] >= REPLACED) & (draws[1] < OTHER), others, hidden), labels


class MaskedMetrics:
    """`loss`, `perplexity`, and the `accuracy` on masked tokens."""

    best_metric = "loss"
    higher_is_better = False

    def __init__(self) -> None:
        self._loss = MeanLoss()
        self._num_right = 0

    def update(self, output: Any, batch: Any, references: References) -> None:
        for logits, labels in zip(output.logits, batch["labels"].to(output.logits.device), strict=True):
            for places in (labels != IGNORED).nonzero()[:, 0].split(CHUNK):
                chosen, true = logits[places], labels[places]
                self._loss.add(class_losses(chosen, true))
                self._num_right += int((chosen.argmax(-1) == true).sum())

    def merge(self, other: "MaskedMetrics") -> None:
        self._loss.merge(other._loss)
        self._num_right += other._num_right

    def result(self) -> dict[str, float]:
        import torch

        loss = self._loss.mean()
        accuracy = self._num_right / self._loss.count if self._loss.count else 0.0
        perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())
        return {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}


TASK = MaskedLanguageModel()
