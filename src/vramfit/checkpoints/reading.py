"""All tensors of a checkpoint, whatever its kind and however many its files."""

from vramfit.checkpoints.bin_index import read_bin
from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.files import CheckpointFiles
from vramfit.checkpoints.safetensors_header import read_header
from vramfit.checkpoints.wording import DOWNLOAD_AGAIN, SAVE_AGAIN, bad_file, shown


def read_entries(files: CheckpointFiles) -> tuple[TensorEntry, ...]:
    """Every tensor of a checkpoint, from headers only.

    Raises:
        CheckpointError: a damaged file, a tensor that two shards hold, or one that its shard lacks.
    """
    read = read_header if files.kind == "safetensors" else read_bin
    found: dict[str, TensorEntry] = {}
    for path in files.paths:
        for entry in read(path):
            if entry.name in found:
                raise bad_file(
                    path,
                    f"holds tensor {shown(entry.name)}, and so does {found[entry.name].file.name}",
                    SAVE_AGAIN,
                    tensor=entry.name,
                )
            found[entry.name] = entry
    _check_index(files, found)
    return tuple(found.values())


def _check_index(files: CheckpointFiles, found: dict[str, TensorEntry]) -> None:
    """Every tensor that the index promises must lie in the shard it names."""
    for name, shard in files.shard_of.items():
        if name not in found:
            raise bad_file(
                files.folder / shard,
                f"lacks tensor {shown(name)}, which {files.index.name if files.index else 'the index'} puts there",
                DOWNLOAD_AGAIN,
                tensor=name,
            )
        if found[name].file.name != shard:
            raise bad_file(
                found[name].file,
                f"holds tensor {shown(name)}, which the index puts into {shown(shard)}",
                SAVE_AGAIN,
                tensor=name,
            )
