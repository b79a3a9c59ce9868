"""Python and the packages: versions against what vramfit and transformers ask for, and what is missing."""

from collections import defaultdict

from packaging.requirements import Requirement

from vramfit.doctor.environment import Environment
from vramfit.records.finding import Finding

OLDEST_PYTHON = (3, 11)
SHOWN = ("transformers", "tokenizers", "safetensors", "huggingface-hub")


def check_python(env: Environment) -> list[Finding]:
    """The interpreter."""
    found = ".".join(map(str, env.python))
    if env.python[:2] < OLDEST_PYTHON:
        return [
            Finding(
                check="python.version",
                severity="error",
                what=f"Python {found} is older than 3.11",
                fix="use Python 3.11 or newer",
            )
        ]
    return [Finding(check="python.version", severity="ok", what=f"Python {found} on {env.system}")]


def check_packages(env: Environment) -> list[Finding]:
    """Every requirement of vramfit itself, and of transformers, against what is installed."""
    findings = [
        Finding(check=f"package.{name}", severity="ok", what=f"{name} {env.packages[name]}")
        for name in SHOWN
        if name in env.packages
    ]
    for owner, texts in env.requirements.items():
        for text in texts:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                findings += _check_requirement(env, owner, requirement)
    return findings


def _check_requirement(env: Environment, owner: str, requirement: Requirement) -> list[Finding]:
    if requirement.name == "torch" and env.torch is None:
        return []  # check_torch has said so
    found = env.packages.get(requirement.name)
    if found is not None and requirement.specifier.contains(found, prereleases=True):
        return []
    wanted = f"{requirement.name}{requirement.specifier}"
    what = f"{requirement.name} {found}" if found else f"{requirement.name} is not installed"
    return [
        Finding(
            check=f"package.{requirement.name}",
            severity="error",
            what=f"{what}; {owner} needs {wanted}",
            why="imports fail, or models load differently than they should",
            fix=f'pip install "{wanted}"',
        )
    ]


def check_extras(env: Environment) -> list[Finding]:
    """Optional features: which are ready, and the command for those that are not."""
    missing: dict[str, list[str]] = defaultdict(list)
    for text in env.requirements.get("vramfit", ()):
        requirement = Requirement(text)
        extra = _extra(requirement)
        if extra and extra != "test" and requirement.name != "vramfit":
            found = env.packages.get(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                missing[extra].append(requirement.name)
            else:
                missing.setdefault(extra, [])
    return [
        Finding(check=f"extra.{extra}", severity="ok", what=f"extra {extra} is installed")
        if not names
        else Finding(
            check=f"extra.{extra}",
            severity="info",
            what=f"extra {extra} is not installed (lacks {', '.join(names)})",
            fix=f'pip install "vramfit[{extra}]"',
        )
        for extra, names in sorted(missing.items())
    ]


def _extra(requirement: Requirement) -> str | None:
    """The extra a requirement belongs to; None for a plain one."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return None
    text = str(marker)
    return text.split("extra ==", 1)[1].strip().strip("\"'") if "extra ==" in text else None
