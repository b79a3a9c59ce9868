"""`config.json` by itself, and the weights that have a place: names, shapes, dtypes and sizes."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

from vramfit.checkpoints.files import shown, sizes, some
from vramfit.checkpoints.matching import ShapeMismatch, Subject
from vramfit.checkpoints.safetensors_file import FLOATS
from vramfit.quiet import import_modelling
from vramfit.records.finding import Finding
from vramfit.units import format_bytes

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
OTHER_CONFIG = "use the config.json that belongs to these weights"
_WORDS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}


def check_config(config: Any, data: Mapping[str, Any]) -> list[Finding]:
    """Every check that needs no weights."""
    checks = (_architectures(config, data), check_version(data.get("transformers_version")), _label_names(data))
    return [*chain(*checks), *_special_ids(config)]


def _architectures(config: Any, data: Mapping[str, Any]) -> Iterator[Finding]:
    """The class that the configuration was saved from must be of its own family."""
    named: Any = data.get("architectures")
    families = _families() if isinstance(named, list) and named else {}
    model_type = getattr(config, "model_type", "")
    for name in named if families else ():
        found = families.get(name, set()) if isinstance(name, str) else set()
        if found and model_type not in found:
            yield Finding.error(
                "config.architecture",
                f"config.json contradicts itself: model_type is {model_type!r}, architectures names "
                f"{shown(name)}, a class of {sorted(found)[0]!r}",
                "model_type decides what is built; the weights are probably of the other",
                "use the config.json that belongs to the weights",
            )
            return


def _families() -> dict[str, set[str]]:
    """Class name → model types, from the tables of transformers; nothing is imported by a name from a file."""
    import_modelling()
    from transformers.models.auto import modeling_auto

    found: dict[str, set[str]] = {}
    for table_name, table in vars(modeling_auto).items():
        if table_name.endswith("_MAPPING_NAMES") and isinstance(table, Mapping):
            for model_type, classes in table.items():
                for name in (classes,) if isinstance(classes, str) else classes:
                    found.setdefault(name, set()).add(model_type)
    return found


def check_version(saved_with: Any, installed: str | None = None) -> Iterator[Finding]:
    """The transformers that wrote the configuration against the one that reads it."""
    from packaging.version import InvalidVersion, Version

    if saved_with is None:
        return
    try:
        saved, here = Version(str(saved_with)[:40]), Version(installed or version("transformers"))
    except InvalidVersion:
        what = f"config.json says it was written by transformers {shown(saved_with)}, which is no version"
        yield Finding.info("config.version", what)
        return
    if saved.major > here.major:
        yield Finding.warning(
            "config.version",
            f"config.json was written by transformers {saved}; installed is {here}",
            "fields or weights may have changed their meaning since; unknown ones are silently ignored",
            f'pip install "transformers>={saved.major}"',
        )
    elif saved.release > here.release:
        what = f"config.json was written by a newer transformers ({saved}) than the installed {here}"
        yield Finding.info("config.version", what, "within one major version it should load alike")


def _label_names(data: Mapping[str, Any]) -> Iterator[Finding]:
    """id2label, label2id and num_labels must agree."""
    names, numbers, count = data.get("id2label"), data.get("label2id"), data.get("num_labels")
    if not isinstance(names, dict):
        return
    problems = []
    if sorted(map(str, names)) != sorted(map(str, range(len(names)))):
        problems.append(f"id2label does not number its {len(names)} labels from 0 to {len(names) - 1}")
    if type(count) is int and count != len(names):
        problems.append(f"num_labels is {count}, id2label has {len(names)}")
    if isinstance(numbers, dict):
        wrong = [k for k, v in names.items() if isinstance(v, str) and str(numbers.get(v)) != str(k)]
        problems += [f"label2id numbers {shown(names[k])!r} otherwise than id2label ({shown(k)})" for k in wrong[:1]]
    for problem in problems:
        yield Finding.warning(
            "config.labels",
            f"config.json: {problem}",
            "predictions would come out under the wrong names, or the head in the wrong size",
            "make id2label and label2id the inverse of each other",
        )


def _special_ids(config: Any) -> Iterator[Finding]:
    """Ids of special tokens must be rows of the word embedding."""
    rows: Any = getattr(config, "vocab_size", None)
    for name in SPECIAL_IDS if isinstance(rows, int) else ():
        value = getattr(config, name, None)
        if type(value) is int and not 0 <= value < rows and value != -1:
            yield Finding.error(
                "config.special_tokens",
                f"config.json says {name} {value:,}, but vocab_size is {rows:,}",
                "the embedding has no such row: a device-side assert on the first batch that uses it",
                "use the config.json and tokenizer that belong to the weights",
                fatal=name == "pad_token_id",
            )


def check_names(subject: Subject) -> Iterator[Finding]:
    """Old names and prefixes that are mended on the way in, and names that cannot be."""
    matching = subject.matching
    for one, other in matching.collisions[:3]:
        yield Finding.error(
            "weights.duplicate",
            f"{one} and {other} are the same tensor of the model",
            "which of the two is right cannot be known",
            "save the model again with save_pretrained where it was trained",
            fatal=True,
        )
    if matching.wrapper:
        yield Finding.info(
            "weights.wrapper_prefix",
            f"the names begin with {matching.wrapper!r}, which a wrapper left there; it is taken off",
            "transformers would not recognise them and start the whole model at random",
            "vramfit loads it unchanged; for transformers, save model.module instead of the wrapper",
        )
    old = [name for name in matching.targets if name.endswith((".gamma", ".beta"))]
    if old:
        yield Finding.info(
            "weights.old_names",
            f"{len(old)} tensors have names of 2019 (gamma, beta), such as {old[0]}; they are renamed",
            "the same numbers under the names of today (weight, bias); nothing to do",
        )
    prefix = getattr(subject.model, "base_model_prefix", "")
    names = {name: name.removeprefix(matching.wrapper) for name in matching.targets if prefix}
    begins = f"{prefix}."
    moved = [n for n, bare in names.items() if bare.startswith(begins) != matching.targets[n].startswith(begins)]
    if moved:
        example = f"{moved[0]} is {matching.targets[moved[0]]} in the model"
        yield Finding.info(
            "weights.base_prefix",
            f"{len(moved)} names differ by the prefix {prefix!r}: {example}",
            "saved with another head or with none; they are matched, nothing to do",
        )


def check_dtypes(subject: Subject) -> Iterator[Finding]:
    """The precision that the weights are saved in."""
    quantized = subject.config_data.get("quantization_config")
    if isinstance(quantized, dict):
        yield _quantized(f"quantized with {quantized.get('quant_method') or 'an unnamed method'}")
        return
    targets = subject.matching.targets
    floats = [
        e for e in subject.entries if e.name in targets and subject.state[targets[e.name]].dtype.is_floating_point
    ]
    whole_numbers = [e for e in floats if e.dtype not in FLOATS]
    counts = Counter(e.dtype for e in floats).most_common()
    dtype = counts[0][0] if counts else "F32"
    if whole_numbers:
        names = some([e.name for e in whole_numbers])
        yield _quantized(f"in {whole_numbers[0].dtype} where the model has floating point: {names}")
    elif len(counts) > 1:
        parts = ", ".join(f"{count} in {_WORDS.get(name, name)}" for name, count in counts)
        yield Finding.warning(
            "weights.dtype",
            f"the weights are in several precisions: {parts}",
            "they are brought to one when loaded; those in fewer bits have lost digits",
        )
    elif dtype in ("F16", "BF16"):
        yield Finding.warning(
            "weights.dtype",
            f"the weights are saved in {_WORDS[dtype]}",
            "good for inference; trained as they are, small updates round away"
            + (" and gradients underflow" if dtype == "F16" else ""),
            "to train, load them in fp32 and use --precision amp-bf16 (amp-fp16 before Ampere)",
        )
    elif dtype not in _WORDS:
        yield _quantized(f"saved in {dtype}")
    elif dtype == "F64":
        yield Finding.info("weights.dtype", "the weights are in fp64; half the bytes say as much")


def _quantized(how: str) -> Finding:
    return Finding.error(
        "weights.quantized",
        f"the weights are {how}",
        "they are no numbers to load into the layers as they are",
        "take the full-precision checkpoint and quantize it while loading: vramfit load MODEL --quantize int8",
        fatal=True,
    )


def check_fit(num_parameters: int, gpu_free_bytes: int | None) -> Iterator[Finding]:
    """Whether the weights alone fit the GPU at hand."""
    if gpu_free_bytes is None:
        return
    fp32 = 4 * num_parameters
    what = (
        f"the weights take {format_bytes(fp32)} in fp32, {format_bytes(fp32 // 2)} in bf16; "
        f"the GPU has {format_bytes(gpu_free_bytes)} free"
    )
    if 4 * fp32 <= gpu_free_bytes:
        yield Finding.ok("gpu.weights", what)
    elif fp32 <= gpu_free_bytes:
        why = "training with AdamW takes four times as much, and activations"
        yield Finding.warning("gpu.weights", what, why, "see `vramfit max-batch MODEL`")
    elif fp32 // 2 <= gpu_free_bytes:
        yield Finding.error("gpu.weights", what, "they do not fit in fp32", "load with --precision bf16")
    else:
        fix = "load with --quantize int8, or with --offload weights"
        yield Finding.error("gpu.weights", what, "they do not fit in either", fix)


def summarize(subject: Subject) -> Iterator[Finding]:
    """One line that says what is there, when all of it fits."""
    num_bytes = sum(e.num_bytes for e in subject.entries)
    files, others = subject.files.paths, subject.files.others
    where = files[0].name if len(files) == 1 else f"{len(files)} shards"
    fits = not (subject.matching.mismatched or subject.matching.collisions)
    used = len(subject.matching.targets) + len(subject.matching.converted)
    yield Finding.ok(
        "weights.files",
        f"{where}: {len(subject.entries)} tensors, {format_bytes(num_bytes)}; {used} of them go into "
        f"{subject.class_name}" + (", every shape as the model has it" if fits and used else ""),
    )
    if others:
        yield Finding.info("weights.other_files", f"the folder also holds {some(others)}; not read")


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


def check_shapes(subject: Subject) -> Iterator[Finding]:
    """Findings about tensors of another shape than the model's, one for each field at fault."""
    labels = [m for m in subject.matching.mismatched if is_about_labels(subject, m)]
    others = [m for m in subject.matching.mismatched if not is_about_labels(subject, m)]
    suspects = {m.name: _suspects(subject, m) for m in others}
    votes = Counter(culprit for found in suspects.values() for culprit in found)
    groups: dict[_Culprit, list[ShapeMismatch]] = defaultdict(list)
    for mismatch in others:
        found = suspects[mismatch.name]
        groups[max(found, key=lambda c: (votes[c], c[0] in _ONLY_OF)) if found else ("", 0, 0)].append(mismatch)
    for culprit, mismatches in groups.items():
        yield _contradiction(*culprit, mismatches)
    if labels:
        yield _labels(subject, labels)


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
    return Finding.error(
        f"weights.shape.{field}" if field else "weights.shape",
        said + example + more,
        "loading fails, or, with ignore_mismatched_sizes, these tensors start at random",
        OTHER_CONFIG + (f"; there {field} should be {has:,}" if field else ""),
        fatal=True,
    )


def _labels(subject: Subject, found: Sequence[ShapeMismatch]) -> Finding:
    first = found[0]
    shapes = f"{first.entry.name} is {sizes(first.entry.shape)} in the checkpoint, {sizes(first.expected)} in the model"
    rows = first.entry.shape[0] if first.entry.shape else 0
    asked = subject.num_labels_asked
    if asked is not None:
        return Finding.warning(
            "weights.head_replaced",
            f"a head for {asked} labels was asked for, the checkpoint's has {rows}: {shapes}",
            "the head starts at random and must be trained",
            f"leave num_labels out, or give {rows}, to keep the head of the checkpoint",
        )
    num_labels = len(getattr(subject.resolved.config, "id2label", None) or ())
    return Finding.error(
        "weights.labels",
        f"config.json has {num_labels} labels, the checkpoint's head {rows}: {shapes}",
        "the head cannot be loaded",
        f"give id2label in config.json {rows} labels, or ask for a new head with num_labels",
        fatal=True,
    )
