"""Names, shapes, dtypes and sizes of the weights that have a place: what was renamed, what contradicts config.json."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vramfit.checkpoints.matching import ShapeMismatch, Subject
from vramfit.checkpoints.safetensors_file import FLOATS
from vramfit.checkpoints.untrusted import sizes, some
from vramfit.records.finding import Finding
from vramfit.units import format_bytes

_WORDS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}


def check_names(subject: Subject) -> list[Finding]:
    """Old names and prefixes that are mended on the way in, and names that cannot be."""
    matching = subject.matching
    findings = [_collision(old, new) for old, new in matching.collisions[:3]]
    if matching.wrapper:
        findings.append(
            Finding(
                check="weights.wrapper_prefix",
                severity="info",
                what=f"the names begin with {matching.wrapper!r}, which a wrapper left there; it is taken off",
                why="transformers would not recognise them and start the whole model at random",
                fix="vramfit loads it as it is; for transformers, save model.module instead of the wrapper",
            )
        )
    old = [name for name in matching.targets if name.endswith((".gamma", ".beta"))]
    if old:
        findings.append(
            Finding(
                check="weights.old_names",
                severity="info",
                what=f"{len(old)} tensors have names of 2019 (gamma, beta), such as {old[0]}; they are renamed",
                why="the same numbers under the names of today (weight, bias); nothing to do",
            )
        )
    prefix = getattr(subject.model, "base_model_prefix", "")
    moved = [(a, b) for a, b in matching.targets.items() if _differs_by(prefix, a.removeprefix(matching.wrapper), b)]
    if moved:
        findings.append(
            Finding(
                check="weights.base_prefix",
                severity="info",
                what=f"{len(moved)} names differ by the prefix {prefix!r}: {moved[0][0]} is {moved[0][1]} in the model",
                why="saved with another head or with none; they are matched, nothing to do",
            )
        )
    return findings


def _differs_by(prefix: str, name: str, target: str) -> bool:
    return bool(prefix) and name.startswith(f"{prefix}.") != target.startswith(f"{prefix}.")


def _collision(one: str, other: str) -> Finding:
    return Finding(
        check="weights.duplicate",
        severity="error",
        what=f"{one} and {other} are the same tensor of the model",
        why="which of the two is right cannot be known",
        fix="save the model again with save_pretrained where it was trained",
        fatal=True,
    )


def check_dtypes(subject: Subject) -> list[Finding]:
    """The precision that the weights are saved in."""
    quantized = subject.config_data.get("quantization_config")
    if isinstance(quantized, dict):
        return [_quantized(f"quantized with {quantized.get('quant_method') or 'an unnamed method'}")]
    used = {e.name: e for e in subject.entries if e.name in subject.matching.targets}
    expected_float = [
        e for e in used.values() if subject.state[subject.matching.targets[e.name]].dtype.is_floating_point
    ]
    whole_numbers = [e for e in expected_float if e.dtype not in FLOATS]
    if whole_numbers:
        names = [e.name for e in whole_numbers]
        return [_quantized(f"in {whole_numbers[0].dtype} where the model has floating point: {some(names)}")]
    counts = Counter(e.dtype for e in expected_float)
    return _precision(counts) if counts else []


def _quantized(how: str) -> Finding:
    return Finding(
        check="weights.quantized",
        severity="error",
        what=f"the weights are {how}",
        why="they are no numbers to load into the layers as they are",
        fix="take the full-precision checkpoint and quantize it on the way in: vramfit load MODEL --quantize int8",
        fatal=True,
    )


def _precision(counts: "Counter[str]") -> list[Finding]:
    dtype = counts.most_common(1)[0][0]
    word = _WORDS.get(dtype, dtype)
    if len(counts) > 1:
        parts = ", ".join(f"{count} in {_WORDS.get(name, name)}" for name, count in counts.most_common())
        return [
            Finding(
                check="weights.dtype",
                severity="warning",
                what=f"the weights are in several precisions: {parts}",
                why="they are brought to one when loaded; those in fewer bits have lost digits",
            )
        ]
    if dtype in ("F16", "BF16"):
        return [
            Finding(
                check="weights.dtype",
                severity="warning",
                what=f"the weights are saved in {word}",
                why="good for inference; trained as they are, small updates round away"
                + (" and gradients underflow" if dtype == "F16" else ""),
                fix="to train, load them in fp32 and use --precision amp-bf16 (amp-fp16 before Ampere)",
            )
        ]
    if dtype not in _WORDS:
        return [_quantized(f"saved in {dtype}")]
    if dtype == "F64":
        return [
            Finding(check="weights.dtype", severity="info", what="the weights are in fp64; half the bytes say as much")
        ]
    return []


def check_fit(subject: Subject, gpu_free_bytes: int | None) -> list[Finding]:
    """Whether the weights alone fit the GPU at hand."""
    return weights_against_gpu(sum(p.numel() for p in subject.model.parameters()), gpu_free_bytes)


def weights_against_gpu(num_parameters: int, gpu_free_bytes: int | None) -> list[Finding]:
    """The weights in each precision against what is free."""
    if gpu_free_bytes is None:
        return []
    fp32, free = 4 * num_parameters, format_bytes(gpu_free_bytes)
    sizes = f"{format_bytes(fp32)} in fp32, {format_bytes(fp32 // 2)} in bf16"
    if fp32 <= gpu_free_bytes:
        return [
            Finding(
                check="gpu.weights",
                severity="ok" if 4 * fp32 <= gpu_free_bytes else "warning",
                what=f"the weights take {sizes}; the GPU has {free} free",
                why=""
                if 4 * fp32 <= gpu_free_bytes
                else "training with AdamW takes four times as much, and activations",
                fix="" if 4 * fp32 <= gpu_free_bytes else "see `vramfit max-batch MODEL`",
            )
        ]
    half_fits = fp32 // 2 <= gpu_free_bytes
    return [
        Finding(
            check="gpu.weights",
            severity="error",
            what=f"the weights take {sizes}; the GPU has {free} free",
            why="they do not fit" + (" in fp32" if half_fits else " in either"),
            fix="load with --precision bf16" if half_fits else "load with --quantize int8, or with --offload weights",
        )
    ]


def summary(subject: Subject) -> list[Finding]:
    """One line that says what is there, when all of it fits."""
    num_bytes = sum(e.num_bytes for e in subject.entries)
    files = len(subject.files.paths)
    where = subject.files.paths[0].name if files == 1 else f"{files} shards"
    fits = not (subject.matching.mismatched or subject.matching.collisions)
    used = len(subject.matching.targets) + len(subject.matching.converted)
    return [
        Finding(
            check="weights.files",
            severity="ok",
            what=f"{where}: {len(subject.entries)} tensors, {format_bytes(num_bytes)}; {used} of them go into "
            f"{subject.class_name}" + (", every shape as the model has it" if fits and used else ""),
        ),
        *_unused_files(subject.files.others),
    ]


def _unused_files(others: Sequence[str]) -> list[Finding]:
    if not others:
        return []
    return [
        Finding(check="weights.other_files", severity="info", what=f"the folder also holds {some(others)}; not read")
    ]


_FIELDS = (
    *("vocab_size", "hidden_size", "dim", "embedding_size", "intermediate_size", "hidden_dim"),
    *("max_position_embeddings", "type_vocab_size", "num_labels"),
)
"""Fields of a configuration that become sizes of tensors, most likely culprit first."""


_ONLY_OF: Mapping[str, Sequence[str]] = {
    "vocab_size": ("word_embeddings", "tok_embeddings", "predictions", "decoder", "lm_head", "vocab_projector"),
    "max_position_embeddings": ("position",),
    "type_vocab_size": ("token_type",),
    "num_labels": ("classifier", "outputs", "score", "proj"),
}
"""Fields that size a few tensors only: a part of those tensors' names."""

