"""Lines for CloudWatch: figures of a run in a form that SageMaker's metric definitions catch, memory included."""

import math
import sys
import time
from typing import TextIO

from vramfit.report.run import metrics_in_words
from vramfit.runtime.training import events
from vramfit.units import counted

EVERY_S = 1.0
"""Seconds between two lines of figures, at least; the first and the last step always have one."""
MARK = "[metrics]"
_NUMBER = r"([-+0-9.eE]+)"
_TRAINING = ("loss", "lr", "tokens_per_s", "reserved_bytes", "num_recoveries")
_EVALUATION = ("loss", "accuracy", "f1", "exact_match", "perplexity")

METRIC_DEFINITIONS: list[dict[str, str]] = [
    *({"Name": f"train:{name}", "Regex": rf"\[metrics\].* {name}={_NUMBER}"} for name in _TRAINING),
    *({"Name": f"eval:{name}", "Regex": rf"\[metrics\].* eval_{name}={_NUMBER}"} for name in _EVALUATION),
]
"""What to give SageMaker as metric definitions; `vramfit sagemaker launch` does."""


class MetricLines:
    """Writes what a run tells, a line each."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        self._last_s = -math.inf

    def show(self, event: events.Event) -> None:
        """One event."""
        if isinstance(event, events.Note):
            self._say(event.text)
        elif isinstance(event, events.Started):
            begin = f"Going on after step {event.step:,}" if event.step else "Training"
            self._say(f"{begin}: {counted(event.num_steps, 'step')}, {event.settings}.")
        elif isinstance(event, events.Stepped):
            now = time.monotonic()
            if now - self._last_s >= EVERY_S or event.step >= event.num_steps:
                self._last_s = now
                self._figures({"step": event.step} | {name: getattr(event, name) for name in _TRAINING})
        elif isinstance(event, events.Evaluated):
            numbers: dict[str, float | int | None] = {"step": event.result.step}
            numbers |= {f"eval_{k}": v for k, v in event.result.metrics.items() if isinstance(v, int | float)}
            self._figures(numbers)
            self._say(f"Step {event.result.step:,}: {metrics_in_words(event.result.metrics)}")
        elif isinstance(event, events.Saved):
            self._say(f"Saved step {event.step:,}.")

    def _figures(self, numbers: dict[str, float | int | None]) -> None:
        known = {name: value for name, value in numbers.items() if value is not None}
        words = [
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in known.items()
        ]
        self._say(" ".join([MARK, *words]))

    def _say(self, text: str) -> None:
        print(text, file=self._file, flush=True)
