"""The weights of a head that pools: each of its layers has a file of its own beside the encoder's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vramfit.checkpoints.files import SAVE_AGAIN, CheckpointFiles, bad_file, find_checkpoint, shown, sizes, some
from vramfit.checkpoints.reading import check_values, read_entries
from vramfit.checkpoints.safetensors_file import FLOATS, TensorEntry
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel
from vramfit.models.sentence_folder import find_prompt
from vramfit.records.finding import Finding
from vramfit.units import format_bytes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFiles:
    """Where the tensors of a head lie."""

    files: tuple[CheckpointFiles, ...] = ()
    entries: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Model name → the tensor for it; every tensor that the head has."""


def find_head_files(resolved: ResolvedModel, model: "nn.Module") -> HeadFiles:
    """The tensors of the layers after pooling; none for a model without such a head.

    Args:
        model: on the meta device, made of the same parts.

    Raises:
        CheckpointError: a file that is absent or damaged, a tensor that it lacks, has in another shape, or has no
            place for.
    """
    from vramfit.tasks.parts.pooling import NAME, head_of

    head = head_of(model)
    if head is None or resolved.parts is None:
        return HeadFiles()
    files: list[CheckpointFiles] = []
    entries: dict[str, TensorEntry] = {}
    for place, layer in enumerate(head.layers):
        folder = resolved.parts.layers[place].folder
        shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        if not shapes or folder is None:
            continue
        files.append(find_checkpoint(folder))
        found = {entry.name: entry for entry in read_entries(files[-1])}
        _check(files[-1], found, shapes)
        entries |= {f"{NAME}.layers.{place}.{name}": found[name] for name in shapes}
    return HeadFiles(files=tuple(files), entries=entries)


def _check(files: CheckpointFiles, found: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    path = files.paths[0]
    if lost := [name for name in shapes if name not in found]:
        raise bad_file(path, f"lacks {some(lost)}, which its config.json asks for", SAVE_AGAIN, tensor=lost[0])
    if surplus := [name for name in found if name not in shapes]:
        what = f"holds {some(surplus)}, which its config.json has no place for"
        raise bad_file(path, what, SAVE_AGAIN, tensor=surplus[0])
    for name, shape in shapes.items():
        entry = found[name]
        if entry.shape != shape:
            what = f"has {shown(name)} in shape {sizes(entry.shape)}, and its config.json says {sizes(shape)}"
            raise bad_file(path, what, "use the config.json that belongs to these weights", tensor=name)
        if entry.dtype not in FLOATS:
            raise bad_file(path, f"has {shown(name)} in {entry.dtype}, not in floating point", SAVE_AGAIN, tensor=name)


def check_head(resolved: ResolvedModel, head: HeadFiles) -> Iterator[Finding]:
    """What a folder says of its head."""
    parts = resolved.parts
    if parts is None:
        return
    what = f"vectors are pooled by {parts.pooling}"
    if parts.layers:
        what += f", then go through {', '.join(layer.kind for layer in parts.layers)}"
    if head.entries:
        num_bytes = sum(entry.num_bytes for entry in head.entries.values())
        what += f" ({len(head.entries)} tensors, {format_bytes(num_bytes)})"
    yield Finding.ok("embedding.head", what)
    try:
        prompt = find_prompt(parts)
    except CheckpointError as error:
        yield Finding.warning("embedding.prompt", str(error), "vramfit makes no vectors with it", error.hint or "")
        return
    if prompt:
        yield Finding.ok("embedding.prompt", f"{shown(prompt)!r} goes before every text, as the folder says")


def check_head_values(head: HeadFiles) -> Sequence[Finding]:
    """Findings about numbers that are not sound, where data is read."""
    found = [f for files in head.files for f in check_values(read_entries(files), files.kind)]
    return [finding for finding in found if finding.severity != "ok"]
