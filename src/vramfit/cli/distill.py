"""`vramfit distill`: a smaller model that learns from the answers of a trained one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from vramfit.cli.first_look import look_at_data, look_at_gpu, look_at_model
from vramfit.cli.options import Json, WorkloadOptions, argument, opt, verb
from vramfit.cli.terminal import only_rank_zero_prints
from vramfit.cli.train import DEFAULTS, PANELS, run_and_show
from vramfit.runtime.training.request import OPTIONS, TrainRequest

Teacher = Annotated[str, argument("A trained model: a folder that vramfit train or transformers saved.", "TEACHER")]
MADE = ("model", "teacher")
"""Options of a run that are not given: the student is made, or has an option of its own."""


@dataclass(frozen=True, kw_only=True)
class StudentOptions:
    """What the student is."""

    student: str | None = opt(None, "Student, with the teacher's tokenizer. Default: some of its layers.", "MODEL")
    keep_layers: str | None = opt(
        None,
        "Layers of the teacher that the student keeps: a number, evenly spaced, or a list such as 0,2,5. Default: "
        "half.",
        "N",
    )

    hidden_size: int | None = opt(
        None,
        "Hidden size of a student that is made: the teacher's dimensions, heads and neurons that matter most. "
        "Default: the teacher's.",
        "N",
        min=1,
    )

    @property
    def layers(self) -> int | tuple[int, ...] | None:
        """As `distill` takes them."""
        if self.keep_layers is None:
            return None
        parts = [part.strip() for part in self.keep_layers.split(",")]
        if not all(part.isascii() and part.isdigit() and len(part) <= 6 for part in parts):
            raise typer.BadParameter(f"--keep-layers {self.keep_layers[:60]!r} is neither a number nor a list (0,2,5)")
        return int(parts[0]) if len(parts) == 1 else tuple(map(int, parts))


@verb(
    "vramfit distill my-model reviews.csv --keep-layers 3 --eval-data dev.csv --output my-small-model",
    settings=OPTIONS,
    without=MADE,
    positional="data",
    required=("output",),
    lists=(),
    plans=True,
    panels=PANELS,
    defaults=DEFAULTS | {"task": "the teacher's", "distill": "logits"},
)
def distill(teacher: Teacher, options: WorkloadOptions, own: StudentOptions, json: Json = False) -> None:
    """Train a smaller model on the answers of a trained one, and save a folder that transformers loads.

    The teacher answers every sample once, and its answers are stored on disk; or it stays in memory next to the
    student, where that is faster.
    Everything else is as in vramfit train: data is checked first, the run is planned, Ctrl-C leaves a checkpoint.
    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when it does not fit, 130 when interrupted.
    """
    given = {name: OPTIONS[name].value.parse(v) if isinstance(v, str) else v for name, v in options.given.items()}
    if given.get("max_grad_norm") == 0:
        given["max_grad_norm"] = None
    made: dict[str, Any] = {"keep_layers": own.layers, "hidden_size": own.hidden_size}
    with only_rank_zero_prints():
        _look(teacher, own.student, given)

        def start(on_event: Any) -> Any:
            from vramfit.smaller.distillation import distill

            return distill(teacher, student=own.student, **made, on_event=on_event, **given)

        run_and_show(start, resumes=bool(given.get("resume")), json=json)


def _look(teacher: str, student: str | None, given: dict[str, Any]) -> None:
    """Say what is wrong with names, options, files and labels before torch is imported, where that can be seen."""
    from vramfit.models.resolve import saved_head

    look_at_gpu(given.get("gpu"))
    for model in filter(None, (teacher, student)):
        look_at_model(model)
    head = saved_head(Path(teacher).expanduser())
    if head is None or given.get("task", head.task) != head.task:
        return
    request = TrainRequest(model=student or teacher, teacher=teacher, **{**given, "task": head.task})
    for path in filter(None, (request.data, request.eval_data)):
        source = replace(request.source(path), of_model=True, problem=request.problem or head.problem)
        look_at_data(source, head.label_names or None)
