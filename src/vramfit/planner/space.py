"""The space: recipes that a plan may be made of, for a request, a model and a GPU."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from vramfit.errors import WorkloadError
from vramfit.planner.request import Request
from vramfit.settings import BF16_CAPABILITY, KINDS, PLANNED, SETTINGS, Setting, conflicts, used_by, usual_precision
from vramfit.settings.setting import Kind
from vramfit.workload import Workload

LORA_RANK = 16
"""Of adapters that the planner adds: twice peft's default, still below one percent of the weights."""
PRICES = {"checkpointing": 0.02, "adamw-8bit": 0.15, "amp": 0.02, "weights": 0.25}
"""What a change must bring in time to be taken: near ties go to the simpler settings, and moments are not rounded for
a few percent. Steps whose layers wait in host memory took 1.2 to 1.5 times what was predicted, on an H200."""
REHEARSED = {**PRICES, "checkpointing": 1.5, "adamw-8bit": 7.0, "amp": 20.0}
"""The same on an emulated GPU, which computes on the CPU: what is slow there is for where nothing else fits."""
PRICED = {
    "checkpointing": "layers that are computed twice",
    "adamw-8bit": "moments in 8 bits",
    "amp": "autocast",
    "weights": "layers that wait in host memory",
}
"""The same changes in words."""
MANY_SIZES, LEAST_STEP = 64, 0.05
"""Of more sizes than this, those beyond it are tried at steps of a share: a batch of a million has two thousand."""


def _planned_default(setting: Setting) -> Any:
    return setting.default if setting.planned_default is None else setting.planned_default


CHOSEN_APART = ("precision", "optimizer", "attention", "offload", "compile", "graphs", "fused")
"""Settings that stages of the search choose; all others are as they were given, or as plans have them."""
IN_RECIPE = tuple(name for name in PLANNED if name not in ("micro_batch", "accumulate"))

if TYPE_CHECKING:

    class _Settings:
        """A field for each setting that a plan chooses."""

        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **keywords: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    _Settings = make_dataclass(
        "_Settings",
        [(name, Any, field(default=_planned_default(SETTINGS[name]))) for name in IN_RECIPE],
        namespace={"__module__": __name__},
        frozen=True,
        kw_only=True,
        slots=True,
    )


class Recipe(_Settings):
    """All settings that a plan chooses but how the batch is split."""

    __slots__ = ()

    def keywords(self) -> dict[str, Any]:
        """As keywords of `Workload`: what cannot be beside the other settings is left at its default."""
        chosen = {name: getattr(self, name) for name in IN_RECIPE}
        return {name: SETTINGS[name].settled(chosen) for name in IN_RECIPE}

    @property
    def price(self) -> float:
        """What its time counts for beside simpler settings."""
        return self.price_by(PRICES)

    def price_by(self, prices: Mapping[str, float]) -> float:
        """The same by other prices."""
        return sum((prices[name] for name in self.priced), 1.0)

    @property
    def priced(self) -> list[str]:
        """What of it has a price."""
        has = {
            "checkpointing": self.checkpointing is not None,
            "adamw-8bit": self.optimizer == "adamw-8bit",
            "weights": self.offload == "weights",
            "amp": self.precision.startswith("amp"),
        }
        return [name for name, is_there in has.items() if is_there]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is learned, and how: settings that must be allowed by name."""

    needs: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """As on the command line."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())