_Culprit = tuple[str, int, int]
"""A field, what config.json says, and what the checkpoint says."""


def check_shapes(subject: Subject) -> list[Finding]:
    """Findings about tensors of another shape than the model's, one for each field at fault."""
    labels = [m for m in subject.matching.mismatched if is_about_labels(subject, m)]
    others = [m for m in subject.matching.mismatched if not is_about_labels(subject, m)]
    suspects = {m.name: _suspects(subject, m) for m in others}
    votes = Counter(culprit for found in suspects.values() for culprit in found)
    groups: dict[_Culprit, list[ShapeMismatch]] = defaultdict(list)
    for mismatch in others:
        found = suspects[mismatch.name]
        groups[max(found, key=lambda c: (votes[c], c[0] in _ONLY_OF)) if found else ("", 0, 0)].append(mismatch)
    findings = [_contradiction(*culprit, found) for culprit, found in groups.items()]
    if labels:
        findings.append(_labels(subject, labels))
    return findings


def is_about_labels(subject: Subject, mismatch: ShapeMismatch) -> bool:
    """Whether a tensor of the head differs in nothing but the number of labels."""
    expected, has = mismatch.expected, mismatch.entry.shape
    num_labels = getattr(subject.resolved.config, "num_labels", None)
    is_row = len(expected) == len(has) > 0 and expected[0] == num_labels and expected[1:] == has[1:]
    return is_row and mismatch.name in subject.head


