"""`doctor --lock`: the exact versions of this environment, as a file that recreates it."""

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from vramfit.errors import VramfitError
from vramfit.records.codec import replace_file

HEADER = "# Written by `vramfit doctor --lock`"


@dataclass(frozen=True, kw_only=True, slots=True)
class LockedPackage:
    """One line of a lock."""

    name: str
    version: str
    direct: str | None = None
    """Where it was installed from, when not from an index: a URL pip takes, or "" for a local folder."""

    @property
    def line(self) -> str:
        """The requirement; a comment where no other machine could install it."""
        public, _, local = self.version.partition("+")
        if self.direct:
            return f"{self.name} @ {self.direct}"
        if self.direct == "":
            return f"# {self.name}=={self.version}: installed here from a local folder"
        return f"{self.name}=={public}" + (f"  # here: {self.version}" if local else "")


def installed(found: Iterable[Distribution] | None = None) -> list[LockedPackage]:
    """Every installed distribution, by name; the first of a name on the path wins, as it does in Python."""
    packages: dict[str, LockedPackage] = {}
    for distribution in found if found is not None else distributions():
        name = distribution.metadata["Name"]
        key = (name or "").lower().replace("_", "-")
        if name and key not in packages:
            packages[key] = LockedPackage(name=name, version=distribution.version, direct=_direct_url(distribution))
    return [packages[key] for key in sorted(packages)]


def _direct_url(distribution: Distribution) -> str | None:
    """PEP 610: where a package came from when it came from no index."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        return None
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return None
    url = str(data.get("url", ""))
    if url.startswith("file:"):
        # a wheel from a local index is what the index would have given; a folder is not
        return "" if "dir_info" in data else None
    vcs = data.get("vcs_info")
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url


def as_requirements(packages: list[LockedPackage]) -> str:
    """A requirements file: `pip install -r FILE`."""
    head = f"{HEADER}: Python {platform.python_version()}. Recreate with: pip install -r FILE\n"
    return head + "".join(f"{p.line}\n" for p in packages)


def as_conda(packages: list[LockedPackage], name: str) -> str:
    """A conda environment: `conda env create -f FILE`; everything but Python through pip."""
    lines = [
        f"{HEADER}. Recreate with: conda env create -f FILE",
        f"name: {name}",
        "channels:",
        "  - conda-forge",
        "dependencies:",
        f"  - python={platform.python_version()}",
        "  - pip",
        "  - pip:",
    ]
    lines += [f"      {p.line}" if p.line.startswith("#") else f"      - {p.line}" for p in packages if p.name != "pip"]
    return "\n".join(lines) + "\n"


def write_lock(path: Path, packages: list[LockedPackage] | None = None) -> int:
    """Write the lock, as conda for `.yml`/`.yaml`, else as requirements; gives the number of packages.

    Raises:
        VramfitError: the file exists and is not a lock, or cannot be written.
    """
    packages = packages if packages is not None else installed()
    conda = path.suffix.lower() in (".yml", ".yaml")
    text = as_conda(packages, path.stem) if conda else as_requirements(packages)
    _refuse_foreign(path)
    replace_file(path, text.encode())
    return len(packages)


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
