"""`graphs`: packed passes captured as CUDA graphs, and replayed."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramfit.settings.setting import Setting, Technique
from vramfit.settings.values import Switch
from vramfit.tasks import find_task

if TYPE_CHECKING:
    from vramfit.workload import Workload

OPTIMIZERS = ("adamw-fused", "adamw-8bit")
PRECISIONS = ("amp-bf16", "bf16")


class Graphs(Setting):
    keyword, order = "graphs", 230
    value = Switch()
    default = False
    label, modes = "CUDA graphs", ("train",)
    about = "Passes are captured once and replayed, which spares the CPU work; for packed attention."
    help = "Capture packed passes as CUDA graphs; a plan takes it in long runs whose host is about as slow as the GPU."
    is_planned = True
    is_measured = False
    must_match_on_resume = False
    techniques = (
        Technique(
            values=("True",),
            kind="free",
            does="passes are recorded once and replayed: the host waits less; takes more memory",
            costs="none: sums in another order, since passes are filled up to a few sizes",
        ),
    )

    def contradictions(self, w: "Workload") -> Iterator[str]:
        if not w.graphs:
            return
        if not w.trains or w.attention != "packed":
            yield "graphs are of packed training passes, which can be filled up to a few sizes: take attention packed"
        if w.num_gpus > 1:
            yield "graphs are for one GPU yet"
        if w.quantize is not None:
            yield f"graphs and quantize {w.quantize} do not go together yet"
        if w.offload is not None:
            yield f"graphs and offload {w.offload} do not go together: copies take turns"
        if w.checkpointing is not None:
            yield (
                "graphs and checkpointing do not go together: layers that are computed again look at random generators"
            )
        if not find_task(w.task).can_record:
            yield f"graphs are not for {w.task}: its head does not leave out what a pass was filled up with"
        if w.precision not in PRECISIONS:
            yield f"graphs are for precision {' or '.join(PRECISIONS)}, not {w.precision}"
        if w.optimizer not in OPTIMIZERS:
            yield (
                f"graphs hold a pass's memory for good, and optimizer {w.optimizer} needs some beside: "
                f"take {' or '.join(OPTIMIZERS)}"
            )
