"""A teacher beside a run: whether the student can learn from it, and its answers to the training data."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import VramfitError, WorkloadError
from vramfit.models.resolve import ResolvedModel, resolve
from vramfit.models.sentence_folder import own_files
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.device import RunDevice
from vramfit.runtime.inference import Inference
from vramfit.runtime.trained import TrainedModel, open_model, tasks_of
from vramfit.runtime.training import events
from vramfit.runtime.training.answers import FOLDER, AnswerKind, AnswerManifest, Answers
from vramfit.runtime.training.preparation import Run
from vramfit.runtime.training.reading import Data
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.saving import digest
from vramfit.stages import tell
from vramfit.tasks.parts.losses import HIDDEN, target_name
from vramfit.tasks.parts.reading import some_of
from vramfit.techniques.teachers import give_hidden
from vramfit.units import counted, format_bytes

PART_BYTES = 64 * 2**20
"""Answers that are kept in memory before they are written."""
MAX_PART = 4096
"""Samples of a part at most: what is computed again after a run was ended."""
PROBE = "Élan vital, 3.14% of NAÏVE people's e-mail – “quoted” tokens; 東京?"
"""A text that tokenizers split differently: accents, case, digits, marks and other scripts."""
GENERIC = "LABEL_"
"""How transformers names classes that nobody named."""


def open_teacher(request: TrainRequest) -> TrainedModel:
    """The teacher of a run; its weights are not loaded.

    Raises:
        UnknownModel, CheckpointError, WorkloadError: no such model, or one without a head for the task.
    """
    teacher = open_model(
        request.teacher, task=request.task, seq=request.seq, trust_remote_code=request.trust_remote_code
    )
    teacher.check_head()
    return teacher


def check_student(request: TrainRequest, teacher: TrainedModel, data: Data) -> Data:
    """Refuse a student that the teacher's answers mean nothing to; gives the data, which knows the teacher's width.

    Raises:
        WorkloadError: another tokenizer, other labels, or vectors or layers of another size; every problem at once.
    """
    config, of_teacher = data.resolved.config, config_of(teacher)
    problems = [*_other_tokenizer(teacher, data.tokenizer), *_other_labels(teacher, data.resolved)]
    if teacher.kind.gives_vectors and config.hidden_size != of_teacher.hidden_size:
        problems.append(
            f"vectors of the student have {config.hidden_size} numbers, and those of the teacher "
            f"{of_teacher.hidden_size}: they cannot be compared"
        )
    if request.reads_hidden and config.num_hidden_layers > of_teacher.num_hidden_layers:
        problems.append(
            f"distill hidden: the student has {config.num_hidden_layers} layers, and the teacher only "
            f"{of_teacher.num_hidden_layers}"
        )
    if problems:
        raise WorkloadError(
            [f"{request.model} cannot learn from {teacher.model}: {problem}" for problem in problems],
            hint="make a student of the teacher itself: vramfit distill TEACHER DATA --keep-layers N",
        )
    is_projected = request.reads_hidden and config.hidden_size != of_teacher.hidden_size
    return replace(data, teacher_width=int(of_teacher.hidden_size)) if is_projected else data


def config_of(teacher: TrainedModel) -> Any:
    """The configuration of a teacher."""
    return resolve(teacher.model, task=teacher.task, trust_remote_code=teacher.trust_remote_code).config


def _other_tokenizer(teacher: TrainedModel, tokenizer: Any) -> Iterator[str]:
    own, other = tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if own != other:
        differ = len(own.items() ^ other.items())
        yield (
            f"their tokenizers differ ({len(own):,} tokens and {len(other):,}, {differ:,} of them not the same), so "
            "that the teacher would read other texts"
        )
    elif tokenizer(PROBE)["input_ids"] != teacher.tokenizer(PROBE)["input_ids"]:
        yield "their tokenizers have the same tokens, and split texts differently (case, accents or special tokens)"


def _other_labels(teacher: TrainedModel, student: ResolvedModel) -> Iterator[str]:
    """A student that has a head of its own must have the teacher's."""
    if not teacher.label_names or student.folder is None:
        return
    config = student.config
    named = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    is_trained = teacher.kind.name in tasks_of(config) and not named[0].startswith(GENERIC)
    if is_trained and named != teacher.label_names:
        yield f"its labels are {some_of(named)}, and the teacher's {some_of(teacher.label_names)}"


