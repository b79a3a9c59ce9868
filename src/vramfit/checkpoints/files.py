"""The files of a checkpoint, taken with suspicion: which a folder holds and which are read; JSON, text, and errors."""

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from vramfit.errors import CheckpointError
from vramfit.models.hub import exported_file, looks_like_hub_id, plain_file

DOWNLOAD_AGAIN = "download the file again; compare its size and sha256 with the ones on its page"
SAVE_AGAIN = "save the model again with save_pretrained"
MAX_JSON_BYTES = 40 * 10**6
"""The largest tokenizers (256,000 words) take 35 MB."""
_MAX_CONTAINERS = 1_500_000
"""Lists and objects in one JSON file: each costs Python some 70 bytes for the 2 it takes in the file."""
NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "cuda error: out of memory")
"""How torch words a host allocation that failed (c10/core/impl/alloc_cpu.cpp, aten/src/ATen/MapAllocator.cpp), and
CUDA pinned memory that it does not get."""


def bad_file(path: Path, what: str, hint: str, *, tensor: str = "") -> CheckpointError:
    """The error for one fault: `what` goes on after the path, as in "x.safetensors is empty"."""
    return CheckpointError(f"{path} {what}", file=str(path), tensor=tensor, hint=hint)


def shown(value: object) -> str:
    """A value from a file, printable and at most 100 characters long."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=repr)
    except RecursionError:
        text = f"a {type(value).__name__} nested too deeply"
    text = "".join(c if c.isprintable() else "?" for c in text[:100])
    return text if len(text) < 100 else f"{text[:97]}..."


def sizes(shape: Sequence[int]) -> str:
    """A shape to read.

    >>> sizes((30522, 768)), sizes(())
    ('30522×768', 'scalar')
    """
    return "×".join(map(str, shape)) if shape else "scalar"


def some(names: Sequence[str], count: int = 3) -> str:
    """The first few of many names, and how many more there are.

    >>> some(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    listed = ", ".join(shown(name) for name in names[:count])
    return listed if len(names) <= count else f"{listed} and {len(names) - count} more"


def is_plain_name(name: str) -> bool:
    """Whether a text names a file right in the folder: no way up, no absolute path, no control characters."""
    return (
        0 < len(name) <= 255
        and name not in (".", "..")
        and not any(c in "/\\:" or ord(c) < 32 for c in name)
        and name.isprintable()
    )


def read_json_object(path: Path, *, what: str) -> dict[str, Any]:
    """The JSON object in a file; memory stays bounded by the file's size.

    Args:
        path: a regular file.
        what: what the file is called in an error, such as "index".

    Raises:
        CheckpointError: not readable, too large, not JSON, or no object.
    """
    where = str(path)
    hint = f"download the {what} again"
    content = read_bytes(path, what=what)
    if content.count(b"{") + content.count(b"[") > _MAX_CONTAINERS:
        raise CheckpointError(f"{where} is no {what}: it holds more than {_MAX_CONTAINERS:,} lists", file=where)
    try:
        data = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise CheckpointError(f"{where} is not JSON: {why}", file=where, hint=hint) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} holds no JSON object", file=where, hint=hint)
    return data


def read_bytes(path: Path, *, what: str) -> bytes:
    """The content of a file; memory stays bounded.

    Raises:
        CheckpointError: not readable, or too large.
    """
    hint = f"download the {what} again"
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise bad_file(path, f"is {num_bytes:,} bytes, too large for a {what} (limit {MAX_JSON_BYTES:,})", hint)
        return path.read_bytes()
    except OSError as error:
        raise bad_file(path, f"cannot be read: {reason(error)}", hint) from None


def reason(error: OSError) -> str:
    """What the system says of a file that cannot be read."""
    return (error.strerror or str(error) or type(error).__name__).lower()


