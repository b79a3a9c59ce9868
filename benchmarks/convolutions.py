"""What convolutions ask for on a GPU: the most that a forward and a backward pass request at once, by shape and type.

python benchmarks/convolutions.py --out tests/truth/convolutions_h200.json
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

SHAPES = (
    *((16, 768, 768, 96, 1, 4), (16, 768, 3072, 96, 1, 4), (16, 3072, 768, 96, 1, 4), (16, 768, 768, 256, 1, 1)),
    *((5, 768, 768, 100, 1, 4), (3, 768, 768, 33, 1, 4), (13, 768, 768, 128, 9, 768), (13, 768, 384, 128, 1, 1)),
    *((4, 512, 512, 100, 3, 1), (8, 64, 128, 77, 5, 1), (16, 768, 768, 256, 1, 4), (2, 768, 768, 512, 9, 768)),
    (32, 256, 256, 64, 3, 1),
)
"""Batch, channels in, channels out, length, kernel, groups: those of SqueezeBERT and ConvBERT, and others."""


def main(arguments: list[str] | None = None) -> int:
    """Measure every shape in every type, with inputs as they are and permuted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=500_000)
    rows = []
    for tf32, dtype in ((False, "float32"), (False, "bfloat16"), (False, "float16"), (True, "float32")):
        torch.backends.cudnn.allow_tf32 = tf32
        for shape in SHAPES:
            for is_permuted in (False, True):
                found = {"shape": shape, "dtype": dtype, "tf32": tf32, "is_permuted": is_permuted}
                rows.append(found | measure(shape, getattr(torch, dtype), is_permuted))
    head: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "shape": "batch, channels in, channels out, length, kernel, groups",
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    options.out.write_text(json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n')
    return 0


def measure(shape: tuple[int, ...], dtype: Any, is_permuted: bool) -> dict[str, int]:
    """The most that each pass requests at once, outputs included; the second of two, since the first loads kernels."""
    import torch

    batch, channels, outputs, length, kernel, groups = shape
    conv = torch.nn.Conv1d(channels, outputs, kernel, padding=kernel // 2, groups=groups).cuda().to(dtype)
    sizes = (batch, length, channels) if is_permuted else (batch, channels, length)
    given = torch.randn(*sizes, device="cuda", dtype=dtype, requires_grad=True)
    found = {}
    for _ in range(2):
        x = given.permute(0, 2, 1) if is_permuted else given
        start = _num_events()
        y = conv(x)
        found["forward_bytes"] = _most(start)
        gradient = torch.ones_like(y)
        start = _num_events()
        y.backward(gradient)
        found["backward_bytes"] = _most(start)
        conv.zero_grad()
        given.grad = None
    return found


def _num_events() -> int:
    import torch

    torch.cuda.synchronize()
    return len(torch.cuda.memory._snapshot()["device_traces"][0])


def _most(start: int) -> int:
    import torch

    torch.cuda.synchronize()
    held: dict[int, int] = {}
    now = most = 0
    for event in torch.cuda.memory._snapshot()["device_traces"][0][start:]:
        if event["action"] == "alloc":
            held[event["addr"]] = event["size"]
            now += event["size"]
            most = max(most, now)
        elif event["action"] == "free_completed":
            now -= held.pop(event["addr"], 0)
    return most


if __name__ == "__main__":
    sys.exit(main())
