"""`vramfit prune`: a model with fewer layers and neurons."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramfit.cli.first_look import look_at_columns
from vramfit.cli.options import Json, opt, parse_names, verb
from vramfit.cli.terminal import print_json, say, working
from vramfit.cli.trim import SourceOptions, show_sizes
from vramfit.errors import VramfitError, WorkloadError
from vramfit.tasks import find_task
from vramfit.units import counted, parse_bytes

if TYPE_CHECKING:
    from vramfit.smaller.prune import PruneReport
    from vramfit.smaller.shapes import PruneTarget


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How small the model is to be."""

    keep: float | None = opt(None, "Target: share of the layers' parameters to keep, such as 0.5.", "SHARE")
    size: str | None = opt(None, "Target: size of all weights, such as 50MiB.", "SIZE")
    memory: str | None = opt(None, "Target: predicted memory to serve 32 × 128 tokens in fp32: 150MiB.", "SIZE")
    target_latency_ms: float | None = opt(
        None, "Target: median time of one row, measured on this device, in milliseconds.", "MS"
    )
    layers: int | None = opt(None, "Keep N layers.", "N", min=1)
    neurons: int | None = opt(None, "Keep N intermediate neurons in each layer.", "N", min=1)
    heads: int | None = opt(
        None, "Keep N attention heads in each layer (models with a head size of their own).", "N", min=1
    )

    def look(self) -> None:
        """Refuse what contradicts itself, before torch is imported."""
        if self.keep is not None and not 0 < self.keep < 1:
            hint = "--keep 0.5 keeps half the parameters"
            raise WorkloadError([f"--keep {self.keep:g} is not a share between 0 and 1"], hint=hint)
        if all(value is None for value in vars(self).values()):
            raise WorkloadError(["nothing says how small the model is to be"], hint="for example: --keep 0.5")
        if self.target_latency_ms is not None and not 0 < self.target_latency_ms < math.inf:
            raise WorkloadError([f"--target-latency-ms {self.target_latency_ms:g} is not a time above 0"])
        for name in ("size", "memory"):
            if (text := getattr(self, name)) is not None:
                parse_bytes(text, name=name)

    @property
    def target(self) -> "PruneTarget":
        """As `prune` takes it."""
        from vramfit.smaller.shapes import PruneTarget

        return PruneTarget(
            keep=self.keep,
            size_bytes=None if self.size is None else parse_bytes(self.size),
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
            latency_s=None if self.target_latency_ms is None else self.target_latency_ms / 1000,
            layers=self.layers,
            neurons=self.neurons,
            heads=self.heads,
        )


@verb("vramfit prune my-model --data train.csv --keep 0.5 --output my-model-half")
def prune(options: SourceOptions, own: TargetOptions, json: Json = False) -> None:
    """Remove the layers and neurons that matter least for a model's answers: a smaller model, without masks.

    Importance is measured on the rows of --data; labels are not needed.
    Attention heads are kept unless --heads says how many.
    A pruned model must be trained again: the command for it is printed.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 130 when interrupted.
    """
    own.look()
    options.look()
    with working("Pruning"):
        from vramfit.smaller.prune import PruneRequest
        from vramfit.smaller.prune import prune as run

        report = run(PruneRequest(**options.taken, target=own.target))
    if json:
        print_json(report)
    else:
        _show(report, options)


def _show(report: "PruneReport", options: SourceOptions) -> None:
    from vramfit.report.words import duration

    show_sizes({"before": report.before, "after": report.after})
    shape = report.shape
    numbers = ", ".join(map(str, shape.layers))
    heads = "" if shape.heads is None else f" and {counted(shape.heads, 'head')}"
    say(
        f"{counted(len(shape.layers), 'layer')} ({numbers}) of {shape.neurons:,} neurons{heads}, the best of "
        f"{counted(len(report.tried), 'shape')}: the answers on {report.num_rows:,} rows change by "
        f"{shape.change:.1%} of their squares before recovery.",
        stderr=False,
    )
    if report.latency is not None:
        latency = report.latency
        say(
            f"One row takes {duration(latency.after_s)}, and took {duration(latency.before_s)} (median, measured here: "
            f"{latency.device}); {counted(latency.num_measured, 'model')} were measured.",
            stderr=False,
        )
    for line in _recovery(report, options):
        say(line, stderr=False)


def _recovery(report: "PruneReport", options: SourceOptions) -> Iterator[str]:
    """The commands that train it again, on a file that can be learned from."""
    pruned, output = shlex.quote(report.output), shlex.quote(f"{report.output}-recovered")
    if not find_task(report.task).is_trained:
        train = f"vramfit train DATA --task NAME --model {pruned} --output {output}"
        yield f"It has no head to recover: fine-tune it for a task, on data for that: {train}"
        return
    found = next((file for file in options.data or () if _can_teach(file, report.task, options)), None)
    data, rest = "DATA" if found is None else shlex.quote(found), f"--output {output}"
    if found is None:
        yield f"{', '.join(options.data or ())} has no labels to recover it with: give rows with labels as DATA."
    elif options.text_column:
        rest = f"--text-column {shlex.quote(options.text_column)} {rest}"
    yield f"Recover it: vramfit train {data} --task {report.task} --model {pruned} {rest}"
    original = f"{shlex.quote(report.model)} {data} --student {pruned} {rest}"
    yield f"or from the original's answers: vramfit distill {original}"


def _can_teach(file: str, task: str, options: SourceOptions) -> bool:
    """Whether a file has the columns that training needs, labels too."""
    from vramfit.runtime.data.source import DataSource

    try:
        look_at_columns(DataSource(path=file, task=task, text_columns=parse_names(options.text_column)))
    except VramfitError:
        return False
    return True
