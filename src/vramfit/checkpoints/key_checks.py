"""Tensors that the checkpoint lacks, and tensors that the model has no place for.

A missing or unused head is reported and expected; a missing part of the encoder is fatal.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from vramfit.checkpoints.checks import OTHER_CONFIG, is_about_labels
from vramfit.checkpoints.files import some
from vramfit.checkpoints.matching import Subject
from vramfit.checkpoints.safetensors_file import TensorEntry
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel
from vramfit.records.finding import Finding
from vramfit.tasks import find_task

MAX_PLAIN_LAYERS = 200
"""No published encoder has more; so many are still built in half a second."""
_LAYER = re.compile(r"(?:^|\.)(?:layer|layers|albert_layer_groups|block|blocks|h)\.(\d{1,6})\.")


def fresh_names(subject: Subject) -> tuple[str, ...]:
    """Model names that may be initialised: outside the encoder, its pooler, and what is computed."""
    lost = [name for name in subject.matching.missing if _may_start_fresh(subject, name)]
    asked = subject.num_labels_asked is not None
    resized = [m.name for m in subject.matching.mismatched if asked and is_about_labels(subject, m)]
    return (*lost, *resized)


def refuse_absurd_depth(resolved: ResolvedModel, entries: Sequence[TensorEntry]) -> None:
    """Raise where a configuration asks for hundreds of layers that the checkpoint has not.

    Fewer are told by `check_missing`, which needs the model; hundreds would take seconds to build.

    Raises:
        CheckpointError: names the field and both numbers.
    """
    asked = getattr(resolved.config, "num_hidden_layers", None)
    if type(asked) is not int or asked <= MAX_PLAIN_LAYERS or hasattr(resolved.config, "num_hidden_groups"):
        return  # ALBERT's groups are few however often they are applied
    has = 1 + max((layer for entry in entries if (layer := layer_of(entry.name)) is not None), default=-1)
    if asked > 2 * has:
        where = str(resolved.folder / "config.json") if resolved.folder is not None else resolved.name
        raise CheckpointError(
            f"{where} says num_hidden_layers {asked:,}, the checkpoint has {has:,} layers",
            file=where,
            hint=OTHER_CONFIG,
        )


def check_missing(subject: Subject) -> Iterator[Finding]:
    """Findings about model names that nothing in the checkpoint is for."""
    missing = subject.matching.missing
    encoder = [name for name in missing if not _may_start_fresh(subject, name)]
    head = [name for name in missing if name in subject.head and name not in subject.buffers]
    pooler = [name for name in missing if name not in subject.head and _is_pooler(name)]
    layers = Counter(layer for name in subject.state if (layer := layer_of(name)) is not None)
    whole = {
        layer
        for layer, count in Counter(map(layer_of, encoder)).items()
        if layer is not None and count == layers[layer]
    }
    rest = [name for name in encoder if layer_of(name) not in whole]
    why = "what is missing would start at random and the encoder would compute nonsense"
    if whole:
        yield Finding.error(
            "weights.missing_layers",
            f"{len(whole)} of {len(layers)} encoder layers {'are' if len(whole) > 1 else 'is'} not in the "
            f"checkpoint: {_ranges(whole)} (counting from 0)",
            why,
            f"{OTHER_CONFIG}, or download the whole checkpoint",
            fatal=True,
        )
    if rest:
        yield Finding.error(
            "weights.missing",
            f"{len(rest)} tensor{'s' if len(rest) > 1 else ''} of the encoder "
            f"{'are' if len(rest) > 1 else 'is'} not in the checkpoint: {some(rest)}",
            why,
            f"download the whole checkpoint, or {OTHER_CONFIG}",
            fatal=True,
        )
    if head:
        yield _head(subject, head)
    if pooler:
        matters = not find_task(subject.resolved.task).has_head
        yield (Finding.warning if matters else Finding.info)(
            "weights.pooler_new",
            f"the pooler ({some(pooler)}) is not in the checkpoint and starts at random",
            "a model trained by masked language modelling has none; "
            + ("pooler_output is noise: use the last hidden state" if matters else "it learns with the head"),
        )


def _may_start_fresh(subject: Subject, name: str) -> bool:
    return name in subject.head or name in subject.buffers or _is_pooler(name)


def _is_pooler(name: str) -> bool:
    return re.search(r"(^|\.)pooler\.", name) is not None


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to.

    >>> layer_of("bert.encoder.layer.11.output.dense.weight"), layer_of("classifier.weight")
    (11, None)
    """
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _ranges(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    is_run = len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1
    return f"{ordered[0]}–{ordered[-1]}" if is_run else some([str(n) for n in ordered], 8)


def _head(subject: Subject, names: Sequence[str]) -> Finding:
    state = subject.state
    num_parameters = sum(tensor.numel() for tensor in {id(state[name]): state[name] for name in names}.values())
    parts = some(_roots(_modules(names)), 4)
    loaded = _modules(subject.matching.targets.values()) & _modules(names)
    said = subject.class_name in subject.saved_architectures
    what = f"{parts} ({num_parameters:,} parameters) not in the checkpoint"
    if loaded or said:
        return Finding.warning(
            "weights.head_incomplete",
            f"head incomplete: {what}, although "
            + ("other tensors of it are" if loaded else f"config.json says {subject.class_name}"),
            "that part starts at random: predictions mean nothing until it is trained",
            "download the checkpoint again, or fine-tune before use",
        )
    return Finding.info(
        "weights.head_new",
        f"new head: {what}; it starts at random",
        f"expected where fine-tuning for {subject.resolved.task} begins; predictions mean nothing before it",
        "fine-tune first, or take a checkpoint that is fine-tuned for this task",
    )


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] or name for name in names}


