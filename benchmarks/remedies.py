"""Which remedies for memory are worth it? Each trained for real: memory, time and accuracy, predicted and measured.

    python benchmarks/remedies.py --data DATA --predict                 # on any machine: predictions, into results/
    python benchmarks/remedies.py --data DATA --predict --model MPNET --only sst2   # of another model
    python benchmarks/remedies.py --data DATA --model MINILM --seeds 0 --processes 5 --timed     # on a GPU; 8 minutes
    python benchmarks/remedies.py --data DATA --model MINILM --seeds 1 2 --processes 12 --out others.jsonl
    python benchmarks/remedies.py --tables                              # from results/: docs/remedies.md

DATA is a folder with sst2, imdb_sample, rte, banking77, wnut17 and xquad_en. A remedy is a setting of `vramfit train`
over fp32 with torch's AdamW in one pass; two rows are a loop written by hand. The first seed is timed: its runs have
the GPU one at a time, while the next ones read their data and plan; those of other seeds share it, and their times are
not shown. A larger model (MPNet) wants smaller learning rates (`--lr-over 5`), except for rows that have their own.
Runs that took more than was predicted, with room for it, are run again inside the least that would be planned with
(`--held`). What is said to save memory and does not is run too (`--only folklore`). Cases that a file has are not run
again, and `--limit-s` ends a slice. `--quick` takes a few rows on an emulated GPU. Keep files as
`results/remedies_<gpu>_<date>[_<seed>].jsonl`.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fine_tuning
import folklore
import forked
import held
import remedy_tables
from fine_tuning import TIMEOUT_S, Data, Options, child
from remedy_cases import DATASETS, REMEDIES, ROOM, SHARE, Remedy, cases, name_of, plain_settings, train_settings

GPU, TORCH = "h200", "2.11"
LEAST_S = 45.0
"""A case is not begun with less time than this left."""


def main(arguments: list[str] | None = None) -> int:
    """Predict, run or show; 0 when every case asked for is there."""
    options = _parse(arguments)
    if options.tables:
        return remedy_tables.write()
    if options.predict:
        return predict_all(options)
    forked.import_all()
    head = {"gpu": "emulated"} if options.quick else forked.in_child(forked.head, timeout_s=TIMEOUT_S)
    head |= {"model": Path(options.model).name}
    deadline = time.monotonic() + options.limit_s
    chosen = [(name_of(options, *case), case) for case in cases(options)]
    if options.held:
        over = {line["name"] for line in forked.read_lines(options.out, "name") if held.is_over(line)}
        chosen = [(f"{name} held", case) for name, case in chosen if name in over]
    else:
        chosen += [(f"{head['model']} folklore {name}", name) for name in folklore.FOLKLORE]
    chosen = [(name, case) for name, case in chosen if any(part in name for part in options.only)]
    for stage in (True, False):  # a third of fp32's memory is a budget of others
        waiting = [(name, case) for name, case in chosen if (_is_whole(case) or options.held) is stage]
        for name, line in _lines(options, waiting, deadline):
            line = {"name": name, **head, **line}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            print(name, json.dumps(line.get("run") or line["error"], ensure_ascii=False)[:400], flush=True)
    done = {line["name"] for line in forked.read_lines(options.out, "name") if "error" not in line}
    missing = [name for name, _ in chosen if name not in done]
    print(f"{len(missing)} of {len(chosen)} cases are missing; a later call runs them", flush=True)
    return int(bool(missing))


def _is_whole(case: Any) -> bool:
    return not isinstance(case, str) and case[0].name == "fp32"


def _lines(options: Options, chosen: list[tuple[str, Any]], deadline: float) -> Iterator[tuple[str, Data]]:
    """The cases that are not there yet, one after another or side by side."""
    done = {line["name"]: line for line in forked.read_lines(options.out, "name") if "error" not in line}
    waiting = ((options, name, case, done) for name, case in chosen if name not in done)
    begun = (job for job in waiting if deadline - time.monotonic() >= LEAST_S)
    if options.processes > 1:
        for job, made in forked.in_children(_run, begun, num_processes=options.processes, timeout_s=TIMEOUT_S):
            yield job[1], made
    else:
        for job in begun:
            yield job[1], _run(*job)


def _run(options: Options, name: str, case: Any, done: dict[str, Data]) -> Data:
    """One line: what was run, and what came of it; or `error`."""
    what: Data = {}
    try:
        if isinstance(case, str):
            return {"folklore": case, "run": child(_show, name=case, options=options)[0]}
        remedy, dataset, seed = case
        what = {"remedy": remedy.name, "dataset": dataset, "seed": seed, "timed": options.timed}
        if remedy.plain is not None:
            settings = plain_settings(remedy, dataset, options) | {"seed": seed}
            settings |= fine_tuning.QUICK if options.quick else {}
            return {**what, "run": child(fine_tuning.plain, **settings, alone=options.timed)[0]}
        third = _third(options, dataset, seed, done) if remedy.planned and not options.quick else None
        settings = train_settings(remedy, dataset, options, third)
        if options.held:
            predicted = done[name.removesuffix(" held")]["run"]["predicted_reserved_bytes"]
            what, settings["memory"] = what | {"held": True}, held.least_bytes(predicted)
        folder = re.sub(r"\W+", "_", name)
        trained = fine_tuning.train(options, name=folder, seed=seed, alone=options.timed, **settings)
        shutil.rmtree(options.work / folder)
        return {**what, "run": trained}
    except (RuntimeError, KeyError, OSError) as error:
        return {**what, "error": repr(error)[-800:]}


def _third(options: Options, dataset: str, seed: int, done: dict[str, Data]) -> int:
    """A third of what fp32 training reserved, or was predicted to."""
    whole = next(remedy for remedy in REMEDIES if remedy.name == "fp32")
    line = done.get(name_of(options, whole, dataset, seed))
    if line is not None:
        return int(line["run"]["measured_reserved_bytes"]) // SHARE
    kept = json.loads(remedy_tables.PREDICTIONS.read_text(encoding="utf-8"))
    if Path(options.model).name != kept["model"]:
        raise KeyError(f"{dataset} fp32 was not run, and there are predictions of {kept['model']} alone")
    return int(kept["cases"][dataset]["fp32"]["reserved_bytes"]) // SHARE


def _show(name: str, options: Options) -> Data:
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # new threads of a forked process find no pool of torch's
    return folklore.FOLKLORE[name](options)


def predict_all(options: Options) -> int:
    """Write what is predicted of every remedy on every data set, or of those asked for."""
    name = Path(options.model).name if options.named else "minilm"
    made: dict[str, Any] = {"question": "remedies", "gpu": GPU, "torch": TORCH, "model": name, "cases": {}}
    for dataset in DATASETS:
        kept: Data = {}
        for remedy in REMEDIES:
            if dataset in remedy.datasets and any(part in f"{dataset} {remedy.name}" for part in options.only):
                kept[remedy.name] = predict(remedy, dataset, options, kept)
                print(dataset, remedy.name, kept[remedy.name], flush=True)
        made["cases"] |= {dataset: kept} if kept else {}
    path = remedy_tables.PREDICTIONS
    path = path.with_stem(f"{path.stem}_{name}") if options.named else path
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 0


def predict(remedy: Remedy, dataset: str, options: Options, kept: Data) -> Data:
    """What a remedy takes by prediction: of a step with the longest batch, and on the lengths of the data."""
    import vramfit
    from vramfit.runtime.training.preparation import num_steps
    from vramfit.runtime.training.reading import read_data
    from vramfit.runtime.training.request import TrainRequest

    third = kept["fp32"]["reserved_bytes"] // SHARE if remedy.planned else None
    settings = train_settings(remedy, dataset, options, third)
    train, _ = (options.data / file for file in settings["files"])
    names = ("label_column", "max_rows", "seq", "batch", "epochs")
    asked = {name: settings[name] for name in names if name in settings}
    columns = tuple(settings["text_column"].split(",")) if "text_column" in settings else ()
    task = settings.get("task", "sequence-classification")
    request = TrainRequest(
        model=options.model, data=str(train), output="none", task=task, text_columns=columns, **asked
    )
    data = read_data(request, None)
    names = ("precision", "optimizer", "checkpointing", "micro_batch", "freeze", "lora", "quantize", "offload", "batch")
    keywords: dict[str, Any] = {name: settings[name] for name in names if name in settings}
    keywords |= {"task": task, "gpu": GPU, "torch_version": TORCH, "max_grad_norm": 1.0}
    if task != "question-answering":
        keywords["num_labels"] = len(data.train.label_names)
    if remedy.plain is not None:
        seq = plain_settings(remedy, dataset, options).get("pad_to", data.longest)
        found = vramfit.estimate(options.model, **keywords, seq=seq)
        return {"reserved_bytes": found.peak_reserved_bytes, "step_s": found.step_time_s, "seq": seq}
    keywords |= {"checkpointing": "full"} if settings.get("offload") == "weights" else {}
    if remedy.num_gpus > 1:
        shares = {
            "num_gpus": remedy.num_gpus,
            "parallel": "ddp",
            "micro_batch": keywords["micro_batch"] // remedy.num_gpus,
        }
        keywords |= shares
    memory = third or ROOM
    keywords |= {"seq": data.longest, "lengths": list(data.train.lengths), "group_by_length": True}
    keywords["steps"] = num_steps(request, data)
    plan = vramfit.plan(options.model, **keywords, memory=memory)
    w = plan.workload
    shown = {"micro_batch": w.micro_batch, "precision": w.precision, "checkpointing": w.checkpointing}
    shown |= {name: getattr(w, name) for name in ("attention", "fused", "graphs")}
    return {
        "reserved_bytes": plan.estimate.peak_reserved_bytes,
        "step_s": plan.step_time_s,
        "seq": data.longest,
        **shown,
    }


def _parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fine_tuning.add_arguments(parser)
    parser.add_argument("--predict", action="store_true", help="make the predictions; needs no GPU")
    parser.add_argument("--tables", action="store_true", help="write the page from the results kept here")
    parser.add_argument("--processes", type=int, default=1, help="runs side by side")
    parser.add_argument("--timed", action="store_true", help="one at a time on the GPU: only preparations overlap")
    parser.add_argument("--held", action="store_true", help="again what took more than predicted, in the least memory")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--lr-over", type=float, default=1.0, help="divides learning rates: what a larger model needs")
    parser.add_argument("--out", type=Path, default=Path("remedies.jsonl"), help="file the cases are added to")
    parser.add_argument("--limit-s", type=float, default=540.0, help="no case is begun after this")
    parser.add_argument("--work", type=Path, help="folder of the models, deleted one after another; else a new one")
    options = parser.parse_args(arguments)
    options.named = options.model is not None and options.model != os.environ.get("VRAMFIT_MINILM")
    options.timed = options.timed or options.processes == 1
    options.work = options.work or Path(tempfile.mkdtemp(prefix="vramfit_remedies_"))
    return fine_tuning.settle(options)


if __name__ == "__main__":
    sys.exit(main())