def _suspects(subject: Subject, mismatch: ShapeMismatch) -> list[_Culprit]:
    """Fields that have the size which differs, most likely first; none where no field has."""
    if len(mismatch.expected) != len(mismatch.entry.shape):
        return []
    differing = [(e, h) for e, h in zip(mismatch.expected, mismatch.entry.shape, strict=True) if e != h]
    return [
        (field, expected, has)
        for field in _FIELDS
        for expected, has in differing
        if getattr(subject.resolved.config, field, None) == expected
        and any(part in mismatch.name for part in _ONLY_OF.get(field, ("",)))
    ]


def _contradiction(field: str, was: int, has: int, found: Sequence[ShapeMismatch]) -> Finding:
    first = found[0]
    example = f"{first.entry.name} is {sizes(first.entry.shape)} there, {sizes(first.expected)} in the model"
    more = f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""
    said = f"config.json says {field} {was:,}, the checkpoint {has:,}: " if field else "a shape differs: "
    return Finding(
        check=f"weights.shape.{field}" if field else "weights.shape",
        severity="error",
        what=said + example + more,
        why="loading fails, or, with ignore_mismatched_sizes, these tensors start at random",
        fix="use the config.json that belongs to these weights"
        + (f"; there {field} should be {has:,}" if field else ""),
        fatal=True,
    )


def _labels(subject: Subject, found: Sequence[ShapeMismatch]) -> Finding:
    first = found[0]
    shapes = f"{first.entry.name} is {sizes(first.entry.shape)} in the checkpoint, {sizes(first.expected)} in the model"
    rows = first.entry.shape[0] if first.entry.shape else 0
    asked = subject.num_labels_asked
    if asked is not None:
        return Finding(
            check="weights.head_replaced",
            severity="warning",
            what=f"a head for {asked} labels was asked for, the checkpoint's has {rows}: {shapes}",
            why="the head starts at random and must be trained",
            fix=f"leave num_labels out, or give {rows}, to keep the head of the checkpoint",
        )
    return Finding(
        check="weights.labels",
        severity="error",
        what=f"config.json has {_num_labels(subject.resolved.config)} labels, the checkpoint's head {rows}: {shapes}",
        why="the head cannot be loaded",
        fix=f"give id2label in config.json {rows} labels, or ask for a new head with num_labels",
        fatal=True,
    )


def _num_labels(config: Any) -> int:
    return len(getattr(config, "id2label", None) or ())
