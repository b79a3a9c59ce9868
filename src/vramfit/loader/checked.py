"""A load whose outputs are compared with those of the same checkpoint in full precision."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.errors import NoPlanFits
from vramfit.loader.load import Progress, load_request
from vramfit.loader.request import LoadRequest
from vramfit.records.load_report import LoadReport

if TYPE_CHECKING:
    import torch


def load_and_compare(request: LoadRequest, *, progress: Progress | None = None, scan: bool = False) -> LoadReport:
    """Load, run sample sentences, load in full precision, run them again; one model at a time is in memory.

    Raises:
        VramfitError: whatever `load` raises, for either.
    """
    from vramfit.loader.comparison import compare_logits, outputs_of, sample_inputs

    model, report = load_request(request, progress=progress, scan=scan)
    folder = Path(model.config.name_or_path)  # type: ignore[union-attr, arg-type]
    batch, inputs = sample_inputs(model, folder if folder.is_dir() else None)
    outputs = outputs_of(model, batch)
    del model
    reference = _full_precision(request)
    comparison = compare_logits(
        outputs,
        outputs_of(reference, batch),
        batch["attention_mask"],
        inputs=inputs,
        labels=request.workload.task != "features",
    )
    return replace(report, comparison=comparison)


def _full_precision(request: LoadRequest) -> "torch.nn.Module":
    """The same model in fp32, outside the budget; on the host where the device has no room for it."""
    workload = replace(request.workload, precision="fp32", quantize=None, memory=None, offload=None)
    full = replace(request, workload=workload)
    try:
        return load_request(full)[0]
    except NoPlanFits:
        return load_request(replace(full, device="cpu"))[0]
