"""The trained model as a normal `transformers` folder, whatever techniques it was trained with.

LoRA adapters are merged into the weights beside them. Weights that were quantized to int8 did not learn: they are
saved as the source has them, in full precision, so that plain `transformers` loads the folder. What learned beside
them is saved as it is; it has learned on the outputs of the rounded weights, which differ by little.
"""

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import VramfitError
from vramfit.records.codec import FULL_DISK
from vramfit.runtime.training.tensor_file import sync_folder

TEMPORARY = ".model.new"
BASE = ".base_layer"
"""What peft puts into the name of a layer that has adapters."""


def save_model(model: Any, tokenizer: Any, output: Path, *, load_source: Callable[[], Any]) -> None:
    """Write configuration, weights and tokenizer into a folder; all of them or none.

    Args:
        model: as it was trained.
        load_source: gives the source's model on the host, untouched; called where the trained one cannot be saved.

    Raises:
        VramfitError: the disk is full or cannot be written.
    """
    temporary = output / TEMPORARY
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with _disable_current_modes(), torch.no_grad(), _no_bars():
            plain = model if is_plain(model) else merged(model, load_source())
            plain.save_pretrained(temporary, state_dict=_on_host(plain))
            tokenizer.save_pretrained(temporary)
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
    files = sorted(temporary.iterdir(), key=lambda path: (path.name == "config.json", path.name))
    mode = stat.S_IMODE(files[-1].stat().st_mode)  # safetensors lets only the owner read what it writes
    for path in files:
        path.chmod(mode)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    for path in files:
        os.replace(path, output / path.name)
    temporary.rmdir()
    sync_folder(output)


def is_plain(model: torch.nn.Module) -> bool:
    """Whether a model's weights are as `transformers` expects them: no adapters, nothing quantized."""
    adapted = any(hasattr(module, "lora_A") for module in model.modules())
    return not adapted and not any(hasattr(p, "__tensor_flatten__") for p in model.parameters())


def put_together(source: Any, learned: Mapping[str, torch.Tensor]) -> Any:
    """The source's model with learned weights, gathered from all processes, put into it."""
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
    trained: Any = model.config
    config.id2label, config.label2id = trained.id2label, trained.label2id
    return source
