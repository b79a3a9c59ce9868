"""Measurements that others published, on cards that were not measured here, beside predictions.

    python benchmarks/published_cards.py --predict   # predicts the rows that have no prediction yet; minutes, no GPU
    python benchmarks/published_cards.py             # compares, and writes docs/cards.md

`published/measurements.json` holds the rows with their sources, `published/predictions.json` what vramfit said. A
prediction carries a digest of the settings it was made for and never sees the measured figure. It was committed before
the two were compared, and is not made again: a row whose settings change gets a new prediction, and the log shows it.
`published/explanations.json` was written after comparing; what it predicts again is marked as such.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from published_page import EXPLANATIONS, PAGE, write_page

FOLDER = Path(__file__).parent / "published"
MEASUREMENTS, PREDICTIONS = FOLDER / "measurements.json", FOLDER / "predictions.json"
SETTINGS = ("card", "workload", "figure", "base", "num_outputs_held", "loss")
"""What a prediction is made for: everything of a row but its measurement and its source."""
BLOCK_BYTES = 512
"""Tensors take whole blocks of this size."""

Row = dict[str, Any]


def read_rows() -> list[Row]:
    """The measured rows."""
    rows: list[Row] = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))["rows"]
    return rows


def settings_of(row: Row) -> Row:
    """The part of a row that a prediction may see."""
    return {name: row[name] for name in SETTINGS if name in row}


def digest_of(row: Row) -> str:
    """A short digest of the settings of a row."""
    text = json.dumps(settings_of(row), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def predict(settings: Row) -> int:
    """The predicted figure of a row: bytes, or samples for a largest batch.

    Args:
        settings: what `settings_of` gives; there is no measurement in it.
    """
    import vramfit
    from vramfit.estimator.search import max_batch

    keywords = {"gpu": settings["card"], **settings["workload"]}
    model = keywords.pop("model")
    if settings["figure"] == "largest_batch":
        return max_batch(model, **keywords).cold_batch  # the first product of the process is this workload's
    subject = with_loss(model) if "loss" in settings else model
    figure = "allocated" if settings["figure"] == "allocated" else "reserved"

    def peak_bytes(changes: Row) -> int:
        made = vramfit.estimate(subject, **keywords | changes)
        return int(getattr(made.phases["steady_step"], f"peak_{figure}_bytes"))

    if settings["figure"] == "growth":
        return peak_bytes({}) - peak_bytes(settings["base"])
    return peak_bytes({}) + settings.get("num_outputs_held", 0) * output_bytes(settings["workload"])


def output_bytes(workload: Row) -> int:
    """What the hidden states and the pooled vectors of one fp16 pass take."""
    from vramfit.models.resolve import resolve

    config = resolve(workload["model"], task="features").config
    samples, width = workload["batch"], config.hidden_size
    sizes = [samples * workload["seq"] * width * 2] + ([samples * width * 2] if config.model_type == "bert" else [])
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


def with_loss(model: str) -> Any:
    """An encoder that learns the mean square of its hidden states."""
    import torch

    from vramfit.models.resolve import resolve

    resolved = resolve(model, task="features")

    class HiddenStateLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = resolved.config
            self.config._attn_implementation = "eager"
            self.encoder = resolved.model_class(self.config)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.encoder(input_ids=input_ids).last_hidden_state.float().pow(2).mean()

    return HiddenStateLoss()


def predict_all() -> None:
    """Predict every row that has no prediction for its settings."""
    import torch
    import transformers

    import vramfit

    made = json.loads(PREDICTIONS.read_text(encoding="utf-8")) if PREDICTIONS.exists() else {}
    with_what = f"vramfit {vramfit.__version__}, torch {torch.__version__.partition('+')[0]}, "
    with_what += f"transformers {transformers.__version__}"
    for row in read_rows():
        if made.get(row["id"], {}).get("settings") == digest_of(row):
            continue
        began = time.perf_counter()
        made[row["id"]] = {"settings": digest_of(row), "predicted": predict(settings_of(row)), "with": with_what}
        print(f"{row['id']}: {made[row['id']]['predicted']:,} in {time.perf_counter() - began:.1f} s", flush=True)
        write_predictions(made)
    for entry in json.loads(EXPLANATIONS.read_text(encoding="utf-8")):
        for row in read_rows():
            name = f"{row['id']} again"
            if "again" in entry and row["id"].startswith(entry["rows"]) and name not in made:
                changed = row | {"workload": row["workload"] | entry["again"]["workload"]}
                made[name] = {
                    "settings": digest_of(changed),
                    "predicted": predict(settings_of(changed)),
                    "with": with_what,
                }
    write_predictions(made)


def write_predictions(made: Row) -> None:
    """One line a prediction."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in made.items()]
    PREDICTIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="predict rows that have no prediction yet")
    if parser.parse_args().predict:
        predict_all()
    else:
        write_page(json.loads(MEASUREMENTS.read_text(encoding="utf-8")), json.loads(PREDICTIONS.read_text()))
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
