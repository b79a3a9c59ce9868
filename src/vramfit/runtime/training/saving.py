"""The trained model as a normal `transformers` folder, whatever techniques it was trained with.

LoRA adapters are merged into the weights beside them. Weights that were quantized to int8 did not learn: they are
saved as the source has them, in full precision, so that plain `transformers` loads the folder. What learned beside
them is saved as it is; it has learned on the outputs of the rounded weights, which differ by little.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import VramfitError
from vramfit.models.resolve import ResolvedModel
from vramfit.models.sentence_folder import files_of, layer_folder
from vramfit.quiet import CHATTY, quiet
from vramfit.records.codec import FULL_DISK
from vramfit.runtime.data.samples import LONGEST, Samples
from vramfit.tasks import find_task
from vramfit.tasks.embedding import HeadParts
from vramfit.tasks.parts.distilled import PROJECTION
from vramfit.tasks.parts.heads import PROBLEM_TYPES
from vramfit.tasks.parts.pooling import NAME, EmbeddingHead, head_of

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the format (safetensors 0.8)."""
ALIGNMENT = 8
READ_BYTES = 2**22


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write plain tensors, and see them on the disk.

    Raises:
        OSError: as the system says it: a full disk, a folder that is gone.
    """
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    # out of sight of an emulated GPU, which would take host memory for its own
    with path.open("wb") as file, _disable_current_modes(), torch.no_grad():
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            if tensor.numel():
                file.write(_bytes(tensor))
        sync(file)


def write_text(path: Path, text: str) -> None:
    """Write text, and see it on the disk."""
    with path.open("wb") as file:
        file.write(text.encode())
        sync(file)


def sync(file: object) -> None:
    """Wait until the disk has a file."""
    file.flush()  # type: ignore[attr-defined]
    os.fsync(file.fileno())  # type: ignore[attr-defined]


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's entries; systems that cannot are let be."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    made = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            made.update(chunk)
    return made.hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


TEMPORARY = ".model.new"
OF_HEAD = ("id2label", "label2id", "problem_type", "thresholds")
"""What a configuration says of a head that has learned."""
BASE = ".base_layer"
"""What peft puts into the name of a layer that has adapters."""


def save_model(
    model: Any, tokenizer: Any, output: Path, *, load_source: Callable[[], Any], max_length: int | None = None
) -> None:
    """Write configuration, weights and tokenizer into a folder; all of them or none.

    A model with a head that pools becomes a folder of sentence-transformers.

    Args:
        model: as it was trained.
        load_source: gives the source's model on the host, untouched; called where the trained one cannot be saved.
        max_length: tokens at which texts were cut; None takes what the tokenizer says.

    Raises:
        VramfitError: the disk is full or cannot be written.
    """
    temporary = output / TEMPORARY
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with _disable_current_modes(), torch.no_grad(), quiet(*CHATTY), _no_bars():
            plain = model if is_plain(model) else merged(model, load_source())
        write_model(plain, tokenizer, temporary, max_length)
        _put_in_place(temporary, output)
    except Exception as error:  # the writer of safetensors has an error of its own for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        full = getattr(error, "errno", None) in FULL_DISK or "os error 28" in str(error)
        what = "the disk is full" if full else f"cannot write ({error})"
        raise VramfitError(
            f"{what}: the model was not saved in {output}; its last checkpoint is whole",
            hint="make room and run the same command with --resume (resume=True)",
        ) from None


def write_model(plain: Any, tokenizer: Any, folder: Path, max_length: int | None = None) -> None:
    """Write a model of transformers and its tokenizer into a folder, with what follows the encoder where it pools.

    Args:
        max_length: tokens at which texts are cut; None takes what the tokenizer says.

    Raises:
        OSError, SafetensorError: the disk is full or cannot be written.
    """
    with _disable_current_modes(), torch.no_grad(), quiet(*CHATTY), _no_bars():
        state, head = _on_host(plain), head_of(plain)
        of_head = {name: state.pop(name) for name in list(state) if name.startswith(f"{NAME}.")}
        state = {name: value for name, value in state.items() if not name.startswith(f"{PROJECTION}.")}
        plain.save_pretrained(folder, state_dict=state, save_original_format=False)  # which `load` opens
        tokenizer.save_pretrained(folder)
        if head is not None:
            _save_head(head, of_head, folder, (plain.config.hidden_size, max_length or _longest(tokenizer)))


def _save_head(
    head: EmbeddingHead, state: Mapping[str, torch.Tensor], folder: Path, sizes: tuple[int, int | None]
) -> None:
    """The modules after the encoder, as sentence-transformers has them: each with a folder of its own.

    Args:
        state: the head's tensors on the host, by their names in the model.
        sizes: of the encoder's vectors, and tokens at which texts are cut.
    """
    parts = replace(head.parts or HeadParts(), pooling=head.pooling)
    for path, content in files_of(parts, *sizes).items():
        (folder / path).parent.mkdir(exist_ok=True)
        write_text(folder / path, json.dumps(content, indent=2))
    for place, layer in enumerate(parts.layers):
        begins = f"{NAME}.layers.{place}."
        tensors = {name.removeprefix(begins): state[name] for name in state if name.startswith(begins)}
        if tensors:
            write_tensors(folder / layer_folder(place, layer) / "model.safetensors", tensors)


def _longest(tokenizer: Any) -> int | None:
    """Tokens that a tokenizer cuts at; None where it has no limit, which transformers writes as a huge number."""
    found = getattr(tokenizer, "model_max_length", None)
    return found if isinstance(found, int) and found <= LONGEST else None


@contextmanager
def _no_bars() -> Iterator[None]:
    """transformers shows bars of its own while it writes; a run has one already."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _on_host(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's state on the host; what is shared stays shared, so that it is saved once."""
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    return {
        name: copies.setdefault((tensor.data_ptr(), tensor.shape), tensor.detach().cpu())
        for name, tensor in model.state_dict().items()
    }


