"""Propose and filter: the recipes that a plan may be made of, for a job.

A ladder of proposals goes from what was asked for to what changes most. A proposal says what its recipes have in
common; `recipes` makes them of what the settings propose, and leaves out what contradicts itself or the GPU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.planner.heuristics import LEAST_STEP, LORA_RANK, MANY_SIZES, PRICES, Price
from vramfit.planner.job import Job, meta_model, num_layers, once
from vramfit.planner.request import SPLIT, Request
from vramfit.settings import (
    BF16_CAPABILITY,
    KINDS,
    PLANNED,
    SETTINGS,
    Kind,
    conflicts,
    having,
    record_of,
    used_by,
    usual_precision,
)
from vramfit.settings.attention import PACKED
from vramfit.workload import Workload

IN_RECIPE = tuple(name for name in PLANNED if name not in SPLIT)
OWN_KERNELS = having(own_kernels=True)

_Settings: Any = record_of([(name, Any, SETTINGS[name].usual) for name in IN_RECIPE], __name__)


class Recipe(_Settings):  # type: ignore[misc]
    """All settings that a plan chooses but how the batch is split."""

    __slots__ = ()

    def keywords(self) -> dict[str, Any]:
        """As keywords of `Workload`: what cannot be beside the other settings is left at its default."""
        chosen = {name: getattr(self, name) for name in IN_RECIPE}
        return {name: SETTINGS[name].settled(chosen) for name in IN_RECIPE}

    def eager(self) -> "Recipe":
        """The same with passes that are not captured."""
        return replace(self, graphs=False)

    @property
    def has_own_kernels(self) -> bool:
        """Whether layers run kernels of vramfit's own."""
        return any(self.keywords()[name] for name in OWN_KERNELS)

    @property
    def priced(self) -> list[Price]:
        """What of it has a price."""
        found = ((price, getattr(self, price.keyword)) for price in PRICES.values())
        return [p for p, value in found if (value in p.values if p.values else value is not None)]

    def price(self, *, rehearses: bool = False) -> float:
        """What its time counts for beside simpler settings."""
        return sum((price.rehearsed if rehearses else price.share for price in self.priced), 1.0)

    def of_weights(self) -> "Recipe":
        """A recipe with the same weights, of which as much learns, and nothing else."""
        precision = self.precision if self.has_bf16_weights else "fp32"
        same = {name: getattr(self, name) for name in ("attention", "freeze", "lora", "quantize")}
        return Recipe(**same, precision=precision, optimizer="sgd")

    def without_checkpointing(self) -> "Recipe":
        """The recipe with no layer computed twice."""
        return replace(self, checkpointing=None)

    def with_any_optimizer(self) -> "Recipe":
        """The recipe for comparisons in which the optimizer does not count."""
        return replace(self, optimizer=None)

    def of_passes(self) -> "Recipe":
        """A recipe whose passes are the same: the optimizer has no part in them, unless they are captured."""
        return self if self.captures_graphs else replace(self, optimizer=Recipe().optimizer)

    def steps_like(self, other: "Recipe") -> bool:
        """Whether both have the same optimizer."""
        return bool(self.optimizer == other.optimizer)

    def beside(self, other: "Recipe") -> str:
        """What it has that another has not, in words."""
        values = {name: getattr(self, name) for name in IN_RECIPE if getattr(self, name) != getattr(other, name)}
        return ", ".join(f"{name} {SETTINGS[name].shown(value)}" for name, value in values.items())

    def nearest(self, made: list["Recipe"]) -> list["Recipe"]:
        """Of several, those that are like it: in what waits, then in precision, then in the optimizer."""
        made = [r for r in made if r.offload == self.offload] or made
        alike = [r for r in made if r.arithmetic == self.arithmetic]
        return [r for r in alike if r.steps_like(self)] or alike or made

    def with_layers(self, num_checkpointed: int, num_layers: int) -> "Recipe":
        """The recipe with so many layers computed twice."""
        if not num_checkpointed:
            return self
        return replace(self, checkpointing="full" if num_checkpointed == num_layers else num_checkpointed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is learned, and how: settings that must be allowed by name."""

    needs: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """As on the command line."""
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())


def trainings(job: Job, *, all_allowed: bool = False) -> Iterator[Training]:
    """What may be learned, the mildest change first; the first is what was asked for."""
    ladder: tuple[dict[str, Any], ...] = (
        {},
        {"precision": "bf16"},
        {"freeze": "embeddings"},
        {"optimizer": "adafactor"},
        {"lora": LORA_RANK},
        {"freeze": max(num_layers(job) // 2, 1)},
        {"quantize": "int8"},
        {"lora": LORA_RANK, "quantize": "int8"},
        {"lora": LORA_RANK, "quantize": "nf4"},
        {"freeze": "encoder"},
        {"freeze": "encoder", "quantize": "int8"},
        {"optimizer": "sgd"},
    )
    for settings in ladder:
        needs = frozenset(v if v in dict(SETTINGS[k].allows) else k for k, v in settings.items())
        if (all_allowed or needs <= job.request.allow) and not set(settings) & set(job.request.fixed):
            yield Training(needs=needs, settings=settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What recipes that are searched together have in common."""

    training: Training = Training()
    offload: str | None = None
    """What waits in host memory."""
    in_16_bits: bool = False
    """Weights on the device in bfloat16, over masters in fp32 in host memory."""
    packs: bool = False
    """Sequences end to end, which is for 16 bits and GPUs that have the kernel."""
    adds: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are decided already, such as those that pay in long runs."""
    like: Recipe | None = None
    """A recipe that was chosen without `adds`; where memory is not short, only the same with them is proposed."""
    own_kernels: bool = True
    """Whether layers may run kernels of vramfit's own."""

    @property
    def offloads(self) -> bool:
        """Whether anything waits in host memory."""
        return self.offload is not None

    @property
    def captures_graphs(self) -> bool:
        """Whether passes are captured as CUDA graphs."""
        return bool(self.adds.get("graphs"))

    def on(self, base: Workload) -> Workload:
        """A job with the attention that it takes."""
        return replace(base, **PACKED) if self.packs else base

    def captured(self) -> "Proposal":
        """The same in packed passes that are captured as CUDA graphs."""
        return replace(self, packs=True, adds={**self.adds, "graphs": True})


def ladder(job: Job) -> Iterator[list[Proposal]]:
    """Proposals, the mildest first; of those that are as mild, the fastest is to be taken.

    Something waits in host memory only where nothing fits without that, and weights are rounded only where it must be.
    """
    for training in trainings(job):
        for _, rung in groupby(levels(job, training), key=lambda p: (p.offloads, p.in_16_bits)):
            yield list(rung)


def may_pack(job: Job) -> bool:
    """Whether sequences may lie end to end, if that is better: lengths are known, and no attention is asked for."""
    return job.lengths is not None and "attention" not in job.request.fixed and job.can_pack


def levels(job: Job, training: Training) -> list[Proposal]:
    """What may wait in host memory: nothing, then the levels, then these with weights in 16 bits."""
    request, given = job.request, {**job.request.fixed, **training.settings}
    offloads = [given["offload"]] if "offload" in given else ["optimizer", *(["weights"] if job.can_checkpoint else [])]
    may_wait = request.offloads and job.base.num_gpus == 1  # several have shards in place of that
    if not may_wait or {"lora", "quantize"} & set(given):  # little of theirs could wait
        offloads = [level for level in offloads if "offload" in given]
    plain = Proposal(training=training)
    made = [*([] if "offload" in given else [plain]), *(replace(plain, offload=level) for level in offloads)]
    if request.exact or "precision" in given:
        return made
    return [*made, *(replace(plain, offload=level, in_16_bits=True) for level in offloads)]


def recipes(job: Job, proposal: Proposal) -> list[Recipe]:
    """Recipes without checkpointing (unless it is needed or asked for), the likeliest to be fast first."""
    given, offload = {**job.request.fixed, **proposal.training.settings}, proposal.offload
    precisions = ["bf16"] if proposal.in_16_bits else _precisions(job)
    precisions = [given["precision"]] if "precision" in given else precisions
    optimizers = [given["optimizer"]] if "optimizer" in given else _optimizers(job.request, offload)
    kept = usual(job) | {name: given[name] for name in IN_RECIPE if name in given} | dict(proposal.adds)
    kept |= {"offload": offload, "attention": proposal.on(job.base).attention}
    if not proposal.own_kernels:
        kept |= dict.fromkeys(OWN_KERNELS, False)
    if offload == "weights" and "checkpointing" not in given:
        kept["checkpointing"] = "full"
    made = [
        Recipe(**(kept | {"precision": precision, "optimizer": optimizer}))
        for optimizer in optimizers
        for precision in precisions
    ]
    for setting in SETTINGS.values():
        if setting.proposes and setting.keyword not in given:
            made += [replace(recipe, **{setting.keyword: value}) for recipe in made for value in setting.proposes]
    made = [recipe for recipe in made if _is_possible(job, recipe)]
    like = proposal.like
    if like is None or like.is_checkpointed or like.has_8_bit_state:
        return made
    return [recipe for recipe in made if recipe == replace(like, **proposal.adds)] or made


def asked_to_capture(request: Request) -> bool | None:
    """Whether passes are to be captured as CUDA graphs; None where the planner decides."""
    return request.wishes.get("graphs")


@once
def usual(job: Job) -> dict[str, Any]:
    """Keyword → what a plan takes where nothing asks for another value."""
    found: dict[str, Any] = {}
    for name in IN_RECIPE:
        setting = SETTINGS[name]
        if job.request.wishes.get(name) is False or (job.request.exact and setting.not_exact):
            found[name] = setting.default
        else:
            ask = setting.wished if job.request.wishes.get(name) else setting.planned
            found[name] = ask(job.base, meta_model(job), job.capability)
    return found


def _precisions(job: Job) -> list[str]:
    if job.request.exact:
        return ["fp32"]
    autocast = usual_precision(job.capability, infers=False)
    if job.request.rehearses:  # a CPU has no tf32
        return ["fp32", autocast]
    return [autocast, "tf32" if job.capability >= BF16_CAPABILITY else "fp32"]


def _optimizers(request: Request, offload: str | None) -> list[str]:
    return ["adamw-fused"] if request.exact or offload is not None else ["adamw-fused", "adamw-8bit"]


def _is_possible(job: Job, recipe: Recipe) -> bool:
    try:
        return not conflicts(replace(job.base, **recipe.keywords()), job.capability, "")
    except WorkloadError:
        return False


def micro_batches(request: Request, batch: int) -> list[int]:
    """Samples of a forward pass worth trying, most first: for each number of passes the least that does."""
    fixed = request.micro_batch(batch)
    return list(_sizes(batch)) if fixed is None else [fixed]


@lru_cache(maxsize=8)
def _sizes(batch: int) -> list[int]:
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


def checkpointing_steps(job: Job, recipe: Recipe) -> list[int]:
    """Numbers of layers whose results may be computed twice; none where it is fixed or of no use."""
    is_fixed = recipe.is_checkpointed or not _is_possible(job, replace(recipe, checkpointing="full"))
    if is_fixed or not job.can_checkpoint or not recipe.learns_in_layers:
        return []
    return list(range(1, num_layers(job) + 1))


def strongest(workload: Workload) -> Kind:
    """The class of the strongest change that a workload makes."""
    return max((t.kind for t in used_by(workload)), key=KINDS.index, default="free")
