"""Build the wheel and the source archive, install them into an empty environment, and use them from an empty folder.

    python scripts/check_release.py                  # into dist/; needs a package index, takes some minutes
    python scripts/check_release.py --wheel FILE     # checks a wheel that is there

Every command must leave as it should, and must not see this repository.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("--version",), 0),
    (("estimate", "bert-base-uncased", "--gpu", "t4", "--batch", "16", "--seq", "128"), 0),
    (("max-batch", "bert-base-uncased", "--gpu", "t4", "--seq", "512"), 0),
    (("plan", "bert-base-uncased", "--gpu", "t4", "--batch", "32", "--seq", "512"), 0),
    (("estimate", "bert-large-uncased", "--batch", "64", "--seq", "512", "--memory", "4GiB"), 3),
    (("gpus", "ml.g5.xlarge"), 0),
    (("models", "bert-base-uncased"), 0),
    (("load", "bert-tiny", "--random-weights", "--device", "cpu"), 0),
    (("estimate", "bert-bas-uncased"), 1),
)
"""What is asked of an installed package, and how it must leave."""


def main() -> int:
    """0 when everything left as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a wheel that is there; else both are built")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel, archive = (options.wheel.resolve(), None) if options.wheel else build(work, options.dist)
        python = make_environment(work / "empty")
        install(python, str(wheel))
        failed = use(python, work)
        if archive is not None:
            install(python, "--no-deps", "--force-reinstall", str(archive))
            failed += use(python, work, COMMANDS[:2])
    print(f"{failed} commands left as they should not" if failed else "everything left as it should")
    return int(failed > 0)


def build(work: Path, dist: Path) -> tuple[Path, Path]:
    """The wheel and the source archive, built in isolation."""
    python = make_environment(work / "build")
    install(python, "build")
    for old in dist.glob("vramfit-*"):
        old.unlink()
    subprocess.run([python, "-m", "build", "--outdir", str(dist), str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (archive,) = list(dist.glob("*.whl")), list(dist.glob("*.tar.gz"))
    for made in (wheel, archive):
        print(f"built {made.name}, {made.stat().st_size / 2**20:.1f} MiB", flush=True)
    return wheel, archive


def make_environment(folder: Path) -> str:
    """A new environment; gives its Python."""
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


def install(python: str, *what: str) -> None:
    """Install with the versions that are tested."""
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *what], check=True, env=clean())


def use(python: str, work: Path, commands: tuple[tuple[tuple[str, ...], int], ...] = COMMANDS) -> int:
    """Run commands in an empty folder; how many left otherwise than they should."""
    place = work / "nowhere"
    place.mkdir(exist_ok=True)
    code = "import vramfit, json; print(json.dumps([vramfit.__version__, vramfit.__file__]))"
    told = subprocess.run([python, "-c", code], cwd=place, env=clean(), capture_output=True, text=True, check=True)
    version, file = json.loads(told.stdout)
    failed = int(Path(file).is_relative_to(ROOT))
    print(f"vramfit {version} installed", flush=True)
    for arguments, wanted in commands:
        command = [str(Path(python).with_name("vramfit")), *arguments]
        done = subprocess.run(command, cwd=place, env=clean(), capture_output=True, text=True)
        bad = done.returncode != wanted or "Traceback" in done.stderr
        failed += bad
        print(f"{'✗' if bad else '✓'} vramfit {' '.join(arguments)} left with {done.returncode}", flush=True)
        if bad:
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return failed


def clean() -> dict[str, str]:
    """This environment without what would lead back to the repository."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120", "NO_COLOR": "1"}


if __name__ == "__main__":
    sys.exit(main())
