"""What the checkpoint has beyond the model: a head that is dropped, layers too many, another architecture."""

import re
from collections.abc import Sequence

from vramfit.checkpoints.missing_keys import layer_of
from vramfit.checkpoints.subject import Subject
from vramfit.checkpoints.wording import some
from vramfit.records.finding import Finding

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


def check_family(subject: Subject) -> list[Finding]:
    """Whether the checkpoint is of another architecture than its configuration: then nothing else is worth saying."""
    matching = subject.matching
    encoder = [name for name in subject.state if name not in subject.head]
    lost = [name for name in matching.missing if name not in subject.head]
    if len(lost) <= len(encoder) / 2 or len(matching.unexpected) <= len(subject.entries) / 2:
        return []
    names = list(matching.unexpected)
    family = next((f for pattern, f in _FAMILIES if any(re.search(pattern, name) for name in names)), None)
    configured = getattr(subject.resolved.config, "model_type", "")
    looks = f", which looks like {family}" if family and family != configured else ""
    return [
        Finding(
            check="weights.architecture",
            severity="error",
            what=f"config.json says {configured}, but {len(names)} of {len(subject.entries)} tensors have no place in "
            f"{subject.class_name}: {some(names, 2)}{looks}",
            why="nearly the whole model would start at random",
            fix="put the weights and the config.json of one model together"
            + (f"; for these weights model_type would be {family!r}" if looks and " " not in str(family) else ""),
            fatal=True,
        )
    ]


def check_unexpected(subject: Subject) -> list[Finding]:
    """Findings about tensors that the model has no place for."""
    names = subject.matching.unexpected
    wrapper = subject.matching.wrapper
    layers = sorted({layer for n in names if (layer := _surplus_layer(subject, n)) is not None})
    rest = [name for name in names if _surplus_layer(subject, name) is None]
    kinds = {name: _head_kind(name.removeprefix(wrapper), _saved_prefix(subject)) for name in rest}
    pretraining = [name for name in rest if kinds[name] == "pretraining"]
    task = [name for name in rest if kinds[name] == "task"]
    pooler = [name for name in rest if ".pooler." in f".{name}" and name not in pretraining and name not in task]
    others = [name for name in rest if name not in (*pretraining, *task, *pooler)]
    findings = [_surplus_layers(subject, layers)] if layers else []
    for group, check, what in (
        (pretraining, "weights.pretraining_head", "the pretraining head"),
        (task, "weights.other_head", "the head of another task"),
        (pooler, "weights.pooler_unused", "the pooler"),
    ):
        if group:
            findings.append(_dropped(subject, check, what, group))
    if others:
        findings.append(_unknown(subject, others))
    return findings


def _saved_prefix(subject: Subject) -> str:
    """The base model's prefix, where the checkpoint was saved with a head around it."""
    prefix, wrapper = getattr(subject.model, "base_model_prefix", ""), subject.matching.wrapper
    return prefix if prefix and any(name.startswith(f"{wrapper}{prefix}.") for name in subject.matching.targets) else ""


def _head_kind(name: str, saved_prefix: str) -> str | None:
    """What head a tensor belongs to; beside a prefixed encoder everything else is one."""
    for pattern, kind in _HEADS:
        if re.search(pattern, name):
            return kind
    return "task" if saved_prefix and not name.startswith(f"{saved_prefix}.") else None


def _surplus_layer(subject: Subject, name: str) -> int | None:
    """The number of a layer that the configuration has not."""
    layer = layer_of(name)
    num_layers = getattr(subject.resolved.config, "num_hidden_layers", None)
    return layer if layer is not None and isinstance(num_layers, int) and layer >= num_layers else None


def _surplus_layers(subject: Subject, layers: Sequence[int]) -> Finding:
    num_layers = subject.resolved.config.num_hidden_layers
    return Finding(
        check="weights.surplus_layers",
        severity="warning",
        what=f"the checkpoint has {layers[-1] + 1} encoder layers, config.json says num_hidden_layers {num_layers}: "
        f"{len(layers)} {'are' if len(layers) > 1 else 'is'} dropped",
        why="a shortened encoder computes something else unless it was trained that way",
        fix=f"set num_hidden_layers to {layers[-1] + 1}, or use the config.json that belongs to these weights",
    )


def _dropped(subject: Subject, check: str, what: str, names: Sequence[str]) -> Finding:
    return Finding(
        check=check,
        severity="info",
        what=f"{what} of the checkpoint is not used: {some(names)}",
        why=f"{subject.class_name} has no place for it; nothing to do",
    )


def _unknown(subject: Subject, names: Sequence[str]) -> Finding:
    return Finding(
        check="weights.unexpected",
        severity="warning",
        what=f"{len(names)} tensor{'s' if len(names) > 1 else ''} of the checkpoint "
        f"{'have' if len(names) > 1 else 'has'} no place in {subject.class_name}: {some(names)}",
        why="they are dropped; if they are a part of the model, it computes something else",
        fix="check that config.json and weights belong together",
    )
