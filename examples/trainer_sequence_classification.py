"""Messages told apart with the Hugging Face Trainer: a script as it is usually written, and one line more.

python examples/trainer_sequence_classification.py --model ./my-checkpoint --memory 2GiB
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from vramfit.integrations.trainer import fit_trainer

HERE = Path(__file__).parent
LABELS = ["complaint", "praise"]


def read(path: Path, tokenizer) -> list[dict]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=128)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": LABELS.index(row["label"])}
        for ids, mask, row in zip(encoded["input_ids"], encoded["attention_mask"], rows, strict=True)
    ]


def compute_metrics(prediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="bert-base-uncased")
    parser.add_argument("--memory")
    parser.add_argument("--output", default="trained")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    given = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=len(LABELS))
    args = TrainingArguments(
        output_dir=given.output,
        per_device_train_batch_size=given.batch,
        learning_rate=given.learning_rate,
        num_train_epochs=given.epochs,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=5,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=read(HERE / "messages.csv", tokenizer),
        eval_dataset=read(HERE / "messages_dev.csv", tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    fit_trainer(trainer, memory=given.memory)
    trainer.train()
    return trainer.evaluate()


if __name__ == "__main__":
    print(main())
