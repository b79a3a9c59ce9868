"""Throw mutated safetensors files and configurations at the inspection; only typed errors may come back.

    python scripts/fuzz_checkpoints.py --count 100000 --seed 0

Half of the cases mutate a header, half a config.json; a case is its number and the seed, so that any of them can be
made again with `--only NUMBER`. Each is timed by the clock on the wall; peak resident memory is read at the end.
"""

import argparse
import copy
import faulthandler
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramfit.checkpoints.inspection import inspect_checkpoint
from vramfit.checkpoints.safetensors_file import read_header
from vramfit.errors import VramfitError

MAX_S = 5.0
MAX_RSS_BYTES = 2**30
TASKS = ("sequence-classification", "features", "masked-lm", "token-classification")
TOKENS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 64, 1000, 2**16, 2**31, 2**31 - 1, 2**32, 2**53 + 1, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308),
    *(True, False, None, "", "F32", "BF16", "I8", "bert", "roberta", "\u0000", "../x", "a" * 300, "é", "0", "768"),
    *([], {}, [0], [0, 0], [[]], {"a": 1}, [1] * 100, {"0": "a", "1": "b"}, ["BertModel"], [-1, 2**40], "sdpa", "gelu"),
)


@dataclass
class Report:
    """What happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest_case: int = -1
    messages: set[str] = field(default_factory=set)


def make_seed_files(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """A sound tiny checkpoint to mutate: the bytes of its weights and its configuration."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=10,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    data: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return (folder / "model.safetensors").read_bytes(), data


def token(rng: random.Random) -> Any:
    """Some value, a copy of its own: a later mutation may change it."""
    return copy.deepcopy(rng.choice(TOKENS))


def mutate_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Flip, cut, insert, repeat or delete bytes, mostly in the header."""
    content = bytearray(raw)
    length = 8 + min(int.from_bytes(raw[:8], "little"), len(raw) - 8)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        kind = rng.randrange(7)
        place = rng.randrange(max(min(length, len(content)), 1)) if content else 0
        if kind == 0 and content:
            content[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and content:
            content[place] = rng.randrange(256)
        elif kind == 2:
            del content[rng.randrange(len(content) + 1) :]
        elif kind == 3:
            content[place:place] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            content[place : place + rng.randrange(1, 40)] = b""
        elif kind == 5:
            content[place:place] = rng.choice((b"[", b"{", b'"', b"\\u", b"9" * 30, b"[" * 3000, b"{}," * 3000, b"-"))
        else:
            content[:8] = rng.choice((0, 1, 2, len(raw), length - 8, 2**63, 10**8, 2**64 - 1)).to_bytes(8, "little")
    return bytes(content)


def mutate_header(raw: bytes, rng: random.Random) -> bytes:
    """Well-formed JSON, but another header: fields replaced, renamed, removed, doubled."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for _ in range(rng.choice((1, 1, 2, 5))):
        name = rng.choice(list(header))
        part = header[name]
        kind = rng.randrange(6)
        if kind == 0:
            header[name] = token(rng)
        elif kind == 1:
            header[str(token(rng))] = header.pop(name)
        elif kind == 2:
            header.pop(name)
            header = header or {"x": 1}
        elif isinstance(part, dict) and part:
            key = rng.choice(list(part))
            value = part[key]
            if kind == 3 or not isinstance(value, list) or not value:
                part[key] = token(rng)
            else:
                value[rng.randrange(len(value))] = (
                    value[-1] + 1 if type(value[-1]) is int and rng.random() < 0.3 else token(rng)
                )
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def mutate_config(data: dict[str, Any], rng: random.Random) -> bytes:
    """A configuration with fields replaced, added or removed, or with its bytes damaged."""
    changed: dict[str, Any] = json.loads(json.dumps(data))
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind = rng.randrange(4)
        key = rng.choice(list(changed) or ["model_type"])
        if kind == 0:
            changed.pop(key, None)
        elif kind == 1:
            changed[rng.choice(("num_labels", "id2label", "dtype", "text_config", "auto_map", "is_decoder"))] = token(
                rng
            )
        else:
            changed[key] = token(rng)
    text = bytearray(json.dumps(changed).encode())
    if rng.random() < 0.2:
        place = rng.randrange(len(text))
        text[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(text)


def cases(number: int, seed: int, folder: Path, raw: bytes, config: dict[str, Any]) -> Callable[[], object]:
    """The case of that number, its files written: what to call."""
    rng = random.Random(f"{seed}/{number}")
    weights, settings = folder / "model.safetensors", folder / "config.json"
    if number % 2:
        weights.write_bytes(raw)
        settings.write_bytes(mutate_config(config, rng))
        task = rng.choice(TASKS)
        return lambda: inspect_checkpoint(folder, task=task)
    weights.write_bytes(mutate_header(raw, rng) if rng.random() < 0.5 else mutate_bytes(raw, rng))
    if number % 10:
        return lambda: read_header(weights)
    settings.write_text(json.dumps(config))
    return lambda: inspect_checkpoint(folder, scan=True)


def run(numbers: range, seed: int, *, every: int = 0) -> Report:
    """All cases of these numbers."""
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        raw, config = make_seed_files(folder)
        for number in numbers:
            call = cases(number, seed, folder, raw, config)
            faulthandler.dump_traceback_later(60, exit=True)  # a hang ends the run and shows where
            began = time.perf_counter()
            try:
                call()
                outcome = "accepted"
            except VramfitError as error:
                outcome = type(error).__name__
                report.messages.add(str(error).replace(str(folder), "")[:60])
            except Exception as error:
                outcome = f"UNTYPED {type(error).__name__}"
                report.failures.append(f"case {number}: {type(error).__name__}: {str(error)[:200]}")
            took_s = time.perf_counter() - began
            report.outcomes[outcome] += 1
            if took_s > report.slowest_s:
                report.slowest_s, report.slowest_case = took_s, number
            if took_s > MAX_S:
                report.failures.append(f"case {number}: took {took_s:.1f} s")
            if every and (number + 1) % every == 0:
                print(f"{number + 1:,} cases, {dict(report.outcomes)}, {peak_rss_bytes():,} bytes", file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()
    return report


def peak_rss_bytes() -> int:
    """The most resident memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    import logging

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run the one case of this number, and let its error through")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    numbers = range(options.count) if options.only is None else range(options.only, options.only + 1)
    began = time.perf_counter()
    report = run(numbers, options.seed, every=10_000)
    num_failures = len(report.failures) + (peak_rss_bytes() > MAX_RSS_BYTES)
    print(f"{len(numbers):,} cases with seed {options.seed} in {time.perf_counter() - began:.0f} s")
    print(f"outcomes: {dict(report.outcomes.most_common())}; {len(report.messages)} different messages")
    print(f"slowest: {report.slowest_s:.2f} s (case {report.slowest_case}); limit {MAX_S:.0f} s")
    print(f"peak resident memory: {peak_rss_bytes() / 2**20:.0f} MiB; limit {MAX_RSS_BYTES / 2**20:.0f} MiB")
    for failure in report.failures[:20]:
        print(failure)
    print(f"{num_failures} failures")
    sys.exit(bool(num_failures))


if __name__ == "__main__":
    main()
