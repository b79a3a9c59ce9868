"""Students made of their teacher: some of its layers, or all of them narrower, and all that is around them."""

import copy
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.loader.load import load_request, make_request
from vramfit.models.anatomy import layer_list, num_layer_applications
from vramfit.runtime.trained import TrainedModel
from vramfit.runtime.training.saving import save_model
from vramfit.smaller.neurons import NUM_ROWS
from vramfit.smaller.rows import Rows, make_samples
from vramfit.smaller.widths import GIVE_STUDENT, narrow
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
        shown, last = ",".join(map(str, count)), num_layers - 1
        if not chosen or chosen[0] < 0 or chosen[-1] > last:
            raise WorkloadError([f"keep_layers {shown}: the teacher's layers are numbered from 0 to {last}"])
        if len(chosen) < len(count):
            named = ",".join(map(str, chosen))
            hint = f"name each layer once, by its number from 0 to {last}, such as --keep-layers {named}"
            raise WorkloadError([f"keep_layers {shown} names a layer twice"], hint=hint)
        return chosen
    if not 1 <= count < num_layers:
        raise WorkloadError(
            [f"keep_layers {count}: the teacher has {counted(num_layers, 'layer')}, and a student has fewer"],
            hint=f"keep 1 to {num_layers - 1}; half of them is {max(num_layers // 2, 1)}",
        )
    return spread(count, num_layers)


def make_student(
    teacher: TrainedModel, output: Path, kept: Sequence[int], *, hidden_size: int | None = None, rows: Rows
) -> None:
    """Write a folder with a model that has these layers of its teacher, its embeddings, head and tokenizer.

    Args:
        hidden_size: smaller than the teacher's; None keeps it.
        rows: that say which dimensions, heads and neurons matter.

    Raises:
        WorkloadError: layers cannot be taken out of the teacher, or its hidden size cannot be made smaller.
        DataError: rows that cannot be read.
        CheckpointError: the teacher's weights cannot be read.
    """
    request = make_request(teacher.model, task=teacher.task, device="cpu", trust_remote_code=teacher.trust_remote_code)
    model: Any
    model, _ = load_request(request)
    if len(kept) < num_layer_applications(model):
        keep_layers(model, kept)
    if hidden_size is not None:
        samples = make_samples(rows.first(rows.max_rows or NUM_ROWS), teacher)
        _adopt(model, narrow(model.eval(), hidden_size, samples), f"of hidden size {hidden_size:,}")
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
            hint=GIVE_STUDENT,
        )
    if first_is_special(layers) and 0 not in kept:
        raise WorkloadError(
            [f"the first layer of {name} is made otherwise than the others: none can take its place"],
            hint="keep it: --keep-layers 0,…",
        )
    wanted = copy.deepcopy(model.config)
    for key, value in vars(wanted).items():  # such as layer_types
        if isinstance(value, list) and len(value) == num_layers:
            setattr(wanted, key, [value[place] for place in kept])
    wanted.num_hidden_layers = len(kept)
    for place in reversed([place for place in range(num_layers) if place not in set(kept)]):
        del layers[place]
    _adopt(model, wanted, f"with {counted(len(kept), 'layer')}")


def first_is_special(layers: Iterable[torch.nn.Module]) -> bool:
    """Whether the first layer has other parameters than the others."""
    return len({tuple(name for name, _ in layer.named_parameters()) for layer in islice(layers, 2)}) > 1


def _adopt(model: Any, wanted: Any, how: str) -> None:
    """Give a model that was cut the configuration that says so.

    Raises:
        WorkloadError: it does not describe the weights.
    """
    with torch.device("meta"):
        expected = {key: tuple(value.shape) for key, value in type(model)(wanted).state_dict().items()}
    found = {key: tuple(value.shape) for key, value in model.state_dict().items() if key in expected}
    if found != expected:
        different = next(key for key in expected if found.get(key) != expected[key])
        raise WorkloadError([f"{type(model).__name__} {how} would need other weights: {different}"], hint=GIVE_STUDENT)
    vars(model.config).update(vars(wanted))
