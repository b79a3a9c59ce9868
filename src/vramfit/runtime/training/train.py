"""`train`: from a file of samples to a saved model, inside a budget."""

import platform
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from vramfit.errors import CheckpointError, VramfitError, WorkloadError
from vramfit.loader.budget import free_bytes
from vramfit.planner.request import REHEARSAL
from vramfit.records.codec import from_json, replace_file, to_json
from vramfit.records.plan import Plan, Reason
from vramfit.records.run import RECORD, RunRecord
from vramfit.runtime.device import RunDevice
from vramfit.runtime.distributed.processes import Processes, company, own_device
from vramfit.runtime.trained import TrainedModel
from vramfit.runtime.training import events
from vramfit.runtime.training.answering import plan_answers
from vramfit.runtime.training.checkpoints import CHECKPOINTS, PLAN, Checkpoint, CheckpointStore, held
from vramfit.runtime.training.events import stop_request
from vramfit.runtime.training.loop import Loop
from vramfit.runtime.training.outcome import make_record
from vramfit.runtime.training.preparation import Run, adapted_plan, chosen_workload, make_plan, saved_plan
from vramfit.runtime.training.reading import Data, read_data
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.saving import source_fingerprint
from vramfit.runtime.training.session import Session
from vramfit.runtime.training.state import seed_everything
from vramfit.runtime.training.teacher import attach_answers, check_student, fingerprint, open_teacher
from vramfit.tasks import find_task
from vramfit.units import counted


def train(request: TrainRequest, *, on_event: events.OnEvent = lambda event: None) -> RunRecord:
    """Fine-tune a model, and save it as a normal `transformers` folder.

    Data is read and checked first, then the run is planned for its real lengths, then the model is loaded; the largest
    batch there can be is tried before the first one is learned from. With `resume`, the run goes on from its newest
    whole checkpoint, to the same weights bit for bit as if it had never stopped (on one kind of machine).

    One process at a time writes into the output; a second one is refused.

    Started by torchrun as several processes, they share every batch; rank 0 plans, reads and writes checkpoints, and
    speaks. A run may go on with another number of them.

    Args:
        request: what to do.
        on_event: sees what happens; that of rank 0 only.

    Raises:
        WorkloadError, UnknownModel, VramfitError: the request, the model or the data, before any GPU time.
        NoPlanFits: nothing that is allowed fits the budget.
        Interrupted: Ctrl-C or SIGTERM; a checkpoint is written, unless it came before the first step.
        Diverged: losses or weights are no numbers any more.
        RecoveryExhausted: not even one sample of full length fits.
        RankFailed: another process of the run has stopped.
    """
    with company(request.device) as processes, ExitStack() as stack:
        processes.first(lambda: stack.enter_context(held(Path(request.output))))
        return _train(request, processes, on_event if processes.leads else lambda event: None)


def _train(request: TrainRequest, processes: Processes, on_event: events.OnEvent) -> RunRecord:
    output = Path(request.output)
    store = CheckpointStore(output / CHECKPOINTS, keep=request.keep)
    with stop_request(resumes=request.resume) as stop:
        checkpoint = processes.first(lambda: _begin(request, output, store, on_event))
        plan = _first_plan(processes, lambda: saved_plan(request, on_event))
        teacher = None if request.teacher is None else open_teacher(request)
        data = read_data(request, plan, teacher)
        if teacher is not None:
            data = check_student(request, teacher, data)
        _say_what_was_read(data, on_event)
        if request.batch is not None and request.batch > data.train.num_samples:
            num_samples = f"all {data.train.num_samples:,} samples"
            text = f"A batch of {request.batch:,} is more than there is: each step sees {num_samples}."
            on_event(events.Note(text=text))
        if checkpoint is not None:
            processes.first(lambda: _check_same(request, data, teacher, checkpoint))
            finished = processes.first(lambda: _finished(output))
            if finished is not None:
                on_event(events.Note(text=f"The run in {output} is finished: nothing is left to do."))
                return finished
        run_device = _find_device(request, plan, on_event)
        _check_own_device(run_device, processes)
        run_device.least_free_bytes = _least_free_bytes(run_device, processes)
        run = Run(
            request=request,
            data=data,
            run_device=run_device,
            processes=processes,
            store=store,
            on_event=on_event,
            teacher=teacher,
            holds_teacher=plan is not None and plan.workload.holds_teacher,
        )
        run.plan = plan and adapted_plan(plan, run_device, run_device.gpu, on_event)
        run.plan = run.plan or _first_plan(processes, lambda: _plan(run, checkpoint))
        run.workload = chosen_workload(request, data, run.plan, processes.size, holds_teacher=run.holds_teacher)
        stop.check()
        answers = None
        if teacher is not None and not run.holds_teacher:
            answers = attach_answers(run, teacher, stop.check)
        seed_everything(request.seed)
        stop.check()
        session = Session(run)
        loop = Loop(session, stop)
        session.rehearse(checkpoint)
        if checkpoint is not None:
            loop.restore(checkpoint)
        else:
            seed_everything(request.seed + processes.rank)  # ranks draw differently
        loop.progress.compile_s += session.compile_s
        stop.begin_training()
        session.start(loop)
        try:
            status = loop.run()
        finally:
            session.end()
    session.save(loop, output)
    record = make_record(session, loop, status)
    processes.first(lambda: replace_file(output / RECORD, (to_json(record) + "\n").encode()))
    if answers is not None:
        processes.first(answers.remove)
    on_event(events.Saved(folder=output, step=loop.progress.step, final=True))
    return record


