"""Words marked with the Hugging Face Trainer: a script as it is usually written, and one line more.

python examples/trainer_token_classification.py --model ./my-checkpoint --memory 2GiB
"""

import argparse
from pathlib import Path

import numpy as np
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)

from vramfit.integrations.trainer import fit_trainer

HERE = Path(__file__).parent
TAGS = ["O", "B-THING", "I-THING"]
NUM_DEV = 40


def read(path: Path) -> list[list[list[str]]]:
    blocks = path.read_text(encoding="utf-8").strip().split("\n\n")
    return [[line.split() for line in block.splitlines()] for block in blocks]


def encode(sentence: list[list[str]], tokenizer) -> dict:
    encoded = tokenizer([word for word, _ in sentence], is_split_into_words=True, truncation=True, max_length=128)
    labels, previous = [], None
    for word in encoded.word_ids():
        first = word is not None and word != previous
        labels.append(TAGS.index(sentence[word][1]) if first else -100)
        previous = word
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}


def compute_metrics(prediction) -> dict[str, float]:
    counted = prediction.label_ids != -100
    right = np.argmax(prediction.predictions, axis=2) == prediction.label_ids
    return {"accuracy": float(right[counted].mean())}


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
    model = AutoModelForTokenClassification.from_pretrained(given.model, num_labels=len(TAGS))
    samples = [encode(sentence, tokenizer) for sentence in read(HERE / "things.conll")]
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
        train_dataset=samples[NUM_DEV:],
        eval_dataset=samples[:NUM_DEV],
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
    )
    fit_trainer(trainer, memory=given.memory)
    trainer.train()
    return trainer.evaluate()


if __name__ == "__main__":
    print(main())
