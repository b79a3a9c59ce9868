"""`checkpointing`: layers computed again in backward."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vramfit.errors import WorkloadError
from vramfit.settings.setting import Estimate, Module, Setting, Technique, Workload
from vramfit.settings.values import Value, is_count, is_text, number_or_text


@dataclass(frozen=True, kw_only=True)
class Layers(Value):
    """`full`, or a number of layers."""

    optional: bool = True
    metavar: str | None = "full|K"
    kind: ClassVar[Any] = Literal["full"] | int

    def is_right(self, value: Any) -> bool:
        return is_text(value, "full") or is_count(value)

    def wanted(self, value: Any) -> str:
        return "'full' or a number of layers"

    def parse(self, text: str) -> int | str:
        return number_or_text(text)


def is_checkpointed(w: Workload) -> bool:
    """Whether layers are computed again in backward."""
    return w.checkpointing is not None


def is_fully_checkpointed(w: Workload) -> bool:
    """Whether all layers are computed again in backward."""
    return w.checkpointing == "full"


def num_checkpointed(w: Workload) -> int | None:
    """How many of the lowest layers are computed again in backward; None where it is all of them or none."""
    return w.checkpointing if isinstance(w.checkpointing, int) else None


class Checkpointing(Setting):
    keyword, order, applied = "checkpointing", 140, 70
    value = Layers()
    label, modes, is_basic = "Checkpointing", ("train", "forward"), True
    labels = (("", "none"), ("full", "all layers"))
    help = "Activation checkpointing: recompute all layers in the backward pass (full), or the first K."
    pattern = r"^(full|[1-9][0-9]{0,2})$"
    is_observed = True
    is_planned = is_live = True
    in_trace = "step"
    asked = (is_checkpointed, is_fully_checkpointed, num_checkpointed)
    must_match_on_resume = is_kept_on_resume = False
    techniques = (
        Technique(
            values=("full", "K"),
            kind="free",
            does="a layer keeps only its input and is computed again in backward",
            costs="none: time, about a third of a step, and more where the GPU waits for the host",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.mode == "infer":
            yield "checkpointing keeps nothing: mode is infer"

    def advised(self, now: Estimate) -> Iterator[dict[str, str]]:
        if now.workload.mode != "infer" and not now.workload.is_fully_checkpointed:
            yield {self.keyword: "full"}

    def trainer_arguments(self, w: Workload) -> dict[str, Any]:
        on = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        return on if w.is_fully_checkpointed else {}

    def in_few_layers(self, w: Workload) -> Any:
        if w.num_checkpointed is not None:
            raise LookupError("so many layers are not among two")
        return super().in_few_layers(w)

    def apply(self, model: Module, w: Workload) -> None:
        apply(model, w.checkpointing)

    def change(self, model: Module, w: Workload) -> None:
        if getattr(model, "is_gradient_checkpointing", False):
            take_off(model)
        apply(model, w.checkpointing)


def apply(model: Any, checkpointing: str | int | None) -> None:
    """Checkpoint all layers (`full`) or the first k, in place.

    Raises:
        WorkloadError: a model that cannot, or more layers than there are.
    """
    if checkpointing is None:
        return
    from vramfit.models.anatomy import encoder_layers

    if not getattr(model, "supports_gradient_checkpointing", False):
        raise WorkloadError([f"checkpointing: {type(model).__name__} does not support it"])
    logging.getLogger("transformers.utils.generic").addFilter(_is_not_of_caches)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if checkpointing == "full":
        return
    layers = encoder_layers(model)
    if int(checkpointing) > len(layers):
        raise WorkloadError([f"checkpointing {checkpointing}: the model has {len(layers)} layers"])
    for layer in layers[int(checkpointing) :]:
        layer.gradient_checkpointing = False  # type: ignore[assignment]


def turn_on(model: Any) -> bool:
    """Checkpoint all layers of a model that trains; says whether there was any to turn on."""
    able = model.training and getattr(model, "supports_gradient_checkpointing", False)
    if not able or getattr(model, "is_gradient_checkpointing", False):
        return False
    apply(model, "full")
    return True


def take_off(model: Any) -> None:
    """Let every layer keep what its backward needs, in place."""
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()


def _is_not_of_caches(record: logging.LogRecord) -> bool:
    """Drops the warning that checkpointing sets `use_cache` to False: an encoder has no cache."""
    return "use_cache=True` is incompatible" not in record.getMessage()
