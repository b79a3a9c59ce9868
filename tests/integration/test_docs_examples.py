"""The Python blocks of the documentation run as they stand, one after another."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def run_page(page: str) -> dict[str, Any]:
    """Run the blocks; gives what they left."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", ["stepper.md"])
def test_the_examples_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page(page)
    assert names["stepper"].num_steps >= 5
    assert names["stepper"].num_recoveries >= 1
    assert capsys.readouterr().out


def test_the_loop_for_several_gpus_runs_alone_too(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("several-gpus.md")
    assert names["stepper"].num_steps == 3
    assert re.findall(r"^step (\d): loss 0\.\d+$", capsys.readouterr().out, re.MULTILINE) == ["1", "2", "3"]


def test_the_example_of_watching_names_its_leak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "watching.md").read_text(encoding="utf-8"), re.DOTALL)
    page = tmp_path / "watching.py"
    page.write_text(block, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), names)
    leak = 1 + block.split("kept.append")[0].count("\n")
    (found,) = names["w"].findings
    assert found.source == f"{page}:{leak}"
    assert found.check in capsys.readouterr().out


def test_the_emulated_watch_is_said_to_be_the_script_s_own() -> None:
    before, after = (DOCS / "watching.md").read_text(encoding="utf-8").split("vramfit watch  emulated of 80.00 MiB")
    assert 'vramfit.EmulatedGPU(memory="80MiB")' in before
    assert "--device" not in before + after


def test_the_page_on_host_memory_runs_and_its_prediction_holds(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "offloading.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, "offloading.md", "exec"), names)
    assert names["stepper"].num_steps == 1
    assert capsys.readouterr().out.startswith("True ")


def test_the_examples_of_the_trainer_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("trainer.md")
    shown = capsys.readouterr()
    assert "A step is 4 times too long" in shown.out
    assert "-gradient_accumulation_steps=4\n+gradient_accumulation_steps=1" in shown.out
    assert "16 samples as before" in shown.err
    assert names["trainer"].state.global_step == 9  # three epochs of 16, 16 and 8 samples
    assert (names["stepper"].num_steps, names["schedule"].last_epoch) == (6, 6)
    assert names["monitor"].record.num_steps == names["watched"].state.global_step
    assert 0 < names["watched"].state.log_history[-1]["vram_peak_reserved_gib"] <= 0.25


def test_the_line_that_the_readme_adds_to_a_trainer_script_works() -> None:
    import tempfile

    import torch
    from transformers import Trainer, TrainingArguments

    import vramfit

    model, _ = vramfit.load("bert-tiny", random_weights=True, device="cpu")
    samples = [{"input_ids": torch.randint(1000, 30000, (16,)), "labels": i % 2} for i in range(4)]
    args = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, report_to="none")
    names: dict[str, Any] = {"trainer": Trainer(model=model, args=args, train_dataset=samples)}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert blocks
    assert names["trainer"].vramfit.plan.micro_batch >= 1


def test_the_loops_of_the_sagemaker_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("sagemaker.md")
    assert names["plain"].num_steps == 12  # three epochs of four batches
    assert (names["accumulated"].num_steps, names["accumulated"].micro_batch) == (4, 4)
    assert names["mixed"].num_steps + names["mixed"].num_skipped >= 4
    assert names["before"].fits is True
    assert names["found"].batch >= 16
    phases = names["watched"].record.phases
    assert 0 < phases["backward"].peak_allocated_bytes <= names["gpu"].max_reserved_bytes
    assert "allocated" in capsys.readouterr().out
