"""Students made of their teacher: some of its layers, with their weights, and all that is around them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.loader.load import load_request, make_request
from vramfit.models.anatomy import layer_list, num_layer_applications
from vramfit.runtime.trained import TrainedModel
from vramfit.runtime.training.saving import save_model
from vramfit.units import counted


def spread(num_kept: int, num_layers: int) -> tuple[int, ...]:
    """Layers to keep, by number from 0: as far apart as can be, the first and the last among them.

    >>> spread(3, 6), spread(6, 12), spread(1, 6)
    ((0, 2, 5), (0, 2, 4, 7, 9, 11), (5,))
    """
    if num_kept == 1:
        return (num_layers - 1,)
    return tuple(place * (num_layers - 1) // (num_kept - 1) for place in range(num_kept))


def chosen_layers(kept: int | Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The layers of a student, by number from 0.

    Args:
        kept: how many, or which; None takes half of them.

    Raises:
        WorkloadError: a teacher of so many layers does not have them, or all of them are kept.
    """
    count = max(num_layers // 2, 1) if kept is None else kept
    if not isinstance(count, int):
        chosen = tuple(sorted(set(count)))
        if not chosen or len(chosen) < len(count) or chosen[0] < 0 or chosen[-1] >= num_layers:
            shown = ",".join(map(str, count))
            raise WorkloadError([f"keep_layers {shown}: the teacher's layers are numbered from 0 to {num_layers - 1}"])
        return chosen
    if not 1 <= count < num_layers:
        raise WorkloadError(
            [f"keep_layers {count}: the teacher has {counted(num_layers, 'layer')}, and a student has fewer"],
            hint=f"keep 1 to {num_layers - 1}; half of them is {max(num_layers // 2, 1)}",
        )
    return spread(count, num_layers)


def make_student(teacher: TrainedModel, output: Path, kept: Sequence[int]) -> None:
    """Write a folder with a model that has these layers of its teacher, its embeddings, head and tokenizer.

    Raises:
        WorkloadError: layers cannot be taken out of the teacher.
        CheckpointError: the teacher's weights cannot be read.
    """
    request = make_request(teacher.model, task=teacher.task, device="cpu", trust_remote_code=teacher.trust_remote_code)
    model: Any
    model, _ = load_request(request)
    keep_layers(model, kept)
    save_model(model, teacher.tokenizer, output, load_source=lambda: model, max_length=teacher.max_length)


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Take all other layers out of a model, in place; its configuration says so.

    Raises:
        WorkloadError: layers share their weights, or the family has something beside them that is counted by layers.
    """
    layers = layer_list(model)
    num_layers = num_layer_applications(model)
    name = type(model).__name__
    if layers is None or len(layers) != num_layers:
        held = counted(0 if layers is None else len(layers), "layer")
        raise WorkloadError(
            [f"{name} passes {num_layers} layers and holds the weights of {held}: none can be taken out"],
            hint="give a student: --student MODEL",
        )
    wanted = copy.deepcopy(model.config)
    for key, value in vars(wanted).items():  # such as layer_types
        if isinstance(value, list) and len(value) == num_layers:
            setattr(wanted, key, [value[place] for place in kept])
    wanted.num_hidden_layers = len(kept)
    for place in reversed([place for place in range(num_layers) if place not in set(kept)]):
        del layers[place]
    with torch.device("meta"):
        expected = {key: tuple(value.shape) for key, value in type(model)(wanted).state_dict().items()}
    found = {key: tuple(value.shape) for key, value in model.state_dict().items() if key in expected}
    if found != expected:
        different = next(key for key in expected if found.get(key) != expected[key])
        raise WorkloadError(
            [f"{name} with {counted(len(kept), 'layer')} would need other weights: {different}"],
            hint="give a student: --student MODEL",
        )
    vars(model.config).update(vars(wanted))
