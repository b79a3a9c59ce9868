"""`Workload`: the one description of a job that every room shares; frozen, and it checks itself.

It sees only what it holds: whether a model supports a task or a GPU a precision is `estimate.resolve`'s
question. Everything that is wrong is reported at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from vramfit.errors import WorkloadError, nearest_names
from vramfit.units import MAX_SHOWN_CHARACTERS, SizeError, parse_memory, plain, shown

Task = Literal[
    "sequence-classification",
    "token-classification",
    "question-answering",
    "masked-lm",
    "pretraining",
    "features",
]
Mode = Literal["train", "forward", "infer"]
Precision = Literal["fp32", "tf32", "amp-fp16", "amp-bf16", "fp16", "bf16"]
Attention = Literal["sdpa", "eager", "packed"]
Mask = Literal["none", "ones", "padded"]
Optimizer = Literal["adamw", "adamw-fused", "adamw-single", "adamw-8bit", "sgd", "adafactor"]
Quantize = Literal["int8", "int8-dynamic", "int4"]
Offload = Literal["optimizer", "activations", "weights"]
Allocator = Literal["default", "expandable"]
Parallel = Literal["ddp", "fsdp"]
Loop = Literal["plain", "stepper"]
Casts = Literal["each", "together"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "task": get_args(Task),
    "mode": get_args(Mode),
    "precision": get_args(Precision),
    "attention": get_args(Attention),
    "mask": get_args(Mask),
    "optimizer": get_args(Optimizer),
    "quantize": get_args(Quantize),
    "offload": get_args(Offload),
    "allocator": get_args(Allocator),
    "parallel": get_args(Parallel),
    "loop": get_args(Loop),
    "casts": get_args(Casts),
}
"""Every keyword with a fixed list of values: the same in Python, on the command line and in the API."""

TRAINED_TASKS: tuple[Task, ...] = ("sequence-classification", "token-classification", "question-answering", "masked-lm")
"""Tasks that vramfit reads data for, trains, evaluates and predicts."""
GRAPH_TASKS: tuple[Task, ...] = ("sequence-classification", "token-classification", "masked-lm")
"""Tasks whose losses leave out labels that are ignored."""
NO_LOSS = (
    "task features gives vectors and has no loss to train on: take the task of the head that is to learn, "
    "mode infer, or in Python an nn.Module with a loss of its own"
)
"""A module may have a loss whatever its task is called: only who resolves the model can tell."""
HOST_STEPS: tuple[Offload, ...] = ("optimizer", "weights")
"""What is offloaded when the optimizer steps in host memory."""
IN_PLACE: tuple[Optimizer, ...] = ("adamw-fused", "adamw-8bit")
"""Optimizers whose steps need no temporaries."""
FREEZE_NAMES = ("embeddings", "encoder", "backbone")
SIZE_HINT = "--gpu t4 (`vramfit gpus` lists them), or --memory 8GiB for any size"
COUNTS = ("batch", "accumulate", "micro_batch", "seq", "num_labels", "lora", "num_gpus", "num_nodes")
SWITCHES = ("dropout", "compile", "fused", "graphs")
MAX_COUNT = 2**31 - 1
"""Upper bound of every count: CUDA kernels index with 32 bits, and sizes stay exact integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is to run, on what, and how.

    >>> Workload(model="bert-base-uncased", batch=32, accumulate=4, seq=128).micro_batch
    8
    """

    model: str
    """A catalogue name, a folder or a hub id; for objects, a name to show."""
    task: Task = "sequence-classification"
    """The head on the encoder."""
    mode: Mode = "train"
    """`forward` keeps what a backward pass would need; `infer` does not."""
    batch: int = 8
    """The effective batch: samples that one optimizer step sees."""
    accumulate: int | None = None
    """Micro-batches a step; given this or `micro_batch`, the other follows."""
    micro_batch: int | None = None
    """Samples one forward pass sees; the largest, where the batch does not divide."""
    seq: int = 128
    """Tokens a sequence, padding included."""
    lengths: tuple[int, ...] | None = None
    """Real lengths of the sequences of one batch, for packed attention."""
    num_labels: int | None = None
    """Size of a classification head; None takes the configuration's."""
    precision: Precision = "fp32"
    """`amp-*`: autocast over fp32 weights; `fp16`, `bf16`: weights in that type; `tf32`: TF32 products."""
    attention: Attention | None = None
    """None takes sdpa where the model has it, else eager."""
    mask: Mask = "padded"
    """Whether an attention mask is given, and whether it hides anything."""
    dropout: bool = True
    """False: as under `model.eval()`. Inference never drops."""
    checkpointing: Literal["full"] | int | None = None
    """Recompute all layers in backward, or the first k."""
    freeze: str | int | tuple[str, ...] | None = None
    """`embeddings`, `encoder`, `backbone`, the k lowest layers (embeddings included), or name patterns; several of
    these as a tuple or with commas between them, a number of layers as text then."""
    optimizer: Optimizer = "adamw"
    """`adamw` is torch's default (foreach)."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm before the step."""
    lora: int | None = None
    """Rank of LoRA adapters on the attention projections; None for none."""
    quantize: Quantize | None = None
    """Linear weights kept in fewer bits."""
    offload: Offload | None = None
    """What lives in host memory until it is needed."""
    compile: bool = False
    """`torch.compile` on the model's layers."""
    fused: bool = False
    """In packed amp-* training, layers of BERT's kind as one function each, with kernels of vramfit's own."""
    graphs: bool = False
    """Passes recorded as CUDA graphs, and replayed: the host then sends a pass at once."""
    casts: Casts = "each"
    """In amp-* training, whether autocast casts each weight by itself, or a layer all of its own at once, where it is
    neither compiled nor offloaded nor in shards."""
    allocator: Allocator = "default"
    """`expandable` stands for `expandable_segments:True`."""
    num_gpus: int = 1
    """GPUs that share the step: each passes its part of the batch, in micro-batches of its own."""
    parallel: Parallel | None = None
    """`ddp`: each of several GPUs has the whole model; `fsdp`: each has a part of it. None takes ddp."""
    num_nodes: int = 1
    """Machines that these GPUs are in, as many in each."""
    loop: Loop = "plain"
    """Whose step: the usual PyTorch loop, or vramfit's `Stepper`."""
    gpu: str | None = None
    """Catalogue name: gives the architecture and, without `memory`, the capacity."""
    memory: int | None = None
    """Bytes that PyTorch's allocator may reserve; text such as "11.17GiB" is taken too."""
    host_memory: int | None = None
    """Bytes that what is offloaded may take of the host's memory; text is taken too."""
    torch_version: str | None = None
    """Predict for this torch; None takes the installed one."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name in ("memory", "host_memory"):
            object.__setattr__(self, name, _size(name, getattr(self, name), problems))
        for name in (*COUNTS, "lengths", "checkpointing", "freeze", "max_grad_norm"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        object.__setattr__(self, "freeze", _freeze_parts(self.freeze))
        problems += _wrong_choices(self) + _wrong_counts(self)
        if not problems:
            problems += self._split_batch() + _contradictions(self)
        if problems:
            raise WorkloadError(problems)

    def _split_batch(self) -> list[str]:
        """Work out accumulate and micro_batch from each other; what does not divide is a problem."""
        given, accumulate, share = self.micro_batch, self.accumulate, self.share
        of_each = f", of which each of {self.num_gpus} GPUs has {share}" if self.num_gpus > 1 else ""
        if given is not None and given > share:
            return [f"micro_batch {given} is larger than batch {self.batch}{of_each}"]
        if accumulate is not None and accumulate > share:
            return [f"accumulate {accumulate} is more than the {self.batch} samples of a batch{of_each}"]
        accumulate = accumulate or (-(-share // given) if given else 1)
        micro_batch = given or -(-share // accumulate)
        if -(-share // micro_batch) != accumulate:
            return [f"micro_batch {micro_batch} × accumulate {accumulate} is not batch {self.batch}{of_each}"]
        if self.loop == "plain" and micro_batch * accumulate != self.batch:
            return [
                f"batch {self.batch} does not divide into {accumulate} equal micro-batches "
                "(loop='stepper' splits unevenly)"
            ]
        object.__setattr__(self, "accumulate", accumulate)
        object.__setattr__(self, "micro_batch", micro_batch)
        return []

    @classmethod
    def from_keywords(cls, **keywords: Any) -> "Workload":
        """A workload from keywords; an unknown keyword is a `WorkloadError` with the nearest name."""
        known = [f.name for f in fields(cls)]
        problems = [
            f"unknown keyword {name!r} (nearest: {', '.join(nearest_names(name, known))})"
            for name in keywords
            if name not in known
        ]
        if problems:
            raise WorkloadError(problems)
        return cls(**keywords)

    def with_batch(self, batch: int) -> "Workload":
        """The same job at another effective batch, with the same number of micro-batches."""
        return replace(self, batch=batch, accumulate=self.accumulate, micro_batch=None)

    @property
    def share(self) -> int:
        """Samples of a batch that one GPU passes; of the GPU that has most."""
        return -(-self.batch // self.num_gpus)

    @property
    def trains(self) -> bool:
        """Whether the step has a backward pass and an optimizer."""
        return self.mode == "train"

    @property
    def shards(self) -> bool:
        """Whether each of several GPUs has a part of the model."""
        return self.num_gpus > 1 and self.parallel == "fsdp"

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer lives in host memory."""
        return self.trains and self.offload in HOST_STEPS

    @property
    def steps_in_place(self) -> bool:
        """Whether the optimizer's step needs no temporaries (`step.commit.needs_temporaries` asks an optimizer)."""
        return self.optimizer in IN_PLACE

    @property
    def keeps_casts(self) -> bool:
        """Whether autocast keeps its casts of weights for a pass."""
        return keeps_copies(on_host=self.steps_on_host, in_shards=self.shards)


