"""`distill`: a student made of a teacher, or given, that learns from the teacher's answers."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vramfit.errors import VramfitError, WorkloadError
from vramfit.models.resolve import resolve
from vramfit.records.codec import replace_file
from vramfit.records.run import RunRecord
from vramfit.runtime.trained import TrainedModel, open_model
from vramfit.runtime.training import events
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.teacher import fingerprint
from vramfit.runtime.training.train import train
from vramfit.smaller.students import chosen_layers, make_student
from vramfit.stages import tell
from vramfit.tasks import all_tasks
from vramfit.units import counted

STUDENT = "student"
"""The folder, in that of the run, of a student that was made of its teacher."""
ORIGIN = "made_from.json"
"""What a student was made of."""


def distill(
    teacher: str,
    data: str,
    *,
    student: str | None = None,
    keep_layers: int | Sequence[int] | None = None,
    on_event: events.OnEvent = lambda event: None,
    **options: Any,
) -> RunRecord:
    """Train a smaller model on the answers of a trained one, and save it as a normal `transformers` folder.

    The teacher answers all training samples once; its answers are kept on the disk, and the student trains inside the
    budget as `train` does, with all that belongs to it: a plan, recovery from out of memory, checkpoints, resume.

    Args:
        teacher: a folder that `train` or transformers saved, with its head.
        data: with labels, as for `train`.
        student: a model with the teacher's tokenizer; None makes one of the teacher's layers.
        keep_layers: how many of the teacher's layers a student is made of, or which, by number from 0; half of them
            where neither is given.
        on_event: sees what happens.
        options: of `TrainRequest`: `output`, the folder to save in, which is needed; `distill`, `distill_temperature`,
            `distill_alpha`, `epochs`, `memory`, `resume` …

    Raises:
        WorkloadError: a student that cannot match its teacher, with every reason; or options that contradict.
        UnknownModel, CheckpointError, DataError: as `train` raises them.
    """
    opened = open_model(
        teacher, task=options.get("task"), trust_remote_code=bool(options.get("trust_remote_code", False))
    )
    if not opened.kind.answers:
        able = ", ".join(task.name for task in all_tasks() if task.answers)
        raise WorkloadError([f"{teacher} has task {opened.task}, which cannot be distilled; tasks that can: {able}"])
    if student is not None and keep_layers is not None:
        raise WorkloadError(["student and keep_layers both say what the student is: give one"])
    given = {"teacher": teacher, "data": data, "output": ""} | options | {"task": opened.task}
    request = TrainRequest(model=student or teacher, **given)  # wrong options are refused before anything is made
    if student is None:
        student = _made(opened, Path(request.output), keep_layers, on_event)
        request = TrainRequest(model=student, **given)
    return train(request, on_event=on_event)


def _made(teacher: TrainedModel, output: Path, kept: int | Sequence[int] | None, on_event: events.OnEvent) -> str:
    """The folder of a student that is made, or was made before."""
    folder = output / STUDENT
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise WorkloadError(
            ["a student is made by one process, and several were started"],
            hint="make it first with one process and --max-steps 1, then give it with --student",
        )
    teacher.check_head()
    config = resolve(teacher.model, task=teacher.task, trust_remote_code=teacher.trust_remote_code).config
    num_layers = int(config.num_hidden_layers)
    layers = chosen_layers(kept, num_layers)
    origin = json.dumps({"teacher": fingerprint(teacher), "layers": layers}).encode()
    if (folder / "config.json").exists():
        if not (folder / ORIGIN).exists() or (folder / ORIGIN).read_bytes() != origin:
            raise VramfitError(
                f"{folder} holds another student: made with other layers, or of another teacher",
                hint="choose another --output, or give this one with --student",
            )
        return str(folder)
    tell("making the student")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / ORIGIN, origin)
    make_student(teacher, folder, layers)  # the configuration, which makes it a model, is written last
    named = ", ".join(map(str, layers))
    text = f"The student has {len(layers)} of the teacher's {counted(num_layers, 'layer')}, counted from 0: {named}."
    on_event(events.Note(text=text))
    return str(folder)
