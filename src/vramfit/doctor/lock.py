"""`doctor --lock`: the exact versions of this environment, as a file that recreates it."""

import json
import platform
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from vramfit.errors import VramfitError
from vramfit.records.codec import replace_file

HEADER = "# Written by `vramfit doctor --lock`"
CONDA = """{header}. Recreate with: conda env create -f FILE
name: {name}
channels:
  - conda-forge
dependencies:
  - python={python}
  - pip
  - pip:
"""


def requirement_of(distribution: Distribution) -> str:
    """The line that installs a distribution again; a comment where no other machine could install it."""
    name, version = distribution.metadata["Name"], distribution.version
    try:  # PEP 610: where it came from when it came from no index
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except json.JSONDecodeError:
        origin = {}
    if "vcs_info" in origin:
        return f"{name} @ {origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}"
    if "dir_info" in origin:
        return f"# {name}=={version}: installed here from a local folder"
    if origin and not origin["url"].startswith("file:"):
        return f"{name} @ {origin['url']}"
    public, _, local = version.partition("+")  # a wheel from a local folder is what the index would have given
    return f"{name}=={public}" + (f"  # here: {version}" if local else "")


def write_lock(path: Path, found: Iterable[Distribution] | None = None) -> int:
    """Write the lock, as a conda environment for `.yml` or `.yaml`, else as requirements; gives the number of packages.

    Args:
        found: distributions to lock; None takes all that are installed. The first of a name on the path wins, as in
            Python.

    Raises:
        VramfitError: the file exists and is not a lock, or cannot be written.
    """
    lines: dict[str, str] = {}
    for distribution in distributions() if found is None else found:
        if distribution.metadata["Name"]:
            lines.setdefault(canonicalize_name(distribution.metadata["Name"]), requirement_of(distribution))
    python = platform.python_version()
    if path.suffix.lower() in (".yml", ".yaml"):
        text = CONDA.format(header=HEADER, name=path.stem, python=python)
        made = [lines[name] for name in sorted(lines) if name != "pip"]
        text += "".join(f"      {'' if line.startswith('#') else '- '}{line}\n" for line in made)
    else:
        text = f"{HEADER}: Python {python}. Recreate with: pip install -r FILE\n"
        text += "".join(f"{lines[name]}\n" for name in sorted(lines))
    _refuse_foreign(path)
    replace_file(path, text.encode())
    return len(lines)


def _refuse_foreign(path: Path) -> None:
    """Only a lock is overwritten: nobody loses a file to a slip of the keyboard."""
    if path.is_dir():
        raise VramfitError(f"{path} is a folder", hint=f"name a file, such as {path / 'requirements.lock.txt'}")
    try:
        existing = path.read_text(errors="replace") if path.exists() else HEADER
    except OSError as error:
        raise VramfitError(f"cannot read {path}: {error.strerror}") from None
    if not existing.startswith(HEADER):
        raise VramfitError(
            f"{path} exists and was not written by vramfit doctor --lock",
            hint="choose another name, or remove it first",
        )