def keeps_copies(*, on_host: bool, in_shards: bool) -> bool:
    """Whether autocast keeps its casts: memory is too short where the optimizer is on the host or weights are in
    shards."""
    return not (on_host or in_shards)


def _size(name: str, value: Any, problems: list[str]) -> int | None:
    if value is None:
        return None
    try:
        return parse_memory(value, name=name)
    except SizeError as error:
        problems.append(f"{error} ({error.hint})")
        return None


def _plain(value: Any) -> Any:
    """A number, or a list of them, as Python's own, whatever package it is from; anything else as it is."""
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else plain(value)


def switched(name: str, value: Any) -> list[str]:
    """What is wrong with a keyword that is on or off; the word "no" would turn it on."""
    return [] if isinstance(value, bool) else [f"{name} {shown(value)} is not True or False"]


def _freeze_parts(freeze: Any) -> Any:
    """Several things to freeze as a tuple of texts; one thing, or what is wrong anyway, as it is."""
    parts = freeze.split(",") if isinstance(freeze, str) and "," in freeze else freeze
    if not isinstance(parts, tuple | list):
        return freeze
    return tuple(part.strip() if isinstance(part, str) else str(part) if _is_count(part) else part for part in parts)


def _wrong_choices(w: Workload) -> list[str]:
    problems = []
    for name, allowed in CHOICES.items():
        value = getattr(w, name)
        optional = name in ("attention", "quantize", "offload", "parallel")
        if _is_text(value, *allowed) or (value is None and optional):
            continue
        problems.append(f"{name} {shown(value)} is not one of {', '.join(allowed)} ({_meant(name, value, allowed)})")
    if not isinstance(w.model, str) or not w.model:
        problems.append("model must be a name, a folder or a hub id")
    if not (w.checkpointing is None or _is_text(w.checkpointing, "full") or _is_count(w.checkpointing)):
        problems.append(f"checkpointing {shown(w.checkpointing)} is not 'full' or a number of layers")
    problems += [problem for name in SWITCHES for problem in switched(name, getattr(w, name))]
    problems += [
        f"{name} {shown(getattr(w, name))} is not a text such as {such!r}"
        for name, such in (("gpu", "t4"), ("torch_version", "2.11"))
        if not isinstance(getattr(w, name), str | None)
    ]
    return problems + _wrong_freeze(w.freeze)