def _find_device(request: TrainRequest, plan: Plan | None, on_event: events.OnEvent) -> RunDevice:
    memory = request.memory if plan is None or request.memory is not None else plan.budget_bytes
    run_device = RunDevice(own_device(request.device), memory=memory, fail_at=request.fail_at)
    if not run_device.has_budget and (request.memory or request.gpu):
        text = "There is no GPU here: memory and gpu mean nothing on the CPU (device emulated holds to a memory)."
        on_event(events.Note(text=text, warns=True))
    elif request.device is None and run_device.name == "cpu":
        on_event(events.Note(text="There is no GPU here: this trains on the CPU.", warns=True))
    return run_device


def _least_free_bytes(run_device: RunDevice, processes: Processes) -> int | None:
    """What is free on the GPU that has least of all processes; None without GPUs."""
    found = processes.gather(free_bytes(run_device.device))
    return min((n for n in found if n is not None), default=None)


def _first_plan(processes: Processes, make: Callable[[], Plan | None]) -> Plan | None:
    """The plan that rank 0 makes or reads, for all."""
    if processes.size == 1:
        return make()

    def text() -> str | None:
        plan = make()
        return None if plan is None else to_json(plan)

    found = processes.first(text)
    return None if found is None else from_json(Plan, found)


def _finished(output: Path) -> RunRecord | None:
    """The record of a run that has come to its end."""
    if not (output / RECORD).exists():
        return None
    return from_json(RunRecord, (output / RECORD).read_text(encoding="utf-8"))


def _check_own_device(run_device: RunDevice, processes: Processes) -> None:
    """Several processes need a GPU each, or none."""
    if processes.size > 1 and run_device.device.type == "cuda":
        taken = processes.gather((platform.node(), run_device.name))
        if len(set(taken)) < len(taken):
            raise WorkloadError(
                [f"{processes.size} processes were started, and two of them have the same GPU: {sorted(taken)}"],
                hint="start as many as there are GPUs: torchrun --nproc-per-node gpu",
            )


def holds_run(output: Path) -> bool:
    """Whether a folder has a run in it, finished or not."""
    return (output / RECORD).exists() or bool(CheckpointStore(output / CHECKPOINTS).steps())


def check_output(output: Path, *, resume: bool) -> bool:
    """Refuse a folder that a run would overwrite; says whether it holds a run.

    Raises:
        VramfitError: it holds a run that is not to be resumed, or a model.
    """
    used = holds_run(output)
    if used and not resume:
        raise VramfitError(
            f"{output} holds a run already",
            hint="go on with it: the same command with --resume (resume=True); or choose another --output",
        )
    if not used and _holds_model(output):
        raise VramfitError(
            f"{output} holds a model already, which this run would overwrite", hint="choose another --output"
        )
    return used


def _begin(request: TrainRequest, output: Path, store: CheckpointStore, on_event: events.OnEvent) -> Checkpoint | None:
    """The checkpoint to go on from; None to start at the beginning.

    Raises:
        CheckpointError: there is a run, and none of its checkpoints is whole: what it learned is not thrown away.
    """
    used = check_output(output, resume=request.resume)
    store.clean()
    checkpoint = store.newest()
    if request.resume and not used:
        on_event(events.Note(text=f"There is no run in {output} to go on with: starting at the beginning."))
    if used and checkpoint is None:
        why = f": damaged or incomplete: {', '.join(store.damaged)}" if store.damaged else ""
        raise CheckpointError(
            f"{output} holds a run and no whole checkpoint to go on from{why}",
            file=str(store.folder),
            hint="put a whole checkpoint back from a copy; or start anew: another --output, without --resume",
        )
    for name in store.damaged:
        assert checkpoint is not None
        text = f"Checkpoint {name} is damaged or incomplete: going on from step {checkpoint.step:,}."
        on_event(events.Note(text=text, warns=True))
    return checkpoint


