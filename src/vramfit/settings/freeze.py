"""`freeze`: parameters that do not learn."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from vramfit.errors import WorkloadError
from vramfit.settings.setting import Estimate, Module, Setting, Technique, Workload
from vramfit.settings.values import Value, is_count, is_text, number_or_text
from vramfit.units import plain, shown

if TYPE_CHECKING:
    from torch.nn import Parameter

NAMES = ("embeddings", "encoder", "backbone")


@dataclass(frozen=True, kw_only=True)
class Frozen(Value):
    """Parts by name, the k lowest layers, patterns of parameter names, or several of these."""

    optional: bool = True
    metavar: str | None = "NAME,…"
    kind: ClassVar[Any] = str | int | tuple[str, ...]

    def normal(self, value: Any) -> Any:
        value = plain(value)
        parts = value.split(",") if isinstance(value, str) and "," in value else value
        if not isinstance(parts, tuple | list):
            return value
        parts = tuple(map(plain, parts))
        return tuple(part.strip() if isinstance(part, str) else str(part) if is_count(part) else part for part in parts)

    def problems(self, name: str, value: Any) -> list[str]:
        if value is None or is_text(value, *NAMES) or is_count(value):
            return []
        if isinstance(value, tuple) and value and all(isinstance(p, str) and p for p in value):
            wrong = [p for p in value if p.isdecimal() and not is_count(int(p[:20]))]
            return [f"{name} {shown(p)} is not a number of layers" for p in wrong]
        if isinstance(value, str) and any(c in value for c in ".*?["):
            return []
        return [
            f"{name} {shown(value)} is not {', '.join(NAMES)}, a number of layers, "
            "patterns of parameter names such as 'bert.encoder.layer.0.*', or several of these"
        ]

    def parse(self, text: str) -> int | str | tuple[str, ...]:
        parts = tuple(part.strip() for part in text.split(","))
        return parts if len(parts) > 1 else number_or_text(parts[0])


def freezes_layers(w: Workload) -> bool:
    """Whether no layer learns."""
    return bool({"encoder", "backbone"} & set(w.freeze if isinstance(w.freeze, tuple) else (w.freeze,)))


def is_frozen(w: Workload) -> bool:
    """Whether parameters do not learn that could."""
    return w.freeze is not None


def has_same_layers(w: Workload) -> bool:
    """Whether all layers do the same: each learns, and all or none are computed again."""
    return w.num_checkpointed is None and w.freeze in (None, "embeddings")


class Freeze(Setting):
    keyword, order, applied = "freeze", 150, 30
    is_trainers_own = True
    value = Frozen()
    label, modes, is_basic = "Frozen", ("train",), True
    labels = (("", "nothing"), *((name, name) for name in NAMES))
    help = "Parameters that are not trained: embeddings, encoder, backbone, the K lowest layers, name patterns."
    pattern = r"^(embeddings|encoder|backbone|[1-9][0-9]{0,2})$"  # names of parameters are not for strangers
    is_planned = True
    asked = (freezes_layers, is_frozen, has_same_layers)
    allows = (("freeze", "parameters that do not learn"),)
    techniques = (
        Technique(
            values=("embeddings", "encoder", "backbone", "K", "PATTERNS"),
            kind="different training",
            does="parameters that do not learn need no gradient, no state and often no activations",
            costs="little for the embeddings, much for the whole backbone",
        ),
    )

    def advised(self, now: Estimate) -> Iterator[dict[str, str]]:
        w = now.workload
        if w.trains and not w.is_frozen and not w.has_adapters:
            yield {self.keyword: "embeddings"}

    def in_few_layers(self, w: Workload) -> str | int | None:
        if isinstance(w.freeze, tuple):
            raise LookupError("layers by name may not be among two")
        return 1 if isinstance(w.freeze, int) else w.freeze  # one that learns, above one that does not

    def is_applied_for(self, w: Workload) -> bool:
        return True

    def apply(self, model: Module, w: Workload) -> None:
        apply(model, w.freeze)

    def words(self, w: Workload) -> str | None:
        if w.freeze is None:
            return None
        if isinstance(w.freeze, int):
            return f"freeze {w.freeze} layers"
        return f"freeze {', '.join(w.freeze) if isinstance(w.freeze, tuple) else w.freeze}"


def apply(model: Module, freeze: str | int | tuple[str, ...] | None) -> None:
    """Freeze in place.

    Args:
        freeze: `embeddings`; `encoder` (embeddings and all layers); `backbone` (all but the head); a number of
            lowest layers, embeddings included; or a pattern of parameter names. A tuple may mix them, with
            numbers as text.

    Raises:
        WorkloadError: more layers than there are, a pattern that matches nothing, or nothing left to learn.
    """
    if freeze is None:
        return
    for part in freeze if isinstance(freeze, tuple) else (freeze,):
        for parameter in _chosen(model, int(part) if str(part).isdecimal() else part):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise WorkloadError([f"freeze {freeze!r} leaves nothing to learn"])


def _chosen(model: Module, freeze: str | int) -> "list[Parameter]":
    """The parameters that one name, number or pattern stands for."""
    from vramfit.models.anatomy import encoder_layers, head_parameters

    if freeze == "backbone":
        head = set(head_parameters(model))
        return [parameter for name, parameter in model.named_parameters() if name not in head]
    if freeze == "embeddings":
        return _embedding_parameters(model)
    if freeze == "encoder" or isinstance(freeze, int):
        layers = encoder_layers(model)
        count = len(layers) if freeze == "encoder" else int(freeze)
        if count > len(layers):
            raise WorkloadError([f"freeze {count}: the model has {len(layers)} layers"])
        return _embedding_parameters(model) + [p for layer in layers[:count] for p in layer.parameters()]
    found = [p for name, p in model.named_parameters() if fnmatchcase(name, freeze)]
    if not found:
        raise WorkloadError([f"freeze {freeze!r} matches no parameter"])
    return found


def _embedding_parameters(model: Module) -> "list[Parameter]":
    from vramfit.models.anatomy import embeddings

    part = embeddings(model)
    if part is None:
        raise WorkloadError([f"freeze: {type(model).__name__} has no embeddings"])
    return list(part.parameters())
