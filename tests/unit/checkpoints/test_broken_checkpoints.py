"""Every kind of `scripts/make_broken_checkpoints.py` gets its own clear finding."""

from pathlib import Path

import pytest
from tests.unit.checkpoints.broken import load_script

from vramfit.doctor.checkup import check_model
from vramfit.records.finding import Finding

script = load_script()


def findings_of(kind: str, sound: Path, out: Path) -> list[Finding]:
    folder = script.make(kind, sound, out)
    return check_model(folder, scan=script.KINDS[kind].scan)


def test_the_sound_checkpoint_has_nothing_to_mend(sound_folder: Path) -> None:
    assert {f.severity for f in check_model(sound_folder, scan=True)} == {"ok"}


@pytest.mark.parametrize("kind", script.KINDS)
def test_each_kind_is_told_what_is_wrong_with_it(kind: str, sound_folder: Path, tmp_path: Path) -> None:
    found = findings_of(kind, sound_folder, tmp_path)
    answer = next(f for f in found if f.check == script.KINDS[kind].check)
    assert script.KINDS[kind].says in answer.what
    assert answer.why
    assert answer.severity != "ok"
    assert answer.fix or answer.severity == "info" or kind == "config-absurd"
    assert not (tmp_path / kind / "code-was-run").exists()


def test_there_are_many_kinds_and_no_two_say_the_same() -> None:
    assert len(script.KINDS) >= 40
    assert len({kind.says for kind in script.KINDS.values()}) == len(script.KINDS)