def _meant(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """What was meant by a wrong value: another keyword's, or the nearest of its own."""
    if name == "quantize" and _is_text(value, *CHOICES["precision"]):
        return f"{value} is a precision: take --precision {value}, precision={value!r}"
    if name == "precision" and _is_text(value, *CHOICES["quantize"]):
        return f"{value} is a quantization: take --quantize {value}, quantize={value!r}"
    return f"nearest: {nearest_names(str(value)[:MAX_SHOWN_CHARACTERS], allowed, 1)[0]}"


def _wrong_freeze(freeze: object) -> list[str]:
    if freeze is None or _is_text(freeze, *FREEZE_NAMES) or _is_count(freeze):
        return []
    if isinstance(freeze, tuple) and freeze and all(isinstance(p, str) and p for p in freeze):
        wrong = [p for p in freeze if p.isdecimal() and not _is_count(int(p[:20]))]
        return [f"freeze {shown(p)} is not a number of layers" for p in wrong]
    if isinstance(freeze, str) and any(c in freeze for c in ".*?["):
        return []
    return [
        f"freeze {shown(freeze)} is not {', '.join(FREEZE_NAMES)}, a number of layers, "
        "patterns of parameter names such as 'bert.encoder.layer.0.*', or several of these"
    ]


def _wrong_counts(w: Workload) -> list[str]:
    problems = []
    for name in COUNTS:
        value = getattr(w, name)
        optional = name in ("accumulate", "micro_batch", "num_labels", "lora")
        if not (_is_count(value) or (value is None and optional)):
            problems.append(f"{name} {shown(value)} is not a whole number from 1 to {MAX_COUNT:,}")
    if w.lengths is not None:
        wrong = [n for n in w.lengths if not _is_count(n)] if isinstance(w.lengths, tuple) else [w.lengths]
        if wrong or not w.lengths:
            problems.append(f"lengths {shown(wrong[:3] or ())} are not whole numbers of tokens from 1")
    norm = w.max_grad_norm
    if norm is not None and not (isinstance(norm, int | float) and not isinstance(norm, bool) and norm > 0):
        problems.append(f"max_grad_norm {shown(norm)} is not a positive number")
    return problems


def _contradictions(w: Workload) -> list[str]:
    """Pairs of settings that cannot go together, whatever the model and the GPU."""
    frozen = w.freeze if isinstance(w.freeze, tuple) else (w.freeze,)
    freezes_layers = bool({"encoder", "backbone"} & set(frozen))
    rules = [
        (
            w.precision == "fp16" and w.trains,
            "precision fp16 cannot train: fp16 weights overflow without a GradScaler, and GradScaler "
            "refuses fp16 gradients (take amp-fp16, or bf16)",
        ),
        (w.lengths is not None and w.attention != "packed", "lengths need attention 'packed'"),
        (
            w.lengths is not None and len(w.lengths) != w.batch,
            f"lengths names {len(w.lengths or ())} sequences but batch is {w.batch}",
        ),
        (w.lengths is not None and (w.accumulate or 1) > 1, "lengths are of one micro-batch: accumulate must be 1"),
        (
            w.attention == "packed" and w.trains and w.loop != "stepper",
            "attention packed is for loop 'stepper': a plain loop's loss does not know where sequences begin",
        ),
        (w.accumulate != 1 and not w.trains, f"accumulate is for mode train, not {w.mode}"),
        (w.checkpointing is not None and w.mode == "infer", "checkpointing keeps nothing: mode is infer"),
        (w.max_grad_norm is not None and not w.trains, f"max_grad_norm is for mode train, not {w.mode}"),
        (w.offload == "optimizer" and not w.trains, f"offload optimizer is for mode train, not {w.mode}"),
        (w.offload == "weights" and w.mode == "forward", "offload weights is for mode train or infer, not forward"),
        (
            w.offload == "activations" and (w.mode == "infer" or w.checkpointing is None or not w.dropout),
            "offload activations is for the inputs of checkpointed layers: take mode train, checkpointing and dropout",
        ),
        (w.offload == "weights" and w.compile, "offload weights and compile do not go together: layers come and go"),
        (
            w.compile and w.offload not in (None, "weights"),
            f"compile and offload {w.offload} do not go together: what hooks do is not compiled",
        ),
        (w.compile and w.quantize is not None, f"compile and quantize {w.quantize} do not go together yet"),
        *_fused_contradictions(w),
        *_graph_contradictions(w),
        *_offload_contradictions(w),
        *_ranks_contradictions(w),
        (
            w.quantize is not None and w.trains and w.lora is None and not freezes_layers,
            f"quantize {w.quantize} weights cannot learn: freeze 'backbone' or 'encoder', or add lora",
        ),
        (
            w.quantize not in (None, "int8") and w.trains,
            f"quantize {w.quantize} cannot train: no gradient passes its product (take int8)",
        ),
        (w.lora is not None and w.mode != "train", f"lora is for mode train, not {w.mode}"),
        (
            w.lora is not None and (freezes_layers or any(str(f).isdecimal() for f in frozen)),
            f"lora {w.lora} adapts layers that freeze {w.freeze!r} takes out of training: drop freeze, "
            "since LoRA freezes all but its adapters and the head",
        ),
    ]
    return [text for broken, text in rules if broken]


def _fused_contradictions(w: Workload) -> list[tuple[bool, str]]:
    """What does not go with fused layers."""
    return [
        (w.fused and (not w.trains or w.attention != "packed"), "fused is for packed training: take attention packed"),
        (
            w.fused and not w.precision.startswith("amp"),
            f"fused is for precision amp-bf16 or amp-fp16, not {w.precision}",
        ),
        (w.fused and w.compile, "fused and compile do not go together: either makes a layer's kernels"),
        (w.fused and w.lora is not None, "fused and lora do not go together: adapters are other products"),
        (w.fused and w.quantize is not None, f"fused and quantize {w.quantize} do not go together"),
        (w.fused and w.offload is not None, f"fused and offload {w.offload} do not go together yet"),
        (w.fused and w.num_gpus > 1, "fused is for one GPU yet"),
    ]


def _graph_contradictions(w: Workload) -> list[tuple[bool, str]]:
    """What does not go with recorded passes."""
    precisions = ("amp-bf16", "bf16")
    return [
        (
            w.graphs and (not w.trains or w.attention != "packed"),
            "graphs are of packed training passes, which can be filled up to a few sizes: take attention packed",
        ),
        (w.graphs and w.num_gpus > 1, "graphs are for one GPU yet"),
        (w.graphs and w.quantize is not None, f"graphs and quantize {w.quantize} do not go together yet"),
        (w.graphs and w.offload is not None, f"graphs and offload {w.offload} do not go together: copies take turns"),
        (
            w.graphs and w.checkpointing is not None,
            "graphs and checkpointing do not go together: layers that are computed again look at random generators",
        ),
        (
            w.graphs and w.task not in GRAPH_TASKS,
            f"graphs are not for {w.task}: its head does not leave out what a pass was filled up with",
        ),
        (
            w.graphs and w.precision not in precisions,
            f"graphs are for precision {' or '.join(precisions)}, not {w.precision}",
        ),
        (
            w.graphs and not w.steps_in_place,
            f"graphs hold a pass's memory for good, and optimizer {w.optimizer} needs some beside: "
            f"take {' or '.join(IN_PLACE)}",
        ),
    ]


def _offload_contradictions(w: Workload) -> list[tuple[bool, str]]:
    """What does not go with an optimizer in host memory."""
    learns = w.steps_on_host
    by_layers = learns and w.offload == "weights"
    return [
        (
            learns and w.loop != "stepper",
            f"offload {w.offload} is for loop 'stepper': a plain loop would keep all gradients on the GPU",
        ),
        (
            learns and w.optimizer == "adamw-8bit",
            f"offload {w.offload} and optimizer adamw-8bit do not go together: rounded moments save memory of a GPU "
            "only (take adamw-fused)",
        ),
        (
            by_layers and w.checkpointing != "full",
            "offload weights computes every layer again in backward: take checkpointing full",
        ),
        (
            by_layers and not w.dropout,
            "offload weights needs dropout: without it layers run as under model.eval(), which checkpoints none "
            "(set the model's dropout probabilities to 0 instead)",
        ),
        (by_layers and w.lora is not None, "offload weights and lora do not go together: take offload optimizer"),
        (by_layers and w.quantize is not None, f"offload weights and quantize {w.quantize} do not go together"),
    ]


def _ranks_contradictions(w: Workload) -> list[tuple[bool, str]]:
    """What does not go with several GPUs."""
    several, shards = w.num_gpus > 1, w.shards
    return [
        (several and not w.trains, f"num_gpus {w.num_gpus} is for mode train: for {w.mode}, start a process a GPU"),
        (
            several and w.trains and w.loop != "stepper",
            f"num_gpus {w.num_gpus} is for loop 'stepper': a plain loop's mean is not that of the whole batch",
        ),
        (several and w.num_gpus > w.batch, f"num_gpus {w.num_gpus} is more than the {w.batch} samples of a batch"),
        (several and w.offload is not None, f"offload {w.offload} is for one GPU: take parallel fsdp"),
        (several and w.compile, "compile is for one GPU yet"),
        (
            shards and w.optimizer in ("adamw-8bit", "adafactor"),
            f"optimizer {w.optimizer} steps whole matrices, which fsdp has cut: take adamw-fused",
        ),
        (
            w.num_gpus % w.num_nodes != 0,
            f"num_gpus {w.num_gpus} are in {w.num_nodes} machines: not as many in each (num_gpus counts all of them)",
        ),
        (shards and w.lora is not None, "lora learns little, and fsdp has little to cut: take parallel ddp"),
        (shards and w.quantize is not None, f"quantize {w.quantize} weights cannot be cut: take parallel ddp"),
    ]


def _is_text(value: object, *known: str) -> bool:
    """Whether it is one of these; an array would compare each of its elements."""
    return isinstance(value, str) and value in known


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT
