"""A load whose outputs are compared with those of the same checkpoint in full precision."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.errors import CheckpointError, NoPlanFits, VramfitError
from vramfit.loader.load import Progress, load_request
from vramfit.loader.request import LoadRequest
from vramfit.records.load_report import LoadReport
from vramfit.tasks import find_task

if TYPE_CHECKING:
    import torch


def load_and_compare(request: LoadRequest, *, progress: Progress | None = None, scan: bool = False) -> LoadReport:
    """Load, run sample sentences, load in full precision, run them again; one model at a time is in memory.

    Raises:
        CheckpointError: outputs that are not finite in full precision either.
        VramfitError: outputs that only the load asked for makes NaN or infinite; whatever `load` raises, for either.
    """
    from vramfit.loader.comparison import compare_logits, num_not_finite, outputs_of, sample_inputs

    model, report = load_request(request, progress=progress, scan=scan)
    folder = Path(model.config.name_or_path)  # type: ignore[union-attr, arg-type]
    batch, inputs = sample_inputs(model, folder if folder.is_dir() else None)
    outputs = outputs_of(model, batch)
    del model
    reference = outputs_of(_full_precision(request), batch)
    mask = batch["attention_mask"]
    _refuse(request, num_not_finite(outputs, mask), num_not_finite(reference, mask), len(outputs))
    comparison = compare_logits(
        outputs,
        reference,
        mask,
        inputs=inputs,
        labels=find_task(request.workload.task).has_head,
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
        how = w.precision if w.quantize is None else f"{w.precision} with {w.quantize} linear layers"
        raise VramfitError(
            f"the outputs of {w.model} in {how} are NaN or infinite for {num_wrong} of {num_samples} samples, and "
            "finite in full precision: its numbers are beyond this precision",
            hint="take precision bf16, which has the range of fp32; --scan looks for weights that are no numbers",
        )


def _full_precision(request: LoadRequest) -> "torch.nn.Module":
    """The same model in fp32, outside the budget; on the host where the device has no room for it."""
    workload = replace(request.workload, precision="fp32", quantize=None, memory=None, offload=None)
    full = replace(request, workload=workload)
    try:
        return load_request(full)[0]
    except NoPlanFits:
        return load_request(replace(full, device="cpu"))[0]