def _roots(modules: set[str]) -> list[str]:
    """The modules that lie in no other of them."""
    return sorted(m for m in modules if not any(m.startswith(f"{other}.") for other in modules))


_FAMILIES = (
    (r"albert_layer_groups", "albert"),
    (r"\battn\.Wqkv\b|\bmlp\.Wi\b", "modernbert"),
    (r"(^|\.)transformer\.layer\.\d+\.attention\.q_lin", "distilbert"),
    (r"attention\.self\.query_proj|rel_embeddings", "deberta-v2"),
    (r"attention\.self\.in_proj", "deberta"),
    (r"attention\.attn\.[qkvo]\.|relative_attention_bias", "mpnet"),
    (r"(^|\.)(encoder|decoder)\.block\.\d+", "t5"),
    (r"(^|\.)h\.\d+\.attn\.c_attn", "gpt2"),
    (r"(^|\.)layers\.\d+\.self_attn\.q_proj", "a decoder such as llama, or bart"),
    (r"(^|\.)(vision_model|visual)\.", "a vision model such as clip"),
    (r"^electra\.|embeddings_project|(generator|discriminator)_predictions", "electra"),
    (r"^xlm_roberta\.", "xlm-roberta"),
    (r"^roberta\.|^lm_head\.layer_norm", "roberta"),
    (r"^bert\.|^cls\.predictions", "bert"),
    (r"(^|\.)encoder\.layer\.\d+\.attention\.self\.query\.", "bert or roberta"),
)
"""Names that give a family away, most telling first."""

_HEADS = (
    (
        r"^(cls\.|lm_head\.|predictions\.|vocab_(transform|layer_norm|projector)|lm_predictions\.|mask_predictions\.)",
        "pretraining",
    ),
    (r"^((generator|discriminator)_(predictions|lm_head)|sop_classifier|decoder\.|pred_layer)", "pretraining"),
    (r"^(classifier|pre_classifier|qa_outputs|score|dropout|logits_proj|sequence_summary|head\.|crf)", "task"),
)


