"""The configuration by itself: its class against its family, the version that wrote it, labels, special tokens."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from vramfit.checkpoints.untrusted import shown
from vramfit.quiet import import_modelling
from vramfit.records.finding import Finding

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def check_config(config: Any, data: Mapping[str, Any]) -> list[Finding]:
    """Every check that needs no weights."""
    return [
        *check_architectures(config, data),
        *check_version(data.get("transformers_version")),
        *check_labels(data),
        *check_special_ids(config),
    ]


def check_architectures(config: Any, data: Mapping[str, Any]) -> list[Finding]:
    """The class that the configuration was saved from must be of its own family."""
    named = data.get("architectures")
    if not isinstance(named, list) or not named:
        return []
    families = _families()
    model_type = getattr(config, "model_type", "")
    for name in named:
        found = families.get(name, set()) if isinstance(name, str) else set()
        if found and model_type not in found:
            return [
                Finding(
                    check="config.architecture",
                    severity="error",
                    what=f"config.json contradicts itself: model_type is {model_type!r}, architectures names "
                    f"{shown(name)}, a class of {sorted(found)[0]!r}",
                    why="model_type decides what is built; the weights are probably of the other",
                    fix="use the config.json that belongs to the weights",
                )
            ]
    return []


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


def check_version(saved_with: Any, installed: str | None = None) -> list[Finding]:
    """The transformers that wrote the configuration against the one that reads it."""
    from packaging.version import InvalidVersion, Version

    installed = installed or version("transformers")
    if saved_with is None:
        return []
    try:
        saved, here = Version(str(saved_with)[:40]), Version(installed)
    except InvalidVersion:
        return [
            Finding(
                check="config.version",
                severity="info",
                what=f"config.json says it was written by transformers {shown(saved_with)}, which is no version",
            )
        ]
    if saved.major > here.major:
        return [
            Finding(
                check="config.version",
                severity="warning",
                what=f"config.json was written by transformers {saved}; installed is {here}",
                why="fields or weights may have changed their meaning since; unknown ones are silently ignored",
                fix=f'pip install "transformers>={saved.major}"',
            )
        ]
    if saved.release > here.release:
        return [
            Finding(
                check="config.version",
                severity="info",
                what=f"config.json was written by a newer transformers ({saved}) than the installed {here}",
                why="within one major version it should load alike",
            )
        ]
    return []


def check_labels(data: Mapping[str, Any]) -> list[Finding]:
    """id2label, label2id and num_labels must tell one story."""
    names, numbers, count = data.get("id2label"), data.get("label2id"), data.get("num_labels")
    problems = []
    if isinstance(names, dict):
        if sorted(map(str, names)) != sorted(map(str, range(len(names)))):
            problems.append(f"id2label does not number its {len(names)} labels from 0 to {len(names) - 1}")
        if type(count) is int and count != len(names):
            problems.append(f"num_labels is {count}, id2label has {len(names)}")
        if isinstance(numbers, dict):
            wrong = [k for k, v in names.items() if isinstance(v, str) and str(numbers.get(v)) != str(k)]
            if wrong:
                problems.append(
                    f"label2id numbers {shown(names[wrong[0]])!r} otherwise than id2label ({shown(wrong[0])})"
                )
    return [
        Finding(
            check="config.labels",
            severity="warning",
            what=f"config.json: {problem}",
            why="predictions would come out under the wrong names, or the head in the wrong size",
            fix="make id2label and label2id the inverse of each other",
        )
        for problem in problems
    ]


def check_special_ids(config: Any) -> list[Finding]:
    """Ids of special tokens must be rows of the word embedding."""
    rows = getattr(config, "vocab_size", None)
    if not isinstance(rows, int):
        return []
    findings = []
    for name in SPECIAL_IDS:
        value = getattr(config, name, None)
        if type(value) is int and not 0 <= value < rows and value != -1:
            findings.append(
                Finding(
                    check="config.special_tokens",
                    severity="error",
                    what=f"config.json says {name} {value:,}, but vocab_size is {rows:,}",
                    why="the embedding has no such row: a device-side assert on the first batch that uses it",
                    fix="use the config.json and tokenizer that belong to the weights",
                    fatal=name == "pad_token_id",
                )
            )
    return findings
