"""How fast is training without padding? Packed steps beside padded ones and beside the peers, under one memory cap.

    python benchmarks/packed_speed.py --data texts.csv --tokenizer DIR        # on a GPU
    python benchmarks/packed_speed.py --data texts.csv --tokenizer DIR --lengths full       # no text is short
    python benchmarks/packed_speed.py --data texts.csv --tokenizer DIR --cap 0              # all of the GPU
    python benchmarks/packed_speed.py --data texts.csv --tokenizer DIR --plans DIR --plans-only     # anywhere
    python benchmarks/packed_speed.py --data texts.csv --tokenizer DIR --cap 25769803776 --models modernbert-base \
        modernbert-large --sides planned-plain planned-fused --seq 512          # and --seq 8192, and --lengths full

The reviews of a file, tokenized and cut at 512 tokens, an effective batch of 64, bf16 autocast and fused AdamW for
every side; the cap holds for the allocator. `trainer`, `accelerate` and `lightning` look for their batch themselves
(`auto_find_batch_size`, `find_executable_batch_size`, `scale_batch_size`), with padding to the longest sample of a
batch; their search is reported apart. `padded` and `packed` are `Stepper`; `compiled` is `packed` with every layer
compiled for any number of tokens; its time to compile is counted into `tokens_per_s_with_start`. `planned` is what
`vramfit plan` makes of these lengths and this cap, layers fused where that was measured, `planned-fused` the same
with layers that are asked to be fused, `planned-plain` with layers as they are, `planned-compiled` the first with
layers that `torch.compile` makes, `recorded` and `recorded-compiled` these with passes that are recorded as CUDA
graphs, `planned-compiled-again` a compiled one in a later process, which finds on the disk what was compiled,
`planned-float8` one with torchao's float8 products, which no plan has; `--plans` keeps the plans, which `--plans-only`
makes without a GPU; `--profile` says what the GPU's time in their steps goes to. Tokens are real ones, padding is
none, and steps are sent without waiting for the one before; `utilisation` is the share of the GPU's peak in bf16 that
the operations of these tokens take, without those of recomputation. Every side runs in a process of its own; one line
of JSON a side is added to the results, and sides that are there are not run again.
"""

import argparse
import csv
import gc
import json
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import forked