_DROPPED = {
    "pretraining": ("weights.pretraining_head", "the pretraining head"),
    "task": ("weights.other_head", "the head of another task"),
    "pooler": ("weights.pooler_unused", "the pooler"),
}
"""Kind of tensors that a model can do without → the name of the check, and what they are."""


def check_family(subject: Subject) -> Iterator[Finding]:
    """Whether the checkpoint is of another architecture than its configuration: then no other check runs."""
    matching = subject.matching
    encoder = [name for name in subject.state if name not in subject.head]
    lost = [name for name in matching.missing if name not in subject.head]
    if len(lost) <= len(encoder) / 2 or len(matching.unexpected) <= len(subject.entries) / 2:
        return
    names = list(matching.unexpected)
    family = next((f for pattern, f in _FAMILIES if any(re.search(pattern, name) for name in names)), None)
    configured = getattr(subject.resolved.config, "model_type", "")
    looks = f", which looks like {family}" if family and family != configured else ""
    yield Finding.error(
        "weights.architecture",
        f"config.json says {configured}, but {len(names)} of {len(subject.entries)} tensors have no place in "
        f"{subject.class_name}: {some(names, 2)}{looks}",
        "nearly the whole model would start at random",
        "put the weights and the config.json of one model together"
        + (f"; for these weights model_type would be {family!r}" if looks and " " not in str(family) else ""),
        fatal=True,
    )


def check_unexpected(subject: Subject) -> Iterator[Finding]:
    """Findings about tensors that the model has no place for."""
    wrapper, num_layers = subject.matching.wrapper, getattr(subject.resolved.config, "num_hidden_layers", None)
    prefix = _saved_prefix(subject)
    layers: set[int] = set()
    groups: dict[str, list[str]] = {kind: [] for kind in (*_DROPPED, "")}
    for name in subject.matching.unexpected:
        layer = layer_of(name)
        if layer is not None and isinstance(num_layers, int) and layer >= num_layers:
            layers.add(layer)
            continue
        kind = _head_kind(name.removeprefix(wrapper), prefix) or ("pooler" if ".pooler." in f".{name}" else "")
        groups[kind].append(name)
    if layers:
        has = max(layers) + 1
        yield Finding.warning(
            "weights.surplus_layers",
            f"the checkpoint has {has} encoder layers, config.json says num_hidden_layers {num_layers}: "
            f"{len(layers)} {'are' if len(layers) > 1 else 'is'} dropped",
            "a shortened encoder computes something else unless it was trained that way",
            f"set num_hidden_layers to {has}, or {OTHER_CONFIG}",
        )
    for kind, (check, what) in _DROPPED.items():
        if groups[kind]:
            why = f"{subject.class_name} does not take it; nothing to do"
            yield Finding.info(check, f"{what} of the checkpoint is not used: {some(groups[kind])}", why)
    if others := groups[""]:
        yield Finding.warning(
            "weights.unexpected",
            f"{len(others)} tensor{'s' if len(others) > 1 else ''} of the checkpoint "
            f"{'have' if len(others) > 1 else 'has'} no place in {subject.class_name}: {some(others)}",
            "they are dropped; if they are a part of the model, it computes something else",
            "check that config.json and weights belong together",
        )


def _saved_prefix(subject: Subject) -> str:
    """The base model's prefix, where the checkpoint was saved with a head around it."""
    prefix, wrapper = getattr(subject.model, "base_model_prefix", ""), subject.matching.wrapper
    return prefix if prefix and any(name.startswith(f"{wrapper}{prefix}.") for name in subject.matching.targets) else ""


def _head_kind(name: str, saved_prefix: str) -> str | None:
    """Which kind of head a tensor belongs to; where the encoder has a prefix, names without it are of a head."""
    for pattern, kind in _HEADS:
        if re.search(pattern, name):
            return kind
    return "task" if saved_prefix and not name.startswith(f"{saved_prefix}.") else None
