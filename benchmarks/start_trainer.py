"""The Trainer's side of `start.py`: a fine-tuning script as people write it, a program of its own.

    python benchmarks/start_trainer.py JOB.json

Reads a table, tokenizes it, and trains with the Trainer: bf16 on a GPU, batches padded to their longest sample, samples
of like length together. Writes `step 1/N` to stderr when the first step is done on the device, and at the end a line of
JSON to stdout: the most that was reserved, and on what. Exits with code 3 where memory runs out.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import torch
from forked import head
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

OUT_OF_MEMORY = 3


class SaysFirstStep(TrainerCallback):
    """Writes a line when the first step is done on the device."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            print(f"step 1/{state.max_steps}", file=sys.stderr, flush=True)


def main(job: dict[str, Any]) -> int:
    """Train as the job says."""
    on_gpu = job["device"] == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["memory_bytes"] / total))
    with Path(job["data"]).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t" if job["data"].endswith(".tsv") else ","))
    names = sorted({row[job["label"]] for row in rows})
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    texts = [[row[column] for row in rows] for column in job["texts"]]
    encoded = tokenizer(*texts, truncation=True, max_length=job["seq"])
    samples = [
        {name: encoded[name][i] for name in encoded} | {"labels": names.index(row[job["label"]])}
        for i, row in enumerate(rows)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(
        job["model"],
        num_labels=len(names),
        ignore_mismatched_sizes=True,  # the folder's head has two labels
    )
    arguments = TrainingArguments(
        output_dir=job["output"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["batch"] // job["micro_batch"],
        num_train_epochs=job["epochs"],
        max_steps=job["max_steps"] or -1,
        learning_rate=5e-5,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        train_sampling_strategy="group_by_length",
        save_strategy="epoch",
        save_total_limit=job["keep"],
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=samples,  # type: ignore[arg-type]
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[SaysFirstStep()],
    )
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr)
        return OUT_OF_MEMORY
    trainer.save_model()
    tokenizer.save_pretrained(job["output"])
    print(json.dumps({"reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None, "head": head()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