def one_line(error: Exception) -> str:
    """The message of an error in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the host had no memory to give."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return any(words in str(error).lower() for words in NO_MEMORY)
    return isinstance(error, MemoryError)


Kind = Literal["safetensors", "bin"]
MAX_SHARDS = 10_000

_WANTED: tuple[tuple[str, Kind], ...] = (("model.safetensors", "safetensors"), ("pytorch_model.bin", "bin"))
"""By preference, as in transformers: each as one file, then as shards with an index."""

_CONVERT = (
    "the installed transformers cannot read it; transformers 4.57 was the last that could: "
    'pip install "transformers<5" {package} in another environment, then '
    "AutoModel.from_pretrained(folder, from_{what}=True).save_pretrained(new_folder)"
)
_FOREIGN: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("tf_model.h5", "tf_model.*.h5", "*.h5"),
        "TensorFlow weights",
        _CONVERT.format(package="tensorflow tf-keras", what="tf"),
    ),
    (
        ("*.ckpt", "*.ckpt.*", "checkpoint"),
        "a TensorFlow 1 checkpoint",
        "install tensorflow and transformers<5 in another environment, and run the family's own converter, such as "
        "python -m transformers.models.bert.convert_bert_original_tf_checkpoint_to_pytorch; "
        "most published ones exist as model.safetensors on the hub: download that",
    ),
    (("flax_model.msgpack", "*.msgpack"), "Flax weights", _CONVERT.format(package="flax", what="flax")),
    (
        ("adapter_model.safetensors", "adapter_model.bin"),
        "a LoRA adapter, not a model",
        "merge it into its base model with peft: model.merge_and_unload().save_pretrained(new_folder)",
    ),
    (("*.onnx",), "an ONNX graph", "download model.safetensors of the same repository; ONNX holds no trainable model"),
    (("*.gguf",), "GGUF weights of llama.cpp", "download model.safetensors of the same repository"),
    (
        ("*.safetensors",),
        "safetensors of another name",
        "rename the file to model.safetensors if it holds the weights of this config.json",
    ),
    (
        ("*.pt", "*.pth", "*.bin"),
        "PyTorch files of another name",
        "if it is a state dict: rename it to pytorch_model.bin; if it is a training checkpoint: load it where you "
        "trust it and save the model alone with model.save_pretrained(folder)",
    ),
)
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")
"""Files that the Trainer saves next to a model; they hold no weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFiles:
    """The weight files of one checkpoint; every path exists, is a plain file and stays in its place."""

    folder: Path
    """The folder they were looked for in."""
    kind: Kind
    """How to read them."""
    paths: tuple[Path, ...]
    """The files with tensors, in the order of their names; one where the checkpoint is not sharded."""
    index: Path | None = None
    """The index file of a sharded checkpoint."""
    shard_of: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Tensor → the shard that the index says it lies in."""
    others: tuple[str, ...] = ()
    """Names of further weight files in the folder that were not taken."""


def find_checkpoint(folder: Path) -> CheckpointFiles:
    """The weight files of a folder: safetensors before `.bin`, one file before shards, as transformers prefers.

    Raises:
        CheckpointError: no weights, weights of a kind that is not read (the hint says what to do), a link or
            a shard name that leaves the folder, or a shard that is absent.
    """
    folder = Path(folder)
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {reason(error)}", file=str(folder)) from None
    for name, kind in _WANTED:
        path = plain_file(folder, name)
        index = plain_file(folder, f"{name}.index.json")
        if path is not None:
            return CheckpointFiles(folder=folder, kind=kind, paths=(path,), others=_others(names, {name}))
        if index is not None:
            return _sharded(folder, index, kind, names)
    raise _nothing_to_read(folder, names)


def _sharded(folder: Path, index: Path, kind: Kind, names: list[str]) -> CheckpointFiles:
    shard_of = _read_weight_map(index)
    shards = sorted(set(shard_of.values()))
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"{index} names {len(shards):,} shards; at most {MAX_SHARDS:,} are read", file=str(index))
    paths = []
    for shard in shards:
        path = plain_file(folder, shard)
        if path is None:
            lost = [tensor for tensor, name in shard_of.items() if name == shard]
            raise CheckpointError(
                f"{shard} is named in {index.name} but is not in {folder}: {len(lost)} tensors are lost with it, "
                f"such as {lost[0]}",
                file=str(folder / shard),
                tensor=lost[0],
                hint="download the missing shard, or the whole checkpoint again",
            )
        paths.append(path)
    others = _others(names, {*shards, index.name})
    return CheckpointFiles(folder=folder, kind=kind, paths=tuple(paths), index=index, shard_of=shard_of, others=others)


def _read_weight_map(index: Path) -> dict[str, str]:
    where = str(index)
    shard_of = read_json_object(index, what="shard index").get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(
            f"{where} has no weight_map, the object that says which shard holds which tensor",
            file=where,
            hint="download the index again, or save the model again with save_pretrained",
        )
    for tensor, shard in shard_of.items():
        if not isinstance(shard, str) or not is_plain_name(shard):
            raise CheckpointError(
                f"{where} puts tensor {shown(tensor)} into {shown(shard)}, which is no name of a file in this folder",
                file=where,
                tensor=tensor,
                hint="a path that leaves the folder is refused; put the shard next to its index",
            )
    return shard_of


def _others(names: list[str], taken: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in taken and _describe(name) is not None)


def _describe(name: str) -> tuple[str, str] | None:
    """What a weight file of another kind is, and what to do about it; None for a file that is no weights."""
    if any(fnmatchcase(name, pattern) for pattern in _NO_WEIGHTS):
        return None
    for patterns, what, fix in _FOREIGN:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return what, fix
    return None


def _nothing_to_read(folder: Path, names: list[str]) -> CheckpointError:
    order = {what: place for place, (_, what, _) in enumerate(_FOREIGN)}
    found = [(order[described[0]], name, *described) for name in names if (described := _describe(name)) is not None]
    if not found and exported_file(str(folder)) is not None:
        return bad_file(
            folder,
            "is an exported model (ONNX), whose weights cannot be read: it runs on the CPU as it is",
            "give the folder that it was exported from; evaluate, predict, encode, compare and serve take this one",
        )
    if not found:
        return CheckpointError(
            f"{folder} holds no weights: no model.safetensors and no pytorch_model.bin",
            file=str(folder / "model.safetensors"),
            hint="download model.safetensors of the model, or save it again with model.save_pretrained(folder)",
        )
    _, name, what, fix = min(found)
    return CheckpointError(
        f"{folder} holds {name}: {what}, and no model.safetensors", file=str(folder / name), hint=fix
    )


def cached_snapshot(hub_id: str) -> Path | None:
    """The snapshot folder of a repository with its weights, in the local cache; None when it is not there."""
    if not looks_like_hub_id(hub_id):
        return None
    from huggingface_hub import try_to_load_from_cache

    for name in [name for whole, _ in _WANTED for name in (whole, f"{whole}.index.json")]:
        found = try_to_load_from_cache(hub_id, name)
        if isinstance(found, str):
            return Path(found).parent
    return None
