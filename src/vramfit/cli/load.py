"""`vramfit load`: a checkpoint inspected and loaded, and what that took."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from vramfit.cli.options import Json, WorkloadOptions, opt, verb
from vramfit.cli.terminal import say, show, working
from vramfit.errors import NoPlanFits
from vramfit.report.run import render_load_report
from vramfit.settings import having
from vramfit.stages import tell
from vramfit.units import format_bytes

if TYPE_CHECKING:
    from vramfit.loader.load import LoadRequest
    from vramfit.records.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Where a checkpoint is loaded to, and what is checked."""

    device: str | None = opt(None, "cuda, cuda:1 or cpu; the GPU where there is one.", "NAME")
    random_weights: bool = opt(False, "Draw the weights: no checkpoint is needed.")
    seed: int = opt(0, "Seed of weights that are drawn: a new head, or all of them.", "N", min=0)
    scan: bool = opt(False, "Read all weights first, for NaN and infinite ones.")
    check: bool = opt(False, "Compare outputs with full precision on sample sentences.")
    batch: int | None = opt(None, "With --offload weights: leave room for so many samples.", "N", min=1)
    seq: int | None = opt(None, "With --offload weights: leave room for so many tokens.", "N", min=1)


@verb("vramfit load ./my-model --precision bf16 --quantize int8 --check", without=having(at_load=False))
def load(options: WorkloadOptions, own: LoadOptions, json: Json = False) -> None:
    """Inspect a checkpoint, load it tensor by tensor, and report what that took; nothing is kept.

    --memory is what the weights may take; with --batch or --seq, what they and such a forward pass may take together.
    Exit codes: 0 done, 1 for a checkpoint that is damaged or not this model's, 2 for a wrong name or value,
    3 when it does not fit.
    """
    from vramfit.loader.load import make_request

    job = {name: count for name, count in (("batch", own.batch), ("seq", own.seq)) if count is not None}
    keywords: dict[str, Any] = options.keywords(trains=False)
    drawn = {"random_weights": own.random_weights, "seed": own.seed}
    request = make_request(options.model, device=own.device or "cpu", **drawn, **keywords)
    if job and not request.offloads:
        raise typer.BadParameter("--batch and --seq go with --offload weights: they say how many layers can stay")
    with working(f"Loading {options.model}"):
        from vramfit.loader.comparison import load_and_compare
        from vramfit.loader.load import load_request

        request = request if own.device is not None else replace(request, device=_default_device())
        predicted = _predict(request, job) if job else None
        if predicted is not None:
            weights_bytes = predicted.breakdown["weights"]
            request = replace(request, workload=replace(request.workload, memory=weights_bytes))
        if own.check:
            report = load_and_compare(request, progress=_tell_bytes, scan=own.scan)
        else:
            _, report = load_request(request, progress=_tell_bytes, scan=own.scan)
    show(report, render_load_report, json=json)
    if predicted is not None and not json:
        w, most_bytes = predicted.workload, predicted.safe_reserved_bytes
        say(f"Room is left for {w.batch} × {w.seq} tokens: {format_bytes(most_bytes)} in all at most.", stderr=False)


def _predict(request: "LoadRequest", job: dict[str, int]) -> "Estimate | None":
    """The job inside the memory given, or what is free on the GPU; its share of weights is the load's budget.

    None where nothing says what is free: that is the load's to refuse.
    """
    import torch

    from vramfit.estimator.predict import estimate
    from vramfit.loader.budget import free_bytes

    w = request.workload
    memory = w.memory if w.memory is not None else free_bytes(torch.device(request.device))
    if memory is None:
        return None
    same = (name for name in having(at_load=True) if name not in ("model", "memory"))
    predicted = estimate(
        request.model,
        mode="infer",
        memory=memory,
        trust_remote_code=request.trust_remote_code,
        **{name: getattr(w, name) for name in same},
        **job,
    )
    if not predicted.fits:
        least = predicted.safe_reserved_bytes
        raise NoPlanFits(
            f"{predicted.workload.batch} × {predicted.workload.seq} tokens take {format_bytes(least)} with every layer "
            f"offloaded, and the memory is {format_bytes(memory)}",
            best=predicted,
            shortfall_bytes=least - memory,
            hint="take a smaller batch, fewer tokens, precision bf16 or quantize int8",
        )
    return predicted


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _tell_bytes(done: int, total: int) -> None:
    if total:  # of weights that are drawn, nothing is read
        tell(f"{format_bytes(done)} of {format_bytes(total)}")