def _holds_model(folder: Path) -> bool:
    """Whether a folder has a model in it, be it the one to start from."""
    return folder.is_dir() and any(
        path.name == "config.json" or path.suffix in (".safetensors", ".bin") for path in folder.iterdir()
    )


def _check_same(request: TrainRequest, data: Data, teacher: TrainedModel | None, checkpoint: Checkpoint) -> None:
    """Refuse to go on with something else."""
    saved = checkpoint.state()
    different = request.differences(saved["request"])
    if saved["data"] != data.train.fingerprint:
        different.append(f"the training data {request.data} has changed, or is read otherwise")
    if data.evaluation is not None and saved["eval_data"] not in (None, data.evaluation.fingerprint):
        different.append(f"the evaluation data {request.eval_data} has changed, or is read otherwise")
    if (saved["eval_data"] is None) != (data.evaluation is None):
        different.append("evaluation data is given in one of the two runs only")
    if saved["source"] != source_fingerprint(data.resolved):
        different.append(f"the weights in {request.model} are not those the run began with")
    if teacher is not None and saved.get("held_teacher") not in (None, fingerprint(teacher)):
        different.append(f"the weights of the teacher {request.teacher} are not those the run began with")
    if different:
        raise VramfitError(
            f"cannot resume the run in {request.output}: {'; '.join(different)}",
            hint="give the same data and settings, or start anew with another --output",
        )


def _plan(run: Run, checkpoint: Checkpoint | None) -> Plan | None:
    """The plan of the run that is resumed, where it is for the same device; else a new one."""
    request, run_device, on_event, num_gpus = run.request, run.run_device, run.on_event, run.processes.size
    output, former = Path(request.output), None
    if checkpoint is not None:
        run.holds_teacher = checkpoint.state().get("held_teacher") is not None
    if checkpoint is not None and (output / PLAN).exists():
        found = Plan.load(output / PLAN)
        saved = checkpoint.state()["request"]
        same = all(getattr(request, name) == saved[name] for name in ("memory", "gpu", "device", "micro_batch"))
        if same and found.workload.num_gpus == num_gpus:
            return found
        former = found.workload
    if run_device.has_budget:
        on_event(events.Note(text="Planning for the lengths of the data …"))

    def make(holds_teacher: bool) -> Plan | None:
        return make_plan(request, run.data, run_device, former, num_gpus, holds_teacher=holds_teacher)

    if checkpoint is None and run.teacher is not None:
        plan = plan_answers(run, run.teacher, make)
    else:
        plan = make(run.holds_teacher)
    if plan is not None:
        plan.save(output / PLAN)
        if run_device.emulated is not None:
            on_event(events.Note(text=f"{REHEARSAL[0].upper()}{REHEARSAL[1:]}."))
        fewer = [reason.setting for reason in plan.reasons if reason.kind == "numeric" and not _asked(request, reason)]
        if fewer:
            on_event(events.Note(text=f"Planned with fewer bits: {', '.join(fewer)}. With --exact, without."))
    return plan


def _asked(request: TrainRequest, reason: Reason) -> bool:
    """Whether a setting is what the request says."""
    return getattr(request, reason.setting.split()[0], None) is not None


def _say_what_was_read(data: Data, on_event: events.OnEvent) -> None:
    for name, samples in (("training", data.train), ("evaluation", data.evaluation)):
        if samples is None:
            continue
        for note in samples.notes:
            on_event(events.Note(text=f"{name.capitalize()} data: {note}.", warns=True))
        if samples.bad_rows:
            first = samples.bad_rows[0]
            are = "is" if len(samples.bad_rows) == 1 else "are"
            rows = counted(len(samples.bad_rows), "row")
            text = f"{rows} of the {name} data {are} left out; the first is row {first.row}: "
            on_event(events.Note(text=text + first.what, warns=True))
        if samples.num_truncated:
            how = find_task(samples.task).long_texts
            are = "is" if samples.num_truncated == 1 else "are"
            rows = counted(samples.num_truncated, "row")
            text = f"{rows} of the {name} data {are} longer than {max(samples.lengths):,} tokens and {how}; "
            on_event(events.Note(text=f"{text}the longest has {samples.longest_before_truncation:,}."))
