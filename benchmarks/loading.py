"""What does loading take? `vramfit.load` beside `from_pretrained`: peak on the device, growth on the host, seconds.

    python benchmarks/loading.py                    BERT-large; on the GPU where there is one, else a ratio on the CPU
    python benchmarks/loading.py --model bert-base-uncased --repeats 1

A checkpoint with random weights is written to a temporary folder. Each load runs in a process of its own, after a
small one of the same kind, so that libraries are loaded; the files are in the page cache. The median of the repeats
counts. On a CPU `from_pretrained` gives the model and nothing moves.
"""

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import forked

LOADERS = ("vramfit", "from_pretrained", "device_map")
KINDS = ("fp32", "bf16", "int8")
SMALL = "bert-tiny"
SAMPLE_S = 0.001
CHILD_TIMEOUT_S = 300


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    forked.import_all()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(f"wrote {compare(Path(folder), options)}")
    return 0


def compare(folder: Path, options: argparse.Namespace) -> Path:
    """Every loader in every precision, the loaders taking turns; results are written after each precision."""
    device, device_name = forked.in_child(_device, timeout_s=CHILD_TIMEOUT_S).values()
    paths = {name: str(folder / name) for name in (SMALL, options.model)}
    for name, path in paths.items():
        forked.in_child(_write_checkpoint, name, path, timeout_s=CHILD_TIMEOUT_S)
    results: dict[str, Any] = {
        "model": options.model,
        "checkpoint_bytes": sum(p.stat().st_size for p in Path(paths[options.model]).glob("*.safetensors")),
        "device": device_name,
        "date": date.today().isoformat(),
        "repeats": options.repeats,
        "versions": {
            name: _version(name) for name in ("torch", "transformers", "accelerate", "torchao", "safetensors")
        },
        "rows": [],
    }
    kinds = options.kinds.split(",")
    path = _path(results, options.results)
    if path.exists():
        results["rows"] = [row for row in json.loads(path.read_text())["rows"] if row["kind"] not in kinds]
    for kind in kinds:
        runs: dict[str, list[dict[str, Any]]] = {loader: [] for loader in LOADERS}
        for _ in range(options.repeats):
            for loader in LOADERS:
                load = (loader, kind, device, paths[SMALL], paths[options.model])
                runs[loader].append(forked.in_child(run_one, *load, timeout_s=CHILD_TIMEOUT_S))
        rows = [_summary(loader, kind, made) for loader, made in runs.items()]
        print(render(rows), flush=True)
        results["rows"] += rows
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return path


def _write_checkpoint(name: str, path: str) -> dict[str, Any]:
    """Random weights, saved as transformers saves them; read once, so that the page cache holds them."""
    import vramfit

    model, _ = vramfit.load(name, random_weights=True, device="cpu")
    model.save_pretrained(path)  # type: ignore[operator]
    for file in Path(path).glob("*.safetensors"):
        file.read_bytes()
    return {}


def _device() -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    return {"device": "cuda" if on_gpu else "cpu", "name": torch.cuda.get_device_name() if on_gpu else "cpu"}


def run_one(loader: str, kind: str, device: str, small: str, large: str) -> dict[str, Any]:
    """One load in this process, a small one before it."""
    import torch

    load = _loader(loader, kind, device)
    load(small)
    gc.collect()
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with _host_growth() as growth:
        started = time.perf_counter()
        model = load(large)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "host_anonymous_bytes": growth["bytes"],
        "peak_device_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
        "final_device_bytes": torch.cuda.memory_allocated() - before if on_gpu else None,
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }


def _loader(loader: str, kind: str, device: str) -> Callable[[str], Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    quantize = "int8" if kind == "int8" else None
    if loader == "vramfit":
        import vramfit

        precision = "bf16" if kind == "bf16" else "fp32"
        return lambda path: vramfit.load(path, precision=precision, quantize=quantize, device=device)[0]
    keywords: dict[str, Any] = {"dtype": dtype}
    if loader == "device_map":
        keywords["device_map"] = device
        if quantize:
            keywords["quantization_config"] = _torchao_config()
        return lambda path: AutoModelForSequenceClassification.from_pretrained(path, **keywords)

    def load(path: str) -> Any:
        model = AutoModelForSequenceClassification.from_pretrained(path, **keywords).to(device)
        if quantize:
            from vramfit.techniques import quantization

            quantization.apply(model, quantize)
        return model

    return load


def _torchao_config() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, PerGroup
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(granularity=PerGroup(64)))


@contextmanager
def _host_growth() -> Iterator[dict[str, int | None]]:
    """The most that the process's own memory grows meanwhile, watched from a thread."""
    from vramfit.loader.model import anonymous_bytes

    before = anonymous_bytes()
    growth: dict[str, int | None] = {"bytes": None if before is None else 0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            now = anonymous_bytes()
            if now is not None and before is not None:
                growth["bytes"] = max(growth["bytes"] or 0, now - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()


def _summary(loader: str, kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [run["error"] for run in runs if "error" in run]
    if errors:
        return {"loader": loader, "kind": kind, "error": errors[0]}
    middle = {
        name: median(run[name] for run in runs) if runs[0][name] is not None else None
        for name in ("seconds", "peak_device_bytes", "final_device_bytes", "host_anonymous_bytes")
    }
    return {"loader": loader, "kind": kind, **middle, "all_seconds": [run["seconds"] for run in runs]}


def render(rows: list[dict[str, Any]]) -> str:
    """One line a loader."""
    lines = []
    for row in rows:
        if "error" in row:
            lines.append(f"{row['kind']:5} {row['loader']:16} failed: {row['error']}")
            continue
        sizes = {name: _mib(row[f"{name}_bytes"]) for name in ("peak_device", "final_device", "host_anonymous")}
        lines.append(
            f"{row['kind']:5} {row['loader']:16} {row['seconds']:7.3f} s   device peak {sizes['peak_device']}"
            f"   final {sizes['final_device']}   host growth {sizes['host_anonymous']}"
        )
    return "\n".join(lines)


def _mib(num_bytes: float | None) -> str:
    return "       –" if num_bytes is None else f"{num_bytes / 2**20:8.1f} MiB"


def _path(results: dict[str, Any], folder: Path) -> Path:
    """Results are named by GPU and date; precisions that were not asked for again stay in the file."""
    name = results["device"].lower().replace("nvidia ", "").replace(" ", "-")
    return folder / f"loading_{name}_{results['date']}.json"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-large-uncased", help="a name of the catalogue")
    parser.add_argument("--kinds", default=",".join(KINDS), help="precisions, comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where the temporary checkpoint goes")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
