"""A plan for the terminal: the answer, every setting with its reason, what else was possible, how to run it; and what
is missing where no plan fits."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from vramfit.errors import NoPlanFits
from vramfit.records.codec import to_data
from vramfit.records.plan import Alternative, InstanceFit, Plan
from vramfit.report.charts import Meter, Point, Scatter, for_width, grid, indented, marked, table
from vramfit.report.estimate import BASIS, Sized
from vramfit.report.words import KIND_WORDS, NO_BREAK, duration, job, model_name, percent, sentence, size, target
from vramfit.settings import PLANNED, SETTINGS
from vramfit.settings.setting import Kind
from vramfit.tasks import DEFAULT, find_task
from vramfit.workload import Workload

MAX_ALTERNATIVES = 6
MANY_A_SECOND = 1000
COMMAND_WIDTH = 72
INSTANCES_WIDTH = 100
MEANING = {
    "bf16": "weights, gradients and state in bfloat16",
    "freeze": "part of the model does not learn",
    "lora": "only adapters and the head learn",
    "int8": "frozen weights in 8 bits",
    "nf4": "frozen weights in 4 bits",
    "adafactor": "another optimizer",
    "sgd": "another optimizer, without moments",
}
KIND_STYLES: dict[Kind, str] = {"free": "green", "numeric": "yellow", "different training": "red"}


def render_plan(plan: Plan, *, saved_as: str | None = None) -> RenderableType:
    """Everything about one plan.

    Args:
        saved_as: the file it was saved to.
    """
    parts: list[RenderableType] = [*_headline(plan), Text(), *_answer(plan), Text(), _settings(plan), Text()]
    parts += [*_others(plan), *_next(plan, saved_as or "plan.json", is_saved=saved_as is not None), Text()]
    return Sized([*parts, *_remarks(plan)])


def _headline(plan: Plan) -> Iterator[RenderableType]:
    w = plan.workload
    yield Text.assemble((model_name(w.model), "bold"), f" · {w.task} · training plan")
    gpus = [f"{w.num_gpus:,} GPUs" + (f" in {w.num_nodes:,} machines" if w.num_nodes > 1 else "")]
    budget = f"budget {size(plan.budget_bytes)}" + (" each" if w.num_gpus > 1 else "")
    asked = [f"batch {w.batch:,} × {w.seq:,} tokens", *(gpus if w.num_gpus > 1 else []), target(plan.estimate), budget]
    yield Text(" · ".join(asked), style="dim")


def _answer(plan: Plan) -> Iterator[RenderableType]:
    seconds = plan.step_time_s
    yield Text(f"✓ {split_words(plan)}; about {duration(seconds)} a step.", style="bold green")
    rows = grid("left", "right", "right", "bar")
    for name, e in (("training", plan.estimate), (f"evaluation, batch {plan.evaluation_batch}", plan.evaluation)):
        used = e.safe_reserved_bytes
        bar = Meter(value=used, limit=plan.budget_bytes, scale=max(plan.budget_bytes, used))
        rows.add_row(Text(f"  {name}"), Text(size(used), "bold"), percent(used, plan.budget_bytes), bar)
    yield rows
    if plan.estimate.host_bytes:
        yield Text(f"  {size(plan.estimate.host_bytes)} of host memory hold what waits for its turn.")
    held = f"At most {size(plan.most_reserved_bytes)} with any lengths: vramfit train holds PyTorch to it."
    yield indented(f"{held}\n{plan.margin_reason}.")
    lengths = plan.lengths
    if lengths is not None:
        cut = f", {lengths.num_truncated:,} cut" if lengths.num_truncated else ""
        yield indented(
            f"Timed on {lengths.num_samples:,} lengths ({lengths.source}): mean {lengths.mean:.0f}, median "
            f"{lengths.median}, longest {lengths.longest}{cut}; at full length a step takes "
            f"{duration(plan.estimate.step_time_s or plan.step_time_s)}."
        )


def split_words(plan: Plan) -> str:
    """How the batch goes through, and how fast."""
    w = plan.workload
    per_s = w.batch / plan.step_time_s
    rate = f"{per_s:,.0f} samples/s" if per_s >= MANY_A_SECOND else f"{per_s:.3g} samples/s"
    if plan.workload.is_packed and plan.lengths is not None:
        return f"Fits: passes of up to {plan.micro_batch * w.sample_tokens:,} tokens without padding, {rate}"
    if w.num_gpus > 1:
        passes = (
            "at once"
            if plan.workload.num_passes == 1
            else f"in passes of {plan.micro_batch:,}, {plan.workload.num_passes:,} a step"
        )
        return f"Fits: each of {w.num_gpus:,} GPUs passes {w.share:,} samples {passes}, {rate}"
    if plan.workload.num_passes == 1:
        return f"Fits: all {plan.workload.batch} samples in one pass, {rate}"
    return f"Fits: passes of {plan.micro_batch:,}, {plan.workload.num_passes:,} a step, {rate}"


def _settings(plan: Plan) -> RenderableType:
    rows = table("Setting", "Class", "Why", wraps=("Why",))
    for reason in plan.reasons:
        why = Text(_sentence(reason.why))
        if reason.cost:
            why.append(f" Costs in quality: {reason.cost}.", style="yellow")
        kind = Text(KIND_WORDS[reason.kind], style=KIND_STYLES[reason.kind])
        rows.add_row(reason.setting.replace(" ", NO_BREAK), kind, why)
    return rows


def _sentence(text: str) -> str:
    """With a capital, unless it begins with a name such as amp-fp16."""
    made = sentence(text)
    return text[:1] + made[1:] if "-" in text.partition(" ")[0] else made


def _others(plan: Plan) -> Iterator[RenderableType]:
    shown = plan.alternatives[:MAX_ALTERNATIVES]
    if not shown:
        return
    yield Text.assemble(("Memory and time", "bold"), " of the settings that were predicted")
    yield Scatter(points=[*map(_point, reversed(shown)), _chosen_point(plan)], limit_bytes=plan.budget_bytes)
    legend = Text("             ", style="dim")
    for mark, style, name in (("●", "bold green", "this plan"), ("○", "cyan", "fits"), ("×", "red", "does not fit")):
        legend.append(mark, style).append(f" {name}   ", "dim")
    yield legend.append("┄ ", "yellow").append("budget", "dim")
    yield Text()
    yield _table(plan, shown)
    faster = "faster" if plan.lengths is None else "faster at full length"
    for other in (a for a in shown if a.why_not):
        split = f"{other.settings}, {other.split}"
        yield marked("·", f"Not {split}, although it is {faster}: {other.why_not}.", "dim")
    yield Text()


def _point(other: Alternative) -> Point:
    mark, style = ("○", "cyan") if other.fits else ("×", "red")
    return Point(seconds=other.step_time_s, num_bytes=other.safe_reserved_bytes, mark=mark, style=style)


def _chosen_point(plan: Plan) -> Point:
    seconds = plan.estimate.step_time_s or plan.step_time_s
    return Point(seconds=seconds, num_bytes=plan.estimate.safe_reserved_bytes, mark="●", style="bold green")


def _table(plan: Plan, shown: Sequence[Alternative]) -> RenderableType:
    numbers = ("passes", "a step", "reserved")
    rows = table("", "Also predicted", *numbers, "", right=numbers, wraps=("", "Also predicted"))
    seconds = plan.estimate.step_time_s or plan.step_time_s
    for other in shown:
        mark = Text("○", "cyan") if other.fits else Text("×", "red")
        pace = other.step_time_s / seconds
        beside = f"{pace:.1f}× the time" if pace >= 1.05 else "as fast" if pace > 0.99 else f"{1 - pace:.0%} less time"
        passes = other.split
        figures = (passes, duration(other.step_time_s), size(other.safe_reserved_bytes))
        rows.add_row(mark, other.settings, *figures, Text(beside if other.fits else "does not fit", "dim"))
    return rows


def _next(plan: Plan, path: str, *, is_saved: bool) -> Iterator[RenderableType]:
    w = plan.workload
    yield Text("Run it", style="bold") + Text("" if is_saved else "  (--save plan.json writes the plan)", style="dim")
    if find_task(w.task).is_trained:
        yield from map(_indented, wrap_command(train_command(w, path)))
        yield Text("Or in a loop of your own", style="bold")
    yield from map(_indented, snippet(w, path))
    yield Text("Look closer", style="bold")
    yield from map(_indented, wrap_command(estimate_command(w)))


def _indented(line: str) -> Text:
    return Text(f"  {line}", overflow="fold")


def train_command(workload: Workload, path: str) -> str:
    """The command that trains by a plan; the data is the reader's."""
    task = [] if workload.task == DEFAULT else ["--task", workload.task]
    each = str(workload.num_gpus // workload.num_nodes)
    nodes = ["--nnodes", str(workload.num_nodes), "--rdzv-endpoint", "HOST:29500"] if workload.num_nodes > 1 else []
    ranks = ["torchrun", *nodes, "--nproc-per-node", each, "-m"] if workload.num_gpus > 1 else []
    words = ["vramfit", "train", "DATA.csv", "--model", workload.model, *task, "--plan", path, "--output", "my-model"]
    return shlex.join([*ranks, *words])


def snippet(workload: Workload, path: str) -> list[str]:
    """Python that runs a plan."""
    if workload.num_gpus > 1:
        return _snippet_for_ranks(workload, path)
    return [
        "import vramfit",
        "",
        f'plan = vramfit.Plan.load("{path}")',
        "model, _ = vramfit.load(",
        f'    "{workload.model}", task=plan.workload.task, device="cpu"',
        ")",
        'vramfit.prepare(model, plan, device="cuda")',
        "optimizer = vramfit.make_optimizer(model, plan, lr=2e-5)",
        "stepper = vramfit.Stepper(model, optimizer, plan)",
        f"for batch in loader:  # {workload.batch} samples each",
        "    loss = stepper.step(batch)",
    ]


def _snippet_for_ranks(workload: Workload, path: str) -> list[str]:
    """Python that runs a plan under torchrun."""
    return [
        "import vramfit",
        "",
        f'plan = vramfit.Plan.load("{path}")',
        'with vramfit.company("cuda") as us:  # the processes that torchrun started',
        '    device = f"cuda:{us.local_rank}"',
        "    model, _ = vramfit.load(",
        f'        "{workload.model}", task=plan.workload.task, device=device',
        "    )",
        "    vramfit.prepare(model, plan)",
        "    ranks = us.share(model, plan.workload.parallel)",
        "    optimizer = vramfit.make_optimizer(model, plan, lr=2e-5)",
        "    stepper = vramfit.Stepper(model, optimizer, plan, ranks=ranks)",
        f"    for batch in loader:  # all {workload.batch} samples, the same on every rank",
        "        loss = stepper.step(batch)",
    ]


def estimate_command(workload: Workload) -> str:
    """The command that shows a plan's memory in full."""
    w = workload
    words = ["vramfit", "estimate", w.model, "--batch", str(w.batch), "--micro-batch", str(w.micro_batch)]
    words += ["--seq", str(w.seq)]
    if w.task != DEFAULT:
        words += ["--task", w.task]
    for name in PLANNED:
        if not SETTINGS[name].is_worked_out:
            words += SETTINGS[name].options(getattr(w, name))
    if w.num_gpus > 1:
        words += ["--num-gpus", str(w.num_gpus), "--num-nodes", str(w.num_nodes), "--parallel", w.parallel or "ddp"]
    words += ["--loop", "stepper", *(["--gpu", w.gpu] if w.gpu else [])]
    words += [f"--memory={w.memory}"] if w.memory is not None else []
    return shlex.join(words)


def wrap_command(command: str) -> list[str]:
    """A command in lines that a shell takes as one."""
    lines, words = [""], command.replace(" --", "\n--").split("\n")
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > COMMAND_WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _remarks(plan: Plan) -> Iterator[RenderableType]:
    for note in plan.notes:
        is_basis = note.startswith(("derived", "outside"))
        yield marked("!" if is_basis else "·", _sentence(note), "yellow" if is_basis else "dim")
    if plan.estimate.basis == "verified":
        yield Text(BASIS["verified"], style="dim")


def render_instances(fits: Sequence[InstanceFit]) -> RenderableType:
    """Cloud instances, smallest first."""
    return Sized([_instances(fits), Text("Each plan is for one of the instance's GPUs.", style="dim")])


@for_width
def _instances(width: int, fits: Sequence[InstanceFit]) -> Iterator[RenderableType]:
    """The table of instances; a narrow terminal does without their number of GPUs and the size of these."""
    is_narrow = width < INSTANCES_WIDTH
    numbers = ("passes", "a step", "reserved") if is_narrow else ("GPUs", "passes", "a step", "reserved", "of")
    columns = ("", "Instance", "GPU", *numbers, "Settings")
    rows = table(*columns, right=numbers, wraps=("Settings",), gap=1 if is_narrow else 2)
    for fit in fits:
        mark = Text("✓", "green") if fit.fits else Text("✗", "red")
        passes = fit.split if fit.fits else ""
        seconds = duration(fit.step_time_s) if fit.step_time_s is not None else ""
        used = size(fit.safe_reserved_bytes) if fit.safe_reserved_bytes is not None else ""
        settings = fit.settings if fit.fits else Text(fit.settings, "dim")
        num_gpus, budget = ([], []) if is_narrow else ([str(fit.num_gpus)], [size(fit.budget_bytes)])
        rows.add_row(mark, fit.instance, fit.gpu, *num_gpus, passes, seconds, used, *budget, settings)
    yield rows


def render_no_plan(failure: NoPlanFits) -> RenderableType:
    """A few lines: the shortfall, what comes nearest, and what would help."""
    best, budget = failure.best, failure.budget_bytes or 0
    w = best.workload
    room = size(budget - failure.margin_bytes)
    asked = f"batch {w.batch:,} × {w.seq:,} tokens · {target(best)} · budget {size(budget)}"
    rows = grid("left", "right", "bar")
    used = best.safe_reserved_bytes
    for name, value in (("the least it takes", used), ("what there is", budget - failure.margin_bytes)):
        bar = Meter(value=value, limit=max(budget - failure.margin_bytes, 1), scale=max(used, budget))
        rows.add_row(f"  {name}", Text(size(value), "bold"), bar)
    parts: list[RenderableType] = [
        Text.assemble((model_name(w.model), "bold"), f" · {w.task} · training plan"),
        Text(asked, style="dim"),
        Text(),
        Text(f"✗ No plan fits: {size(failure.shortfall_bytes)} too little.", style="bold red"),
        rows,
        Text(f"  {room} are left of {size(budget)} after a headroom of {size(failure.margin_bytes)}.", style="dim"),
        Text(),
        Text("Nearest settings", style="bold"),
        Text(f"  {', '.join(job(w)[1:])}"),
        Text(),
        Text("What would do, each predicted", style="bold"),
        *_remedies(failure),
    ]
    return Sized(parts)


def _remedies(failure: NoPlanFits) -> Iterator[RenderableType]:
    if failure.allow:
        meaning = "; ".join(MEANING.get(name, name) for name in failure.allow)
        yield marked("→", f"--allow {','.join(failure.allow)}   the mildest change that fits: {meaning}", "cyan")
    else:
        yield marked("·", "No change of the training that vramfit knows would fit.", "dim")
    if failure.host_bytes:
        yield marked("→", f"{size(failure.host_bytes)} of host memory   for what need not stay on the GPU", "cyan")
    if failure.gpu:
        yield marked("→", f"--gpu {failure.gpu}   the smallest GPU of the catalogue on which this fits", "cyan")
    if failure.model:
        yield marked("→", f"{failure.model}   the largest model of the family that fits here", "cyan")


def no_plan_data(failure: NoPlanFits) -> dict[str, Any]:
    """For `--json`."""
    names = ("shortfall_bytes", "budget_bytes", "margin_bytes", "allow", "gpu", "model", "host_bytes", "best")
    return {"error": str(failure), **{name: to_data(getattr(failure, name)) for name in names}}
