"""A run shown in the terminal."""

import io
from dataclasses import replace
from html import unescape

from rich.console import Console

from vramfit.records.run import EvaluationResult, RunRecord, SettingsChange
from vramfit.report.display import run_html
from vramfit.report.run import render_metrics, render_run

RECORD = RunRecord(
    model="minilm",
    model_class="BertForSequenceClassification",
    task="sequence-classification",
    data="d.csv",
    output="my-model",
    device="cuda:0",
    status="completed",
    num_samples=1000,
    num_truncated=7,
    settings={"batch": 32, "precision": "amp-fp16"},
    num_epochs=2.0,
    num_steps=64,
    num_skipped=1,
    loss_scale=32768.0,
    num_recoveries=2,
    final_micro_batch=8,
    train_loss=0.25,
    num_loss_batches=32,
    evaluations=(EvaluationResult(step=32, epoch=1.0, metrics={"accuracy": 0.9}, time_s=1.0, is_best=True),),
    best_metric="accuracy",
    best_value=0.9,
    best_step=32,
    budget_bytes=2**30,
    predicted_reserved_bytes=2**29,
    measured_reserved_bytes=2**28,
    predicted_step_time_s=0.1,
    step_time_s=0.125,
    time_s=75.0,
    num_tokens=64000,
    tokens_per_s=1000.0,
)


def shown(content: object) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(content)
    return console.export_text()


def test_a_run_shows_what_it_took_beside_what_was_predicted() -> None:
    text = shown(render_run(RECORD))
    for part in (
        "1,000 samples; 7 rows too long, and cut",
        "256.00 MiB; predicted 512.00 MiB; budget 1.00 GiB",
        "125 ms; predicted 100 ms",
        "2: memory ran out and nothing was lost",
        "loss scale 32768, 1 step skipped",
        "64 in 2 epochs",
        "0.2500 over the last 32 batches",
        "accuracy 0.9000 at step 32",
        "1 min 15 s",
        "Saved in my-model",
    ):
        assert part in text


def test_an_emulated_peak_is_not_shown_as_one_that_contradicts_the_prediction() -> None:
    run = replace(RECORD, device="emulated", measured_reserved_bytes=2**29, predicted_reserved_bytes=2**28)
    said = (
        "512.00 MiB with the CPU's kernels; budget 1.00 GiB; "
        "predicted 256.00 MiB with a GPU's, which need other temporaries: the two are not to be compared"
    )
    assert said in " ".join(shown(render_run(run)).split())
    assert said in unescape(run_html(run))


def test_what_a_run_changed_on_the_way_is_shown() -> None:
    change = SettingsChange(
        step=7,
        cause="less memory",
        said="After step 7: 1.00 GiB of the 2.00 GiB are there; the run goes on with micro_batch 4.",
        available_bytes=2**30,
        before={"micro_batch": 8},
        after={"micro_batch": 4},
        step_time_s=0.1,
        plan_s=1.0,
    )
    run = replace(RECORD, changes=(change,))
    assert change.said in " ".join(shown(render_run(run)).split())


def test_one_epoch_and_one_batch_are_said_as_one() -> None:
    text = shown(render_run(replace(RECORD, num_epochs=1.0, num_loss_batches=1)))
    assert "64 in 1 epoch," in text
    assert "over the last batch\n" in text.replace(" \n", "\n").replace("  ", "")


def test_metrics_are_numbers_only() -> None:
    text = shown(render_metrics({"accuracy": 0.5, "num_samples": 1200, "names": ["a"]}))
    assert "0.5000" in text
    assert "1,200" in text
    assert "names" not in text


def test_the_evaluations_fit_eighty_columns() -> None:
    metrics = {"accuracy": 0.9, "macro_f1": 0.9, "f1": 0.9, "mcc": 0.8, "loss": 0.3}
    result = EvaluationResult(step=1000, epoch=1.0, metrics=metrics, time_s=1.0, is_best=True)
    stream = io.StringIO()
    Console(file=stream, width=80).print(render_run(replace(RECORD, evaluations=(result,))))
    assert any(line.rstrip().endswith("0.3000  best so far") for line in stream.getvalue().splitlines())
