"""A release speaks with one voice: package, changelog and citation have the same version and date."""

import re
from pathlib import Path

import vramfit

ROOT = Path(__file__).parents[1]


def test_changelog_and_citation_have_the_version_of_the_package() -> None:
    newest = re.search(r"^## (\S+), (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    citation = (ROOT / "CITATION.cff").read_text()
    assert newest[1] == vramfit.__version__
    assert f"version: {vramfit.__version__}\n" in citation
    assert f'date-released: "{newest[2]}"' in citation
