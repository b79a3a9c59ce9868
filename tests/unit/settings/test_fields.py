"""The types of `Workload`'s fields, which are made of the settings."""

import runpy
from pathlib import Path

from vramfit.settings import SETTINGS
from vramfit.workload import Workload

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_fields.py"


def test_type_checkers_are_told_what_the_settings_say() -> None:
    made = runpy.run_path(str(SCRIPT))
    assert made["PATH"].read_text(encoding="utf-8") == made["text"](), f"run python scripts/{SCRIPT.name}"


def test_what_is_asked_of_a_setting_is_a_property_of_a_workload() -> None:
    names = [question.__name__ for s in SETTINGS.values() for question in s.asked]
    assert len(set(names)) == len(names)
    assert not set(names) & set(SETTINGS)
    workload = Workload(model="m", precision="amp-bf16", attention="packed", loop="stepper", fused=True)
    answers = {name: getattr(workload, name) for name in names}
    assert [answers[name] for name in ("is_packed", "autocasts", "is_fused")] == [True] * 3
    assert [answers[name] for name in ("is_32_bit", "offloads", "shards")] == [False] * 3
    assert answers["num_passes"] == 1
