"""The jobs of `soak.py`: drawn from a seed, with models and data made for them."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
MODELS = (
    "bert-base-uncased",
    "bert-large-uncased",
    "roberta-base",
    "roberta-large",
    "distilbert-base-uncased",
    "electra-base-discriminator",
    "albert-base-v2",
    "deberta-v3-base",
    "modernbert-base",
    "xlm-roberta-base",
)
QUICK_MODELS = ("bert-tiny", "bert-mini")
TASKS = ("sequence-classification", "token-classification", "question-answering", "masked-lm")
BATCHES = (8, 16, 24, 32, 64)
LONGEST = (64, 128, 256, 384, 512)
MEMORIES_GIB = (1.5, 3.0, 5.0, 8.0, 11.17, 16.0, 24.0, 48.0)
QUICK_MEMORIES_GIB = (0.1, 0.25)
LENGTHS = ("log-normal", "uniform", "short", "full", "one long")
TECHNIQUES: tuple[Job, ...] = (
    *[{}] * 8,  # the plan chooses everything
    {"exact": True},
    {"precision": "fp32"},
    {"precision": "amp-fp16"},
    {"precision": "amp-bf16"},
    {"precision": "tf32"},
    {"attention": "eager"},
    {"attention": "sdpa"},
    {"attention": "packed"},
    {"checkpointing": "full"},
    {"optimizer": "adamw"},
    {"optimizer": "adamw-8bit"},
    {"optimizer": "adafactor"},
    {"lora": 8},
    {"freeze": ("backbone",)},
)
"""What a job fixes; the plan chooses the rest."""
NUM_STEPS = 12
NUM_WORDS = 1_000
NUM_SPARE = 4
"""Places that special tokens take."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def draw_jobs(seed: int, count: int, *, quick: bool = False) -> list[Job]:
    """So many jobs; the same for the same seed, and the first ones the same whatever the count."""
    draw, jobs = random.Random(seed), []
    for index in range(count):
        longest = draw.choice(LONGEST[:2] if quick else LONGEST)
        jobs.append(
            {
                "name": f"{seed}-{index:03}",
                "model": draw.choice(QUICK_MODELS if quick else MODELS),
                "task": draw.choice(TASKS),
                "batch": draw.choice(BATCHES[:2] if quick else BATCHES),
                "seq": longest,
                "memory_gib": draw.choice(QUICK_MEMORIES_GIB if quick else MEMORIES_GIB),
                "lengths": draw.choice(LENGTHS),
                "fixed": draw.choice(TECHNIQUES),
                "seed": draw.randrange(2**31),
            }
        )
    return jobs


def draw_lengths(kind: str, longest: int, count: int, seed: int) -> list[int]:
    """Words of each text; with the special tokens, none has more than `longest` tokens."""
    draw, most = random.Random(seed), longest - NUM_SPARE
    kinds: dict[str, Callable[[int], int]] = {
        "log-normal": lambda i: round(draw.lognormvariate(0.0, 0.7) * most / 3),
        "uniform": lambda i: draw.randint(4, most),
        "short": lambda i: draw.randint(4, max(most // 4, 5)),
        "full": lambda i: most,
        "one long": lambda i: most if i == count // 2 else draw.randint(4, max(most // 8, 5)),
    }
    return [max(4, min(most, kinds[kind](index))) for index in range(count)]


def write_data(path: Path, job: Job, num_rows: int) -> None:
    """A file that `vramfit train` reads for the task of the job."""
    draw = random.Random(job["seed"])
    lengths = draw_lengths(job["lengths"], job["seq"], num_rows, job["seed"])
    texts = [[f"w{draw.randrange(NUM_WORDS)}" for _ in range(length)] for length in lengths]
    with path.open("w", encoding="utf-8", newline="") as file:
        if job["task"] == "sequence-classification":
            csv.writer(file).writerows([("text", "label"), *((" ".join(t), i % 2) for i, t in enumerate(texts))])
        elif job["task"] == "token-classification":
            tags = ("O", "B-a", "I-a")
            file.writelines(json.dumps({"tokens": t, "tags": [draw.choice(tags) for _ in t]}) + "\n" for t in texts)
        elif job["task"] == "question-answering":
            file.writelines(json.dumps(_question(i, t)) + "\n" for i, t in enumerate(texts))
        else:
            file.writelines(" ".join(t) + "\n" for t in texts)


def _question(number: int, words: list[str]) -> Job:
    question, context = words[:1], words[1:]
    answers = {"text": [context[0]], "answer_start": [0]}
    return {"id": str(number), "question": " ".join(question), "context": " ".join(context), "answers": answers}


def file_name(task: str) -> str:
    """The kind of file that a task is read from."""
    ends = {"sequence-classification": "csv", "masked-lm": "txt"}
    return f"data.{ends.get(task, 'jsonl')}"


def write_model(folder: Path, name: str) -> None:
    """A model of the catalogue with random weights, and a tokenizer of made-up words; kept for later jobs."""
    if (folder / "tokenizer.json").exists():
        return
    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.workload import Workload

    resolved = resolve(name, task="features")
    model: Any = prepare(resolved, Workload(model=name, task="features", mode="infer", batch=1, seq=8))
    model.save_pretrained(folder)
    write_tokenizer(folder, resolved.config)


def write_tokenizer(folder: Path, config: Any) -> None:
    """A tokenizer of made-up words, whose special tokens a model knows."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    pad = config.pad_token_id or 0
    free = iter(number for number in range(config.vocab_size) if number != pad)
    ids = {"[PAD]": pad} | {token: next(free) for token in SPECIAL[1:]}
    ids |= {f"w{number}": next(free) for number in range(NUM_WORDS)}
    made = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    inputs = ["input_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=inputs, **names)
    tokenizer.model_max_length = min(getattr(config, "max_position_embeddings", 512), 512)
    tokenizer.save_pretrained(folder)
