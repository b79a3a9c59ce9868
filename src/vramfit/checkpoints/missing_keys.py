"""What the checkpoint lacks: a new head is expected and named, a part of the encoder is fatal."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.shapes import is_about_labels
from vramfit.checkpoints.subject import Subject
from vramfit.checkpoints.wording import some
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel
from vramfit.records.finding import Finding
from vramfit.tasks import find_task

MAX_PLAIN_LAYERS = 200
"""No published encoder has more; so many are still built in half a second."""
_LAYER = re.compile(r"(?:^|\.)(?:layer|layers|albert_layer_groups|block|blocks|h)\.(\d{1,6})\.")


def fresh_names(subject: Subject) -> tuple[str, ...]:
    """Model names that may be initialised: outside the encoder, its pooler, and what is computed."""
    lost = [name for name in subject.matching.missing if _may_start_fresh(subject, name)]
    asked = subject.num_labels_asked is not None
    resized = [m.name for m in subject.matching.mismatched if asked and is_about_labels(subject, m)]
    return (*lost, *resized)


def refuse_absurd_depth(resolved: ResolvedModel, entries: Sequence[TensorEntry]) -> None:
    """Raise where a configuration asks for hundreds of layers that the checkpoint has not.

    Fewer are told by `check_missing`, which needs the model; hundreds would take seconds to build.

    Raises:
        CheckpointError: names the field and both numbers.
    """
    asked = getattr(resolved.config, "num_hidden_layers", None)
    if type(asked) is not int or asked <= MAX_PLAIN_LAYERS or hasattr(resolved.config, "num_hidden_groups"):
        return  # ALBERT's groups are few however often they are applied
    has = 1 + max((layer for entry in entries if (layer := layer_of(entry.name)) is not None), default=-1)
    if asked > 2 * has:
        where = str(resolved.folder / "config.json") if resolved.folder is not None else resolved.name
        raise CheckpointError(
            f"{where} says num_hidden_layers {asked:,}, the checkpoint has {has:,} layers",
            file=where,
            hint="use the config.json that belongs to these weights",
        )


def check_missing(subject: Subject) -> list[Finding]:
    """Findings about model names that nothing in the checkpoint is for."""
    missing = subject.matching.missing
    encoder = [name for name in missing if not _may_start_fresh(subject, name)]
    head = [name for name in missing if name in subject.head and name not in subject.buffers]
    pooler = [name for name in missing if name not in subject.head and _is_pooler(name)]
    findings = _encoder(subject, encoder) if encoder else []
    if head:
        findings.append(_head(subject, head))
    if pooler:
        findings.append(_pooler(subject, pooler))
    return findings


def _may_start_fresh(subject: Subject, name: str) -> bool:
    return name in subject.head or name in subject.buffers or _is_pooler(name)


def _is_pooler(name: str) -> bool:
    return re.search(r"(^|\.)pooler\.", name) is not None


def _encoder(subject: Subject, names: Sequence[str]) -> list[Finding]:
    whole = _whole_layers(subject, names)
    rest = [name for name in names if layer_of(name) not in whole]
    findings = []
    if whole:
        num_layers = len({layer_of(name) for name in subject.state} - {None})
        findings.append(
            Finding(
                check="weights.missing_layers",
                severity="error",
                what=f"{len(whole)} of {num_layers} encoder layers {'are' if len(whole) > 1 else 'is'} not in the "
                f"checkpoint: {_ranges(whole)} (counting from 0)",
                why="what is missing would start at random and the encoder would compute nonsense",
                fix="use the config.json that belongs to these weights, or download the whole checkpoint",
                fatal=True,
            )
        )
    if rest:
        findings.append(
            Finding(
                check="weights.missing",
                severity="error",
                what=f"{len(rest)} tensor{'s' if len(rest) > 1 else ''} of the encoder "
                f"{'are' if len(rest) > 1 else 'is'} not in the checkpoint: {some(rest)}",
                why="what is missing would start at random and the encoder would compute nonsense",
                fix="download the whole checkpoint, or use the config.json that belongs to these weights",
                fatal=True,
            )
        )
    return findings


def _whole_layers(subject: Subject, names: Sequence[str]) -> set[int]:
    """Layers that lack every one of their tensors."""
    lost: dict[int | None, int] = defaultdict(int)
    all_of: dict[int | None, int] = defaultdict(int)
    for name in names:
        lost[layer_of(name)] += 1
    for name in subject.state:
        all_of[layer_of(name)] += 1
    return {layer for layer, count in lost.items() if layer is not None and count == all_of[layer]}


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to.

    >>> layer_of("bert.encoder.layer.11.output.dense.weight"), layer_of("classifier.weight")
    (11, None)
    """
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _ranges(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    is_run = len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1
    return f"{ordered[0]}–{ordered[-1]}" if is_run else some([str(n) for n in ordered], 8)


def _head(subject: Subject, names: Sequence[str]) -> Finding:
    state = subject.state
    num_parameters = sum(tensor.numel() for tensor in {id(state[name]): state[name] for name in names}.values())
    parts = some(_roots(_modules(names)), 4)
    loaded = _modules(subject.matching.targets.values()) & _modules(names)
    said = subject.class_name in subject.saved_architectures
    what = f"{parts} ({num_parameters:,} parameters) not in the checkpoint"
    if loaded or said:
        return Finding(
            check="weights.head_incomplete",
            severity="warning",
            what=f"head incomplete: {what}, although "
            + ("other tensors of it are" if loaded else f"config.json says {subject.class_name}"),
            why="that part starts at random: predictions mean nothing until it is trained",
            fix="download the checkpoint again, or fine-tune before use",
        )
    return Finding(
        check="weights.head_new",
        severity="info",
        what=f"new head: {what}; it starts at random",
        why=f"expected where fine-tuning for {subject.resolved.task} begins; predictions mean nothing before it",
        fix="fine-tune first, or take a checkpoint that is fine-tuned for this task",
    )


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] or name for name in names}


def _roots(modules: set[str]) -> list[str]:
    """The modules that lie in no other of them."""
    return sorted(m for m in modules if not any(m.startswith(f"{other}.") for other in modules))


def _pooler(subject: Subject, names: Sequence[str]) -> Finding:
    matters = not find_task(subject.resolved.task).has_head
    return Finding(
        check="weights.pooler_new",
        severity="warning" if matters else "info",
        what=f"the pooler ({some(names)}) is not in the checkpoint and starts at random",
        why="a model trained by masked language modelling has none; "
        + ("pooler_output is noise: use the last hidden state" if matters else "it learns with the head"),
    )