GIB = 2**30
MODELS = ("bert-base-uncased", "bert-large-uncased")
PLANNED = {
    "planned": {"compile": False, "graphs": False},
    "planned-plain": {"compile": False, "graphs": False, "fused": False},
    "planned-fused": {"compile": False, "graphs": False, "fused": True},
    "planned-compiled": {"compile": True, "graphs": False},
    "recorded": {"compile": False, "graphs": True},
    "recorded-compiled": {"compile": True, "graphs": True},
}
"""Side → what its plan is asked for."""
ALIKE = {"planned-compiled-again": "planned-compiled", "planned-float8": "planned-compiled"}
"""Side → whose plan it has."""
SIDES = ("trainer", "accelerate", "lightning", "padded", "packed", "compiled", *PLANNED, *ALIKE)
CAP = int(11.17 * GIB)
SEQ, BATCH = 512, 64
NUM_STEPS, NUM_WARM, ENOUGH_S = 240, 12, 12.0
"""Steps at most, those that warm up, and seconds after which the others end."""
MARGIN = 0.06
"""Of the cap, left free when a micro-batch is chosen by prediction."""
NUM_PROFILED = 3
NUM_NAMED = 12
"""The kernels that take longest are named."""
KERNELS = {
    "attention": ("flash", "fmha"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    "optimizer": ("adam", "multi_tensor"),
    "compiled": ("triton",),
    "copies": ("memcpy", "memset", "copy"),
}
"""What a kernel is for → what its name has; the first that it has counts."""
H200_OPERATIONS_PER_S = 989.5e12
"""In bf16, without sparsity, as its data sheet says."""
SETTINGS = ("precision", "optimizer", "attention", "checkpointing", "compile", "fused", "graphs")
KEYS = ("model", "side", "cap", "lengths", "seq")


def main(arguments: list[str] | None = None) -> int:
    """Run what is not there yet; 1 where a side failed."""
    options = _parse(arguments)
    forked.import_all()
    lines = forked.read_lines(options.out, *KEYS[:-1])
    done = {tuple(line.get(k, SEQ) for k in KEYS) for line in lines if "error" not in line}
    samples = forked.in_child(tokenize, options.data, options.tokenizer, options.lengths, options.seq, timeout_s=120)
    if "error" in samples:
        print(samples["error"])
        return 1
    cases = [
        (model, side, options.cap, options.lengths, options.seq) for model in options.models for side in options.sides
    ]
    if options.plans_only:
        for case in cases:
            if case[1] in PLANNED or case[1] in ALIKE:
                make_plan(*case[:2], samples["ids"], options)
        return 0
    for case in cases:
        if case not in done:
            made = forked.in_child(run_side, *case[:2], samples["ids"], options, timeout_s=options.timeout_s)
            line = {**dict(zip(KEYS, case, strict=True)), **made}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return int(any("error" in line for line in forked.read_lines(options.out, *KEYS[:-1])))


def tokenize(data: str, tokenizer: str, lengths: str, seq: int) -> dict[str, Any]:
    """Ids of the texts of a CSV file, which has them in a column `text`; or of as many whole lengths of them all.

    Reviews are shorter than 8,192 tokens: beyond `SEQ`, as many of them as make up a length in turn are put together.
    """
    from transformers import AutoTokenizer

    with open(data, encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    made = AutoTokenizer.from_pretrained(tokenizer)
    made.backend_tokenizer.no_padding()
    if lengths == "real" and seq == SEQ:
        return {"ids": made(texts, truncation=True, max_length=SEQ)["input_ids"]}
    each = made(texts)["input_ids"]
    row = [token for ids in each for token in ids]
    if lengths == "full":
        return {"ids": [row[begin : begin + seq] for begin in range(0, len(row) - seq + 1, seq)]}
    ends = [0]
    for ids in each:  # as varied as the reviews are, and as much longer as the limit is
        ends.append(ends[-1] + min(len(ids) * seq // SEQ, seq))
    return {"ids": [row[begin:end] for begin, end in pairwise(ends) if end <= len(row)]}


def make_plan(name: str, side: str, ids: list[Any], options: argparse.Namespace) -> Any:
    """The plan of a side: as it was kept, or made now and kept."""
    import vramfit

    path, side = None, ALIKE.get(side, side)
    if options.plans is not None:
        longest = "" if options.seq == SEQ else f"_{options.seq}"
        path = options.plans / f"{name}_{side}_{options.lengths}_{options.cap}{longest}.json"
        if path.exists():
            return vramfit.Plan.load(path)
    made = vramfit.plan(
        name,
        batch=BATCH,
        lengths=list(map(len, ids)),
        gpu="h200",
        memory=options.cap or None,
        precision="amp-bf16",
        optimizer="adamw-fused",
        **PLANNED[side],
        torch_version=options.torch_version,
    )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
    return made


def run_side(name: str, side: str, rows: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """One side in this process: real tokens a second, peak, and what it took to begin."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    cap = options.cap or total
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    ids = [torch.tensor(row) for row in rows]
    began = time.perf_counter()
    if side in PLANNED or side in ALIKE:
        made = _planned(side, make_plan(name, side, ids, options), name, ids, profiles=options.profile)
    else:
        peers = {"trainer": _trainer, "accelerate": _accelerate, "lightning": _lightning}
        made = peers.get(side, _stepper)(side, name, ids, cap)
    stats = torch.cuda.memory_stats()
    clock = made.pop("clock")
    return {
        **made,
        "tokens_per_s": (rate := clock.rate(1)),
        "utilisation": rate * operations_a_token(name, list(map(len, ids))) / H200_OPERATIONS_PER_S,
        "tokens_per_s_with_start": clock.rate(0, made.get("rehearsal_s", 0.0)),
        "num_steps": clock.num_steps,
        "tokens": sum(clock.tokens),
        "total_s": time.perf_counter() - began,
        "max_reserved_bytes": torch.cuda.max_memory_reserved(),
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
        **forked.head(),
    }


class Clock:
    """Seconds and tokens of the first steps and of the others; between them the device is not waited for."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Of each micro-batch as it is made."""
        self.marks: list[tuple[float, int]] = [(time.perf_counter(), 0)]
        """When the first step began, when it was warm, and the end; and the tokens until then."""
        self.num_steps = 0

    def tick(self) -> None:
        """A step has been sent."""
        import torch

        self.num_steps += 1
        enough = len(self.marks) == 2 and time.perf_counter() - self.marks[1][0] > ENOUGH_S
        if self.num_steps in (NUM_WARM, NUM_STEPS) or enough:
            torch.cuda.synchronize()
            self.marks.append((time.perf_counter(), sum(self.tokens)))

    @property
    def is_done(self) -> bool:
        """Whether there were steps enough."""
        return len(self.marks) > 2

    def rate(self, begin: int, more_s: float = 0.0) -> float:
        """Tokens a second from a mark to the end."""
        (began, before), (ended, after) = self.marks[begin], self.marks[-1]
        return (after - before) / (ended - began + more_s)


def operations_a_token(name: str, lengths: list[int]) -> float:
    """Of a training step: every weight of the layers is used three times, and every token sees its sequence."""
    from vramfit.models.resolve import resolve

    config = resolve(name).config
    width, layers = config.hidden_size, config.num_hidden_layers
    weights = layers * (4 * width * width + 2 * width * config.intermediate_size)
    seen = sum(n * n for n in lengths) / sum(lengths)
    return 6 * weights + 12 * layers * width * seen


def _stepper(side: str, name: str, ids: list[Any], cap: int) -> dict[str, Any]:
    import torch

    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.runtime.stepper import Stepper
    from vramfit.techniques import compiling
    from vramfit.techniques.application import use_expandable_segments
    from vramfit.workload import Workload

    attention = "sdpa" if side == "padded" else "packed"
    predicted = _choose(name, attention, cap)
    micro_batch = predicted["micro_batch"]
    use_expandable_segments(torch.device("cuda"))
    workload = Workload(model=name, batch=BATCH, seq=SEQ, precision="amp-bf16", attention=attention, loop="stepper")
    model = prepare(resolve(name), workload).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    began = time.perf_counter()
    stepper = Stepper(model, optimizer, micro_batch=micro_batch, seq=SEQ, precision="amp-bf16", memory=cap)
    if side == "compiled":
        compiling.apply(model)
    return _run(stepper, ids, began) | predicted


def _planned(side: str, plan: Any, name: str, ids: list[Any], *, profiles: bool) -> dict[str, Any]:
    """The steps of a plan."""
    import torch

    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.runtime.stepper import Stepper
    from vramfit.techniques.application import use_expandable_segments

    use_expandable_segments(torch.device("cuda"))
    model = prepare(resolve(name), plan.workload).cuda()
    if side == "planned-float8":
        _to_float8(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    w, estimate = plan.workload, plan.estimate
    began = time.perf_counter()
    return _run(Stepper(model, optimizer, plan=plan), ids, began, profiles=profiles) | {
        "micro_batch": plan.micro_batch,
        "settings": {k: getattr(w, k) for k in SETTINGS},
        "predicted_allocated_bytes": estimate.peak_allocated_bytes,
        "predicted_reserved_bytes": estimate.peak_reserved_bytes,
        "predicted_tokens_per_s": BATCH * sum(map(len, ids)) / len(ids) / plan.step_time_s,
    }


def _to_float8(model: Any) -> None:
    """Products of the encoder in float8, each tensor with one scale; rows of any number of tokens are filled up."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from vramfit.models.anatomy import backbone

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), pad_inner_dim=True)
    convert_to_float8_training(backbone(model).encoder, config=config)


def _run(stepper: Any, ids: list[Any], began: float, *, profiles: bool = False) -> dict[str, Any]:
    """Rehearse, which compiles, and step; what compiling takes counts from when the stepper was to be made."""
    import torch

    batches = _batches(ids)
    stepper.rehearse(next(batches))
    torch.cuda.synchronize()
    clock = Clock()
    rehearsal_s = time.perf_counter() - began
    for _ in range(NUM_STEPS):
        batch = next(batches)
        clock.tokens.append(_num_tokens(batch))
        stepper.advance(batch)
        clock.tick()
        if clock.is_done:
            break
    profiled = {"profile_s": _profile(stepper, batches)} if profiles else {}
    return {"clock": clock, "num_recoveries": stepper.num_recoveries, "rehearsal_s": rehearsal_s} | profiled


def _profile(stepper: Any, batches: Any) -> dict[str, Any]:
    """Seconds of a step by what the GPU does in them; `idle` is when it does nothing."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, schedule

    kernels: list[Any] = []

    def take(made: Any) -> None:
        kernels.extend(event for event in made.events() if event.device_type == DeviceType.CUDA)

    torch.cuda.synchronize()
    phases = schedule(wait=0, warmup=NUM_WARM, active=NUM_PROFILED)  # under its eyes, layers are compiled anew
    with profile(activities=[ProfilerActivity.CUDA], schedule=phases, on_trace_ready=take) as made:
        for number in range(NUM_WARM + NUM_PROFILED):
            stepper.advance(next(batches))
            if number in (NUM_WARM - 1, NUM_WARM + NUM_PROFILED - 1):
                torch.cuda.synchronize()
            made.step()
    begin, end = min(k.time_range.start for k in kernels), max(k.time_range.end for k in kernels)
    kinds, names = Counter(dict.fromkeys((*KERNELS, "other"), 0.0)), Counter[str]()
    for kernel in kernels:
        seconds = kernel.time_range.elapsed_us() / 1e6 / NUM_PROFILED
        found = (kind for kind, parts in KERNELS.items() if any(part in kernel.name.lower() for part in parts))
        kinds[next(found, "other")] += seconds
        names[kernel.name[:120]] += seconds
    step_s = (end - begin) / 1e6 / NUM_PROFILED
    return {**kinds, "idle": step_s - kinds.total(), "step": step_s, "longest": dict(names.most_common(NUM_NAMED))}


def _choose(name: str, attention: str, cap: int) -> dict[str, Any]:
    """The largest micro-batch of full length whose prediction leaves the margin."""
    import vramfit

    keywords = {"precision": "amp-bf16", "optimizer": "adamw-fused", "loop": "stepper", "allocator": "expandable"}
    for micro_batch in range(BATCH, 0, -1):
        made = vramfit.estimate(
            name, batch=BATCH, micro_batch=micro_batch, seq=SEQ, attention=attention, memory=cap, gpu="h200", **keywords
        )
        if made.fits and made.safe_reserved_bytes <= (1 - MARGIN) * cap:
            break
    return {
        "micro_batch": micro_batch,
        "predicted_allocated_bytes": made.peak_allocated_bytes,
        "predicted_reserved_bytes": made.peak_reserved_bytes,
    }


def _batches(ids: list[Any]) -> Any:
    """Effective batches without end, padded to their longest sample, in a fixed order."""
    import torch

    draw = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(ids), generator=draw).tolist()
        for begin in range(0, len(order) - BATCH + 1, BATCH):
            yield _collate([{"input_ids": ids[i], "labels": i % 2} for i in order[begin : begin + BATCH]])


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    ids = [row["input_ids"] for row in rows]
    made = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, ids)), batch_first=True)
    return {"input_ids": made, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


def _num_tokens(batch: dict[str, Any]) -> int:
    """By numpy: torch would wake all its threads for so little."""
    return int(batch["attention_mask"].numpy().sum())


def _trainer(side: str, name: str, ids: list[Any], cap: int) -> dict[str, Any]:
    """The Hugging Face Trainer: first its search for a batch, then a run with what it found."""
    import tempfile

    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.workload import Workload

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.clock = Clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.clock.tick()
            control.should_training_stop = control.should_training_stop or self.clock.is_done

    ticks = Ticks()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = _collate(rows)
        ticks.clock.tokens.append(_num_tokens(batch))
        return batch

    def train(batch: int, accumulate: int, steps: int) -> int:
        model = prepare(resolve(name), Workload(model=name, batch=BATCH, seq=SEQ))
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, auto_find_batch_size=True, bf16=True,
            gradient_accumulation_steps=accumulate, max_steps=steps, logging_strategy="no", save_strategy="no",
            report_to=[], optim="adamw_torch_fused", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(ids)]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[ticks])
        trainer.train()
        return int(trainer._train_batch_size)

    started = time.perf_counter()
    found = train(BATCH, 1, 4)
    search_s, tried = time.perf_counter() - started, 0
    while found != tried:  # what fits for a few steps may not for more: then it has found a smaller one, and runs anew
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        tried, accumulate = found, max(1, round(BATCH / found))
        found = train(tried, accumulate, NUM_STEPS)
    return {"clock": ticks.clock, "micro_batch": found, "accumulate": accumulate, "search_s": search_s}


def _lightning(side: str, name: str, ids: list[Any], cap: int) -> dict[str, Any]:
    import lightning_loop

    return lightning_loop.train(side, name, ids, cap)


def _accelerate(side: str, name: str, ids: list[Any], cap: int) -> dict[str, Any]:
    """A loop of Accelerate's: its decorator halves the batch until it fits; accumulation keeps the effective one."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.workload import Workload

    accelerator = Accelerator(mixed_precision="bf16")
    started = time.perf_counter()
    begun: list[float] = []

    @find_executable_batch_size(starting_batch_size=BATCH)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> dict[str, Any]:
        accelerator.free_memory()
        model = prepare(resolve(name), Workload(model=name, batch=BATCH, seq=SEQ))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        model, optimizer = accelerator.prepare(model.to(accelerator.device), optimizer)
        batches = _batches(ids)
        torch.cuda.synchronize()
        clock = Clock()
        begun[:] = [time.perf_counter()]
        for _ in range(NUM_STEPS):
            batch = next(batches)
            clock.tokens.append(_num_tokens(batch))
            for begin in range(0, BATCH, batch_size):
                part = {k: v[begin : begin + batch_size].to(accelerator.device) for k, v in batch.items()}
                width = int(part["attention_mask"].sum(1).max())
                part = {k: v[:, :width] if v.dim() == 2 else v for k, v in part.items()}
                loss = model(**part).loss * len(part["labels"]) / BATCH
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
            if clock.is_done:
                break
        return {"clock": clock, "micro_batch": batch_size}

    made: dict[str, Any] = train()
    return {**made, "search_s": begun[0] - started}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a CSV file with a column text")
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--cap", type=int, default=CAP, help="bytes that the allocator may reserve; 0 for all")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="keep plans here, and take those that are there")
    parser.add_argument("--plans-only", action="store_true", help="make the plans and leave; needs no GPU")
    parser.add_argument("--profile", action="store_true", help="of planned sides: what the GPU's time goes to")
    parser.add_argument("--torch-version", help="plan for this torch, such as 2.11; else the one here")
    parser.add_argument("--lengths", choices=("real", "full"), default="real")
    parser.add_argument(
        "--seq", type=int, default=SEQ, help="tokens at which texts end, of planned sides; one --out for each"
    )
    parser.add_argument("--out", type=Path, default=Path("packed_speed.jsonl"))
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of one side")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