def trainings(request: Request, num_layers: int, *, all_allowed: bool = False) -> Iterator[Training]:
    """What may be learned, the mildest change first; the first is what was asked for."""
    half = max(num_layers // 2, 1)
    ladder: tuple[dict[str, Any], ...] = (
        {},
        {"precision": "bf16"},
        {"freeze": "embeddings"},
        {"optimizer": "adafactor"},
        {"lora": LORA_RANK},
        {"freeze": half},
        {"quantize": "int8"},
        {"lora": LORA_RANK, "quantize": "int8"},
        {"freeze": "encoder"},
        {"freeze": "encoder", "quantize": "int8"},
        {"optimizer": "sgd"},
    )
    for settings in ladder:
        needs = frozenset(v if k in ("precision", "optimizer", "quantize") else k for k, v in settings.items())
        if (all_allowed or needs <= request.allow) and not set(settings) & set(request.fixed):
            yield Training(needs=needs, settings=settings)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits in host memory."""

    offload: str | None = None
    in_16_bits: bool = False
    """Weights on the device in bfloat16, over masters in fp32."""


NOTHING = Waiting()


def waitings(request: Request, training: Training, *, able: bool) -> list[Waiting]:
    """What may wait in host memory: nothing, then the levels, then these with weights in 16 bits.

    Args:
        able: whether the model can be checkpointed.
    """
    given = {**request.fixed, **training.settings}
    levels = [given["offload"]] if "offload" in given else ["optimizer", *(["weights"] if able else [])]
    if not request.offloads or {"lora", "quantize"} & set(given):  # little of theirs could wait
        levels = [level for level in levels if "offload" in given]
    rounded = [] if request.exact or "precision" in given else [Waiting(level, in_16_bits=True) for level in levels]
    return [*([] if "offload" in given else [NOTHING]), *map(Waiting, levels), *rounded]


def recipes(
    request: Request,
    training: Training,
    base: Workload,
    capability: tuple[int, int],
    waiting: Waiting = NOTHING,
    *,
    packs: bool = False,
    compiles: bool = False,
    graphs: bool = False,
    casts: str = "together",
    fused: bool = True,
) -> list[Recipe]:
    """Recipes without checkpointing (unless it is needed or asked for), the likeliest to be fast first.

    Args:
        packs: with sequences end to end, which is for 16 bits and GPUs that have the kernel.
        compiles: with compiled layers.
        graphs: with recorded passes.
        casts, fused: how autocast's casts are made, and whether layers can be fused, where that is not given.
    """
    given, offload = {**request.fixed, **training.settings}, waiting.offload
    precisions = ["bf16"] if waiting.in_16_bits else _precisions(request, capability)
    precisions = [given["precision"]] if "precision" in given else precisions
    optimizers = [given["optimizer"]] if "optimizer" in given else _optimizers(request, offload)
    kept: dict[str, Any] = {"casts": casts, "fused": fused} | {
        name: given[name] for name in IN_RECIPE if name in given and name not in CHOSEN_APART
    }
    kept |= {"offload": offload, "compile": compiles, "graphs": graphs}
    if offload == "weights":
        kept.setdefault("checkpointing", "full")
    attention = "packed" if packs else base.attention
    made = [
        Recipe(precision=precision, optimizer=optimizer, attention=attention, **kept)
        for optimizer in optimizers
        for precision in precisions
    ]
    for setting in SETTINGS.values():
        if setting.proposes and setting.keyword not in given:
            made += [replace(recipe, **{setting.keyword: value}) for recipe in made for value in setting.proposes]
    return [recipe for recipe in made if _is_possible(recipe, base, capability)]


def _precisions(request: Request, capability: tuple[int, int]) -> list[str]:
    if request.exact:
        return ["fp32"]
    if request.rehearses:  # a CPU has no tf32
        return ["fp32", usual_precision(capability, infers=False)]
    return [usual_precision(capability, infers=False), "tf32" if capability >= BF16_CAPABILITY else "fp32"]


def _optimizers(request: Request, offload: str | None) -> list[str]:
    return ["adamw-fused"] if request.exact or offload is not None else ["adamw-fused", "adamw-8bit"]


def _is_possible(recipe: Recipe, base: Workload, capability: tuple[int, int]) -> bool:
    try:
        return not conflicts(replace(base, **recipe.keywords()), capability, "")
    except WorkloadError:
        return False


def micro_batches(request: Request, batch: int) -> list[int]:
    """Samples of a forward pass worth trying, most first: for each number of passes the least that does."""
    fixed = request.fixed.get("micro_batch")
    if fixed is None and "accumulate" in request.fixed:
        fixed = -(-batch // request.fixed["accumulate"])
    if fixed is not None:
        return [fixed]
    found, size = [], batch
    while size > 0:
        found.append(-(-batch // -(-batch // size)))  # 32 samples in passes of 12 are as many as in passes of 11
        size = found[-1] - 1
    return found if len(found) <= MANY_SIZES else _thinned(found)


def _thinned(sizes: list[int]) -> list[int]:
    """Of very many sizes, most first, those that make a difference; all of the small ones."""
    kept = sizes[:1]
    for size in sizes[1:]:
        if size <= MANY_SIZES or size <= (1 - LEAST_STEP) * kept[-1]:
            kept.append(size)
    return kept


def learns_in_layers(recipe: Recipe) -> bool:
    """Whether the layers keep anything for backward."""
    return recipe.lora is not None or recipe.freeze not in ("encoder", "backbone")


def checkpointing_steps(recipe: Recipe, num_layers: int, *, able: bool) -> list[int]:
    """Numbers of layers whose results may be computed twice; none where it is fixed or of no use."""
    if recipe.checkpointing is not None or recipe.graphs or not able or not learns_in_layers(recipe):
        return []
    return list(range(1, num_layers + 1))


def with_layers(recipe: Recipe, num_checkpointed: int, num_layers: int) -> Recipe:
    """The recipe with so many layers computed twice."""
    if not num_checkpointed:
        return recipe
    return replace(recipe, checkpointing="full" if num_checkpointed == num_layers else num_checkpointed)


def strongest(workload: Workload) -> Kind:
    """The class of the strongest change that a workload makes."""
    return max((t.kind for t in used_by(workload)), key=KINDS.index, default="free")
