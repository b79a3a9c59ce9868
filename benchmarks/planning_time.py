"""How much CPU time does an answer take after imports? Plans with lengths, the first time and the second; estimates.

    python benchmarks/planning_time.py

Every answer is given in a fresh process, after torch, transformers, the planner and the model's class are imported; the
second process finds what the first one remembered. Absolute times belong to this machine. What imports take is given
beside what `import torch, transformers` and the model's class take without vramfit.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "bert-base-uncased": {"batch": 64, "seq": 512, "gpu": "t4"},
    "bert-large-uncased": {"batch": 32, "seq": 512, "gpu": "t4"},
    "xlm-roberta-large": {"batch": 32, "seq": 512, "gpu": "t4"},
    "modernbert-base": {"batch": 8, "seq": 8192, "gpu": "a10g"},
}
CLASSES = {
    "bert-base-uncased": "BertForSequenceClassification",
    "bert-large-uncased": "BertForSequenceClassification",
    "xlm-roberta-large": "XLMRobertaForSequenceClassification",
    "modernbert-base": "ModernBertForSequenceClassification",
}
FIRST_S, SECOND_S, ESTIMATE_S = 3.0, 0.5, 0.3
"""What is wanted on two cores."""


def lengths(longest: int) -> list[int]:
    """Of 1,000 samples: a median of about 190 tokens, and one as long as the model takes."""
    draw = Random(0)
    return [longest, *(min(longest, int(draw.lognormvariate(5.2, 0.6)) + 5) for _ in range(999))]


def main(arguments: list[str] | None = None) -> int:
    """Time every case; 0 when all stay within what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(time_case(options.child, CASES[options.child])))
        return 0
    rows = []
    for model in (name for name in CASES if options.only in name):
        with tempfile.TemporaryDirectory() as kept:
            first, second = (_run(model, kept) for _ in range(2))
        assert first["answer"] == second["answer"], model
        rows.append({"model": model, **CASES[model], **first, "second_plan_s": second["plan_s"]})
        print(
            f"{model:<20} plan {first['plan_s']:.2f} s, again {second['plan_s']:.2f} s, "
            f"estimate {first['estimate_s']:.2f} s, imports {first['imports_s'] / first['theirs_s']:.2f} times",
            flush=True,
        )
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "cases": rows,
    }
    path = options.results / f"planning_time_cpu_{datetime.now(UTC).date().isoformat()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    too_slow = [r for r in rows if r["plan_s"] > FIRST_S or r["second_plan_s"] > SECOND_S]
    too_slow += [r for r in rows if r["model"] == "bert-large-uncased" and r["estimate_s"] > ESTIMATE_S]
    return 1 if too_slow else 0


def time_case(model: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of imports, of a plan and of an estimate, in this process."""
    start = time.process_time()
    import torch  # noqa: F401
    import transformers

    alone = time.process_time()
    getattr(transformers, CLASSES[model])
    theirs = time.process_time()
    import vramfit
    import vramfit.planner.plan
    from vramfit.models.resolve import resolve

    resolve(model, task="sequence-classification")
    imported = time.process_time()
    made = vramfit.plan(model, lengths=lengths(keywords["seq"]), **keywords)
    planned = time.process_time()
    vramfit.estimate(model, batch=8, seq=128, gpu=keywords["gpu"])
    return {
        "alone_s": alone - start,
        "theirs_s": theirs - start,
        "imports_s": imported - start,
        "plan_s": planned - imported,
        "estimate_s": time.process_time() - planned,
        "answer": [made.step_time_s, made.estimate.safe_reserved_bytes],
    }


def _run(model: str, kept: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", model],
        env={**os.environ, "VRAMFIT_CACHE": kept},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
