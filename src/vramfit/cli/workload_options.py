"""The options that describe a workload, written once for every verb that takes one.

A verb is a function whose first parameter is a `WorkloadOptions`; `takes_workload` makes of it the function
that typer reads, with one parameter for each option. What an option may be is the workload's to say: here
text becomes numbers and lists, and an option that is not given is not passed on.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from vramfit.cli.first_look import is_path, look_at_gpu, look_at_model
from vramfit.errors import WorkloadError
from vramfit.tasks import find_task
from vramfit.workload import CHOICES, MAX_COUNT, Workload

if TYPE_CHECKING:
    from vramfit.planner.lengths import Lengths

MAX_CELLS = 64
"""Batches times lengths of one table."""

_DEFAULTS = {f.name: f.default for f in fields(Workload)}


def _option(name: str, help: str, *, panel: str, metavar: str | None = None) -> Any:
    """A typer option for one keyword: its choices from the workload, its default shown but left to it."""
    default = _DEFAULTS.get(name)
    if name in CHOICES:
        help = f"{help} One of {', '.join(CHOICES[name])}."
        metavar = metavar or "NAME"
    if default is not None and not isinstance(default, bool):
        help = f"{help} Default: {default}."
    option = f"--{name.replace('_', '-')}"
    return typer.Option(option, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


_JOB, _HOW, _WHERE = "The job", "How it is done", "The machine"


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What was given on the command line; None and False stand for what was not."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A catalogue name, a folder with config.json, or a hub id.")
    ]
    task: Annotated[str | None, _option("task", "The head.", panel=_JOB)] = None
    mode: Annotated[str | None, _option("mode", "What a step does.", panel=_JOB)] = None
    batch: Annotated[
        str | None,
        _option("batch", "Samples an optimizer step sees; several (1,4,8) give a table.", panel=_JOB, metavar="N,…"),
    ] = None
    seq: Annotated[
        str | None,
        _option("seq", "Tokens a sequence; for estimate also several (128,512).", panel=_JOB, metavar="N,…"),
    ] = None
    accumulate: Annotated[int | None, _option("accumulate", "Micro-batches a step.", panel=_JOB, metavar="N")] = None
    micro_batch: Annotated[
        int | None, _option("micro_batch", "Samples a forward pass sees.", panel=_JOB, metavar="N")
    ] = None
    lengths: Annotated[
        str | None,
        _option(
            "lengths",
            "Real lengths of the sequences, for packed attention: numbers, or a file with one a line.",
            panel=_JOB,
            metavar="FILE|N,…",
        ),
    ] = None
    num_labels: Annotated[int | None, _option("num_labels", "Size of the head.", panel=_JOB, metavar="N")] = None
    precision: Annotated[str | None, _option("precision", "Arithmetic.", panel=_HOW)] = None
    attention: Annotated[str | None, _option("attention", "Attention kernel.", panel=_HOW)] = None
    mask: Annotated[str | None, _option("mask", "Attention mask.", panel=_HOW)] = None
    no_dropout: Annotated[bool, _option("no_dropout", "No dropout, as under model.eval().", panel=_HOW)] = False
    checkpointing: Annotated[
        str | None,
        _option("checkpointing", "Recompute all layers in backward, or the first K.", panel=_HOW, metavar="full|K"),
    ] = None
    freeze: Annotated[
        str | None,
        _option(
            "freeze",
            "What does not learn: embeddings, encoder, backbone, the K lowest layers, patterns of names, or several.",
            panel=_HOW,
            metavar="NAME|K|PATTERN,…",
        ),
    ] = None
    optimizer: Annotated[str | None, _option("optimizer", "Optimizer.", panel=_HOW)] = None
    max_grad_norm: Annotated[
        float | None, _option("max_grad_norm", "Clip the gradient to this norm.", panel=_HOW, metavar="X")
    ] = None
    lora: Annotated[int | None, _option("lora", "Rank of LoRA adapters.", panel=_HOW, metavar="RANK")] = None
    quantize: Annotated[str | None, _option("quantize", "Weights in fewer bits.", panel=_HOW)] = None
    offload: Annotated[str | None, _option("offload", "What waits in host memory.", panel=_HOW)] = None
    compile: Annotated[bool, _option("compile", "torch.compile on the model.", panel=_HOW)] = False
    fused: Annotated[bool, _option("fused", "Fused layers in packed passes.", panel=_HOW)] = False
    graphs: Annotated[bool, _option("graphs", "Packed passes as CUDA graphs.", panel=_HOW)] = False
    casts: Annotated[str | None, _option("casts", "How autocast's casts are made.", panel=_HOW)] = None
    loop: Annotated[str | None, _option("loop", "Whose step.", panel=_HOW)] = None
    gpu: Annotated[
        str | None, _option("gpu", "A GPU of the catalogue (vramfit gpus).", panel=_WHERE, metavar="NAME")
    ] = None
    memory: Annotated[
        str | None,
        _option("memory", "What PyTorch may reserve, such as 11.17GiB.", panel=_WHERE, metavar="SIZE"),
    ] = None
    host_memory: Annotated[
        str | None,
        _option("host_memory", "What may wait in host memory, such as 16GiB.", panel=_WHERE, metavar="SIZE"),
    ] = None
    allocator: Annotated[str | None, _option("allocator", "Kind of segments.", panel=_WHERE)] = None
    num_gpus: Annotated[int | None, _option("num_gpus", "GPUs that share a step.", panel=_WHERE, metavar="N")] = None
    num_nodes: Annotated[
        int | None, _option("num_nodes", "Machines that these GPUs are in.", panel=_WHERE, metavar="N")
    ] = None
    parallel: Annotated[str | None, _option("parallel", "How several GPUs share a model.", panel=_WHERE)] = None
    torch_version: Annotated[
        str | None, _option("torch_version", "Predict for this torch, such as 2.11.", panel=_WHERE, metavar="X.Y")
    ] = None
    trust_remote_code: Annotated[
        bool,
        _option("trust_remote_code", "Let the model's repository run its own Python code here.", panel=_WHERE),
    ] = False

    def keywords(self, *, trains: bool = True) -> dict[str, Any]:
        """Keywords of the one workload that was described; a list of batches or lengths is refused.

        Args:
            trains: whether the verb trains where no mode is given.
        """
        cells = self.cells()
        if len(cells) > 1:
            raise typer.BadParameter("this verb takes one batch and one length, not a list")
        self._look(trains=trains)
        return cells[0]

    def cells(self) -> list[dict[str, Any]]:
        """Keywords of every workload of the table: length by length, batch by batch."""
        shared = self._given()
        batches = [{"batch": n} for n in parse_counts(self.batch, "--batch")] or [{}]
        seqs = [{"seq": n} for n in parse_counts(self.seq, "--seq")] or [{}]
        num_cells = len(batches) * len(seqs)
        if num_cells > MAX_CELLS:
            raise typer.BadParameter(
                f"--batch and --seq make a table of {num_cells:,} cells; at most {MAX_CELLS} are predicted at once"
            )
        return [{**shared, **seq, **batch} for seq in seqs for batch in batches]

    def check(self) -> None:
        """Raise for what is wrong in itself, before anything heavy is loaded."""
        for keywords in self.cells():
            Workload.from_keywords(model=self.model, **{k: v for k, v in keywords.items() if k != "trust_remote_code"})
        self._look()

    def _look(self, *, trains: bool = True) -> None:
        """Raise for names and lengths that nothing has and a task without a loss, which torch is not needed to tell."""
        why_no_loss = find_task(self.task).why_no_loss if self.task is not None else None
        if why_no_loss and (self.mode == "train" or (self.mode is None and trains)):
            raise WorkloadError([why_no_loss])
        look_at_gpu(self.gpu)
        if self.model:
            look_at_model(self.model, parse_counts(self.seq, "--seq"))

    def _given(self) -> dict[str, Any]:
        """What was given, but for the model, batch and length, in the types that the workload takes."""
        apart = ("model", "batch", "seq", "no_dropout")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        if self.no_dropout:
            given["dropout"] = False
        if self.checkpointing is not None:
            given["checkpointing"] = number_or_text(self.checkpointing)
        if self.freeze is not None:
            given["freeze"] = parse_freeze(self.freeze)
        if self.lengths is not None:
            given["lengths"] = parse_lengths(self.lengths).values
        return given


def takes_workload(*, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a verb of a function `(options: WorkloadOptions, **own)`; options named in `without` are left out."""

    def make(verb: Callable[..., None]) -> Callable[..., None]:
        shared = _parameters(WorkloadOptions, without)
        own = list(inspect.signature(verb).parameters.values())[1:]

        @wraps(verb)
        def run(**given: Any) -> None:
            described = {p.name: given.pop(p.name) for p in shared}
            if "model" in without:  # the verb has it as an option of its own
                described["model"] = given["model"] or ""
            verb(WorkloadOptions(**described), **given)

        parameters = [*shared, *(p.replace(kind=p.KEYWORD_ONLY) for p in own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return make


def _parameters(options: type[WorkloadOptions], without: Sequence[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    return [
        p.replace(annotation=hints[name], kind=p.KEYWORD_ONLY)
        for name, p in inspect.signature(options).parameters.items()
        if name not in without
    ]


def parse_counts(text: str | None, option: str, *, unique: bool = True) -> list[int]:
    """Whole numbers from `1,4,8`; a usage error names the one that is none."""
    if text is None:
        return []
    counts = []
    for part in text.split(","):
        digits = part.strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and 1 <= int(digits) <= MAX_COUNT):
            raise typer.BadParameter(
                f"{option} {text[:60]!r}: {digits[:20]!r} is not a whole number from 1 to {MAX_COUNT:,}"
            )
        counts.append(int(digits))
    return sorted(set(counts)) if unique else counts


def parse_lengths(text: str) -> "Lengths":
    """Tokens of each sample, from numbers or from a file of them.

    Raises:
        VramfitError: a file with something else in it.
    """
    from vramfit.planner.lengths import lengths_of

    if not text.replace(",", "").replace(" ", "").isdecimal():
        if is_path(text):
            return lengths_of(text)
        raise typer.BadParameter(
            f"--lengths {text[:60]!r} is neither a file that is there nor whole numbers (12,80,512)"
        )
    return lengths_of(parse_counts(text, "--lengths", unique=False))


def parse_names(text: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def number_or_text(text: str) -> int | str:
    """A number of layers where the text is one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else text


def parse_freeze(text: str) -> int | str | tuple[str, ...]:
    """A number of layers, a name or a pattern; or several of them."""
    parts = tuple(part.strip() for part in text.split(","))
    return parts if len(parts) > 1 else number_or_text(parts[0])