def attach_answers(run: Run, teacher: TrainedModel, check: Callable[[], None]) -> Answers:
    """Have the teacher answer all training samples that it has not, and give batches its answers.

    Args:
        check: raises where the run is to stop.

    Raises:
        VramfitError: answers of another run are in the way, or the disk has no room for them.
        NoPlanFits, RecoveryExhausted: the teacher does not fit into the memory of the run.
    """
    samples, folder = run.data.train, Path(run.request.output) / FOLDER
    source = {"teacher": fingerprint(teacher), "data": samples.fingerprint}
    manifest = AnswerManifest(source=source, kinds=kinds_of(run.request, teacher, run.data))
    run.processes.first(lambda: _ask(run, teacher, Answers(folder, manifest, samples.lengths), check))
    answers = Answers(folder, manifest, samples.lengths)
    if not answers.is_whole:
        raise VramfitError(
            f"{folder} does not hold the teacher's answers that the first process wrote there",
            hint="give an --output on a disk that all machines of the run share",
        )
    samples.targets = answers
    return answers


def _ask(run: Run, teacher: TrainedModel, answers: Answers, check: Callable[[], None]) -> None:
    """Have all samples answered that are not."""
    samples = run.data.train
    if answers.is_whole:
        return
    on_disk, num_samples = format_bytes(answers.num_bytes), counted(len(samples), "sample")
    text = f"The teacher answers {num_samples} first. Its answers are kept on the disk ({on_disk}), and the student "
    run.on_event(events.Note(text=f"{text}learns without it in memory."))
    memory = run.request.memory if run.plan is None else run.plan.budget_bytes
    device = RunDevice(run.run_device.name, memory=memory)
    given: dict[str, Any] = {"memory": memory} if device.has_budget and memory is not None else {}
    inference = teacher.load(device, samples, **teacher.suited(device, **given))
    if run.request.reads_hidden:
        give_hidden(inference.model, run.data.resolved.config.num_hidden_layers)
    reader = _Reader(inference, answers.manifest.kinds)
    size = max(min(PART_BYTES * len(samples) // max(answers.num_bytes, 1), MAX_PART), 1)
    for begin in range(answers.manifest.num_done, len(samples), size):
        check()
        tell(f"asking the teacher, {begin:,} of {len(samples):,} samples done")
        answers.add(reader.read(samples, range(begin, min(begin + size, len(samples)))))
    del inference, reader
    gc.collect()
    if device.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device.device)


def fingerprint(teacher: TrainedModel) -> str:
    """What a teacher is known by: its name, or the content of its weights where it is a folder."""
    folder = Path(teacher.model).expanduser()
    files = own_files(folder, ".safetensors") or own_files(folder, ".bin")
    return " ".join(digest(path) for path in files) or teacher.model


def kinds_of(request: TrainRequest, teacher: TrainedModel, data: Data) -> tuple[AnswerKind, ...]:
    """What of a teacher's answers is kept."""
    kind, config = teacher.kind, config_of(teacher)
    width = config.hidden_size if kind.gives_vectors else len(teacher.label_names) or 1
    found = [
        AnswerKind(name=target_name(name), width=width, by_token=kind.answers_tokens, is_flat=kind.reads_windows)
        for name in kind.answers
    ]
    if request.reads_hidden:
        num_layers = data.resolved.config.num_hidden_layers
        found.append(AnswerKind(name=HIDDEN, width=num_layers * config.hidden_size, by_token=True, number="float16"))
    return tuple(found)


class _Reader:
    """Reads a teacher's answers off what it gives."""

    def __init__(self, inference: Inference, kinds: tuple[AnswerKind, ...]) -> None:
        self._inference, self._kinds = inference, kinds

    def read(self, samples: Samples, rows: range) -> dict[str, list[Any]]:
        """For each kind an array for each of some samples, in their order."""
        found: dict[str, dict[int, Any]] = {kind.name: {} for kind in self._kinds}

        def take(output: Any, batch: Any, numbers: list[int]) -> None:
            for kind in self._kinds:
                values = output[kind.name.removeprefix(target_name(""))].float().cpu().numpy()
                for value, number in zip(values, numbers, strict=True):
                    found[kind.name][number] = value[: samples.lengths[number]] if kind.by_token else value

        self._inference.run(samples, take, rows=rows)
        return {name: [values[number] for number in rows] for name, values in found.items()}
