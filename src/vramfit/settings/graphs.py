"""`graphs`: packed passes captured as CUDA graphs, and replayed."""

from collections.abc import Iterator

from vramfit.settings.optimizer import IN_PLACE
from vramfit.settings.setting import Setting, Technique, Workload, given
from vramfit.settings.values import Switch
from vramfit.tasks import find_task

PRECISIONS = ("amp-bf16", "bf16")


class Graphs(Setting):
    keyword, order = "graphs", 230
    value = Switch()
    default = False
    label, modes = "CUDA graphs", ("train",)
    about = "Passes are captured once and replayed, which spares the CPU work; for packed attention."
    help = "Capture packed passes as CUDA graphs; a plan uses it in long runs in which the GPU would wait for the host."
    is_planned = is_live = True
    in_trace = "step"
    if_possible = (
        "passes are not captured as CUDA graphs: that is for packed ones in bfloat16 without checkpointing, and "
        "where gradients that stay in memory fit"
    )
    is_measured = False
    asked = (given("graphs", "captures_graphs", "Whether packed passes are captured as CUDA graphs and replayed."),)
    must_match_on_resume = False
    techniques = (
        Technique(
            values=("True",),
            kind="free",
            does="passes are recorded once and replayed: the host waits less; takes more memory",
            costs="none: sums in another order, since passes are filled up to a few sizes",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not w.trains or not w.is_packed:
            yield "graphs are of packed training passes, which can be filled up to a few sizes: take attention packed"
        if w.num_gpus > 1:
            yield "graphs are for one GPU yet"
        if w.is_quantized:
            yield f"graphs and quantize {w.quantize} do not go together yet"
        if w.offloads:
            yield f"graphs and offload {w.offload} do not go together: copies take turns"
        if w.is_checkpointed:
            yield (
                "graphs and checkpointing do not go together: layers that are computed again look at random generators"
            )
        if not w.leaves_labels_out:
            what = f"problem {w.problem}" if find_task(w.task).can_record else w.task
            yield f"graphs are not for {what}: its loss does not leave out what a pass was filled up with"
        if w.precision not in PRECISIONS:
            yield f"graphs are for precision {' or '.join(PRECISIONS)}, not {w.precision}"
        if not w.steps_in_place:
            yield (
                f"graphs hold a pass's memory for good, and optimizer {w.optimizer} needs more: "
                f"take {' or '.join(IN_PLACE)}"
            )
