"""What fewer bits change in the outputs: the same sentences through the loaded model and in full precision."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import CheckpointError, NoPlanFits, VramfitError
from vramfit.loader.load import LoadRequest, Progress, load_request
from vramfit.models.anatomy import vocab_size
from vramfit.records.finding import LoadReport, LogitComparison
from vramfit.settings import SETTINGS, having
from vramfit.tasks import find_task

SENTENCES = (
    "The film was a delight from the first minute to the last.",
    "I want my money back; the battery died after two days.",
    "Where is the nearest train station?",
    "Shares of the company fell by nine percent on Monday.",
    "No.",
    "The patient was given 20 mg twice daily and recovered within a week.",
    "It was fine, I suppose, though nothing I would see again.",
    "Researchers found that the glacier had lost a third of its ice since 1990.",
    "ok thanks, talk later",
    "Paris is the capital of France, and Lima that of Peru.",
    "The committee postponed its decision until the budget had been reviewed.",
    "Heavy rain is expected in the north; roads may be closed.",
    "She plays the violin, he the piano, and neither of them likes to practise.",
    "Terrible service, wonderful food.",
    "Water boils at 100 degrees Celsius at sea level.",
    "The contract may be ended by either party with thirty days' notice.",
)
RANDOM_LENGTH = 32
OUTPUTS = ("logits", "prediction_logits", "start_logits", "last_hidden_state")


def sample_inputs(model: torch.nn.Module, folder: Path | None) -> tuple[dict[str, torch.Tensor], str]:
    """A batch of sentences through the folder's tokenizer, or of random ids where there is none; and which it is."""
    tokenizer = _tokenizer(folder)
    if tokenizer is not None:
        batch = tokenizer(list(SENTENCES), padding=True, truncation=True, max_length=128, return_tensors="pt")
        return {name: batch[name] for name in ("input_ids", "attention_mask")}, "sentences"
    generator = torch.Generator().manual_seed(0)
    words = vocab_size(model) or 2
    shape = (len(SENTENCES), RANDOM_LENGTH)
    ids = torch.randint(min(1000, words // 2), words, shape, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "random ids"


def _tokenizer(folder: Path | None) -> Any:
    if folder is None or not any((folder / name).exists() for name in ("tokenizer.json", "vocab.txt", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception:  # a tokenizer that needs a package of its own: random ids do as well
        return None


@torch.no_grad()
def outputs_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's main output for a batch, in fp32 on the host."""
    device = next(model.parameters()).device
    answer = model(**{name: tensor.to(device) for name, tensor in batch.items()})
    found = next((value for name in OUTPUTS if (value := getattr(answer, name, None)) is not None), None)
    if found is None:
        found = answer[0]
    logits: torch.Tensor = found
    return logits.float().cpu()


def num_not_finite(outputs: torch.Tensor, mask: torch.Tensor) -> int:
    """Samples with a NaN or infinite output at a token that is real."""
    return int((~outputs.isfinite() & _kept(outputs, mask)).flatten(1).any(1).sum())


def _is_by_token(outputs: torch.Tensor, mask: torch.Tensor) -> bool:
    return outputs.dim() >= 2 and outputs.shape[1] == mask.shape[1]


def _kept(outputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Where outputs are of real tokens, in a shape that goes with theirs."""
    if not _is_by_token(outputs, mask):
        return torch.ones_like(outputs, dtype=torch.bool)
    return mask.bool().view(*mask.shape, *([1] * (outputs.dim() - 2)))


def compare_logits(
    outputs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, *, inputs: str, labels: bool
) -> LogitComparison:
    """Compare outputs with those of full precision; padding is left out.

    Args:
        outputs, reference: one row a sample; a second dimension of the mask's size is tokens.
        mask: 1 where a token is real.
        inputs: what the samples were.
        labels: whether the highest output stands for something.
    """
    ours, theirs = (tensor.masked_fill(~_kept(outputs, mask), 0) for tensor in (outputs, reference))
    cosines = torch.nn.functional.cosine_similarity(ours.flatten(1), theirs.flatten(1))
    agreement = None
    if labels and outputs.shape[-1] > 1:
        same = outputs.argmax(-1) == reference.argmax(-1)
        is_per_token = _is_by_token(outputs, mask) and same.dim() > 1
        agreement = float((same[mask.bool()] if is_per_token else same).float().mean())
    return LogitComparison(
        num_sentences=outputs.shape[0],
        inputs=inputs,
        max_abs_difference=float((ours - theirs).abs().max()),
        max_abs_output=float(theirs.abs().max()),
        cosine=float(cosines.min()),
        label_agreement=agreement,
    )


def load_and_compare(request: LoadRequest, *, progress: Progress | None = None, scan: bool = False) -> LoadReport:
    """Load, run sample sentences, load in full precision, run them again; one model at a time is in memory.

    Raises:
        CheckpointError: outputs that are not finite in full precision either.
        VramfitError: outputs that only the load asked for makes NaN or infinite; whatever `load` raises, for either.
    """
    model, report = load_request(request, progress=progress, scan=scan)
    folder = Path(model.config.name_or_path)  # type: ignore[union-attr, arg-type]
    batch, inputs = sample_inputs(model, folder if folder.is_dir() else None)
    outputs = outputs_of(model, batch)
    del model
    reference = outputs_of(_full_precision(request), batch)
    mask = batch["attention_mask"]
    _refuse(request, num_not_finite(outputs, mask), num_not_finite(reference, mask), len(outputs))
    comparison = compare_logits(
        outputs, reference, mask, inputs=inputs, labels=find_task(request.workload.task).has_head
    )
    return replace(report, comparison=comparison)


def _refuse(request: LoadRequest, num_wrong: int, num_wrong_in_full: int, num_samples: int) -> None:
    """Outputs that are not finite fail the check: there is nothing to compare."""
    w = request.workload
    if num_wrong_in_full:
        raise CheckpointError(
            f"the outputs of {w.model} are NaN or infinite for {num_wrong_in_full} of {num_samples} samples, in full "
            "precision too: its weights are damaged",
            hint="add --scan, which reads all weights and names those that are NaN or infinite",
        )
    if num_wrong:
        raise VramfitError(
            f"the outputs of {w.model} in {w.weights_in_words} are NaN or infinite for {num_wrong} of "
            f"{num_samples} samples, and finite in full precision: its numbers are beyond this precision",
            hint="take precision bf16, which has the range of fp32; --scan looks for weights that are no numbers",
        )


def _full_precision(request: LoadRequest) -> torch.nn.Module:
    """The same model in fp32, outside the budget; on the host where the device has no room for it."""
    plain = {name: SETTINGS[name].default for name in having(of_weights=True)}
    full = replace(request, workload=replace(request.workload, memory=None, **plain))
    try:
        return load_request(full)[0]
    except NoPlanFits:
        return load_request(replace(full, device="cpu"))[0]
