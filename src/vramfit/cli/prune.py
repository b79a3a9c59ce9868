"""`vramfit prune`: a model with fewer layers and neurons."""

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramfit.cli.options import Json, opt, verb
from vramfit.cli.terminal import print_json, say, working
from vramfit.cli.trim import SourceOptions, show_sizes
from vramfit.errors import WorkloadError
from vramfit.units import counted, parse_bytes

if TYPE_CHECKING:
    from vramfit.smaller.prune import PruneReport, PruneTarget


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How small the model is to be."""

    keep: float | None = opt(None, "Share of the parameters of the layers, such as 0.5.", "SHARE")
    size: str | None = opt(None, "Size of all weights, such as 50MiB.", "SIZE")
    memory: str | None = opt(None, "Predicted memory of serving 32 × 128 tokens in fp32, such as 150MiB.", "SIZE")
    layers: int | None = opt(None, "Keep N layers.", "N", min=1)
    neurons: int | None = opt(None, "Keep so many intermediate neurons in each layer.", "N", min=1)

    def look(self) -> None:
        """Refuse what contradicts itself, before torch is imported."""
        if self.keep is not None and not 0 < self.keep < 1:
            hint = "--keep 0.5 keeps half the parameters"
            raise WorkloadError([f"--keep {self.keep:g} is not a share between 0 and 1"], hint=hint)
        if all(value is None for value in (self.keep, self.size, self.memory, self.layers, self.neurons)):
            raise WorkloadError(["nothing says how small the model is to be"], hint="for example: --keep 0.5")
        for name in ("size", "memory"):
            if (text := getattr(self, name)) is not None:
                parse_bytes(text, name=name)

    @property
    def target(self) -> "PruneTarget":
        """As `prune` takes it."""
        from vramfit.smaller.prune import PruneTarget

        return PruneTarget(
            keep=self.keep,
            size_bytes=None if self.size is None else parse_bytes(self.size),
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
            layers=self.layers,
            neurons=self.neurons,
        )


@verb("vramfit prune my-model --data train.csv --keep 0.5 --output my-model-half")
def prune(options: SourceOptions, own: TargetOptions, json: Json = False) -> None:
    """Take out the layers and neurons that a model's answers need least; a smaller folder, without masks.

    What matters is measured on the rows of --data; labels are not needed. Attention heads stay as they are.
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
    from vramfit.smaller.prune import WHY_NO_HEADS

    show_sizes({"before": report.before, "after": report.after})
    shape = report.shape
    numbers = ", ".join(map(str, shape.layers))
    say(
        f"{counted(len(shape.layers), 'layer')} ({numbers}) of {shape.neurons:,} neurons, the best of "
        f"{counted(len(report.tried), 'shape')}: the answers on {report.num_rows:,} rows change by "
        f"{shape.change:.1%} of their squares before recovery.",
        stderr=False,
    )
    say(WHY_NO_HEADS, stderr=False)
    data = shlex.quote((options.data or ["DATA"])[0])
    recovered = shlex.quote(f"{report.output}-recovered")
    say(f"Recover it: vramfit train {data} --model {shlex.quote(report.output)} --output {recovered}", stderr=False)
    say(
        f"or from the original's answers: vramfit distill {shlex.quote(report.model)} {data} "
        f"--student {shlex.quote(report.output)} --output {recovered}",
        stderr=False,
    )
