"""`distill`: a student made of a teacher, or given, that learns from the teacher's answers."""

import json
import os
import shutil
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
from vramfit.runtime.training.train import check_output, holds_run, train
from vramfit.smaller.rows import Rows
from vramfit.smaller.students import chosen_layers, make_student
from vramfit.smaller.widths import check_width
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
    hidden_size: int | None = None,
    on_event: events.OnEvent = lambda event: None,
    **options: Any,
) -> RunRecord:
    """Train a smaller model on the answers of a trained one, and save it as a normal `transformers` folder.

    The teacher answers all training samples once, and its answers are kept on disk; or it stays in memory next to the
    student (`teacher_answers`). The student trains inside the budget as `train` does, with all that belongs to it: a
    plan, recovery from out of memory, checkpoints, resume.

    Args:
        teacher: a folder that `train` or transformers saved, with its head.
        data: with labels, as for `train`.
        student: a model with the teacher's tokenizer; None makes one of the teacher's layers.
        keep_layers: how many of the teacher's layers a student is made of, or which, by number from 0; half of them
            where nothing says what the student is.
        hidden_size: of a student that is made: the dimensions, heads and neurons that matter most on the first rows of
            the data. All layers are kept where `keep_layers` does not say.
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
    made = {"keep_layers": keep_layers, "hidden_size": hidden_size}
    twice = [name for name, value in made.items() if student is not None and value is not None]
    if twice:
        raise WorkloadError([f"student and {twice[0]} both say what the student is: give one"])
    given = {"teacher": teacher, "data": data, "output": ""} | options | {"task": opened.task}
    request = TrainRequest(model=student or teacher, **given)  # wrong options are refused before anything is made
    if student is None:
        student = _made(opened, request, keep_layers, hidden_size, on_event)
        request = TrainRequest(model=student, **given)
    return train(request, on_event=on_event)


def _made(
    teacher: TrainedModel,
    request: TrainRequest,
    kept: int | Sequence[int] | None,
    hidden_size: int | None,
    on_event: events.OnEvent,
) -> str:
    """The folder of a student that is made, or was made before."""
    folder = Path(request.output) / STUDENT
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise WorkloadError(
            ["a student is made by one process, and several were started"],
            hint="make it first with one process and --max-steps 1, then give it with --student",
        )
    teacher.check_head()
    config = resolve(teacher.model, task=teacher.task, trust_remote_code=teacher.trust_remote_code).config
    num_layers = int(config.num_hidden_layers)
    layers = tuple(range(num_layers)) if kept is None and hidden_size else chosen_layers(kept, num_layers)
    narrower = _checked_width(teacher, config, hidden_size)
    made_from = {"teacher": fingerprint(teacher), "layers": layers} | ({"hidden_size": narrower} if narrower else {})
    origin = json.dumps(made_from).encode()
    is_made, is_ours = (folder / "config.json").exists(), (folder / ORIGIN).exists()
    is_same = is_ours and (folder / ORIGIN).read_bytes() == origin
    if is_made and not is_same and (not is_ours or holds_run(folder.parent)):
        raise VramfitError(
            f"{folder} holds another student: made with other layers or another hidden size, or of another teacher",
            hint="choose another --output, or give this one with --student",
        )
    check_output(folder.parent, resume=request.resume)
    if is_made and is_same:
        return str(folder)
    if is_made:
        shutil.rmtree(folder)  # it was made for a run that never began
    tell("making the student")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / ORIGIN, origin)
    rows = Rows(files=(request.data,), task=teacher.task, text_columns=request.text_columns, max_rows=request.max_rows)
    make_student(teacher, folder, layers, hidden_size=narrower, rows=rows)  # the configuration is written last
    named = ", ".join(map(str, layers))
    text = f"The student has {len(layers)} of the teacher's {counted(num_layers, 'layer')}, counted from 0: {named}."
    if narrower is not None:
        text += f" Its hidden size is {narrower:,} of {config.hidden_size:,}."
    on_event(events.Note(text=text))
    return str(folder)


def _checked_width(teacher: TrainedModel, config: Any, hidden_size: int | None) -> int | None:
    """The hidden size of a student; None where it is the teacher's."""
    if hidden_size in (None, config.hidden_size):
        return None
    check_width(config, hidden_size)
    if teacher.kind.gives_vectors:
        raise WorkloadError(
            [
                f"vectors of the student would have {hidden_size:,} numbers, and those of the teacher "
                f"{config.hidden_size:,}: they cannot be compared"
            ],
            hint="keep fewer layers: --keep-layers N",
        )
    return hidden_size