def _put_in_place(temporary: Path, output: Path) -> None:
    """Every file to its place; the configuration, which makes a folder a model, comes last."""
    inside = [path for path in temporary.rglob("*") if path.is_file()]
    files = sorted(inside, key=lambda path: (path == temporary / "config.json", path))
    mode = stat.S_IMODE(files[-1].stat().st_mode)  # safetensors lets only the owner read what it writes
    for path in files:
        path.chmod(mode)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    for path in files:
        place = output / path.relative_to(temporary)
        place.parent.mkdir(exist_ok=True)
        os.replace(path, place)
        if place.parent != output:
            sync_folder(place.parent)
    shutil.rmtree(temporary)
    sync_folder(output)


def is_plain(model: torch.nn.Module) -> bool:
    """Whether a model's weights are as `transformers` expects them: no adapters, nothing quantized."""
    adapted = any(hasattr(module, "lora_A") for module in model.modules())
    return not adapted and not any(hasattr(p, "__tensor_flatten__") for p in model.parameters())


def put_together(source: Any, learned: Mapping[str, torch.Tensor], config: Any) -> Any:
    """The source's model with learned weights, of all processes, put into it; `config` is the trained one."""
    _say_head(source.config, config)
    own = dict(source.named_parameters())
    with torch.no_grad():
        for name, tensor in learned.items():
            own[name].copy_(tensor)
    return source


def merged(model: torch.nn.Module, source: torch.nn.Module) -> Any:
    """The source's model with everything that was learned put into it."""
    own = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            own[name.replace(BASE, "")].copy_(parameter.detach().cpu())
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            adapted: Any = module
            weight = own[f"{name}.weight"]
            for adapter in adapted.lora_A:
                weight.add_(adapted.get_delta_weight(adapter).detach().to("cpu", weight.dtype))
    config: Any = source.config
    _say_head(config, model.config)
    return source


def _say_head(config: Any, trained: Any) -> None:
    """Have a configuration say of its head what that of the trained model says."""
    for name in OF_HEAD:
        if name in vars(trained):
            setattr(config, name, vars(trained)[name])


OF_FORMER_HEAD = ("thresholds", "sentence_transformers", "sbert_ce_default_activation_function")
"""What a configuration may say of a head that another one takes the place of."""


def describe_head(config: Any, samples: Samples, thresholds: Mapping[str, float] | None = None) -> None:
    """Have a configuration say what its head has learned, as transformers and a saved model's reader know it."""
    names = samples.label_names
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: i for i, name in enumerate(names)}
    if samples.problem is not None:
        config.problem_type = PROBLEM_TYPES[samples.problem]
        for name in OF_FORMER_HEAD:
            vars(config).pop(name, None)
    vars(config).update(find_task(samples.task).says)
    if thresholds:
        config.thresholds = [thresholds[name] for name in names]


def source_fingerprint(resolved: ResolvedModel) -> str:
    """What the frozen weights of a resumed run are recognised by: the sizes of the source's files."""
    folder = resolved.folder
    if folder is None:
        return resolved.name
    sizes = sorted((p.name, p.stat().st_size) for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    return ", ".join(f"{name} of {size} bytes" for name, size in sizes) or resolved.name
