"""`EncodeRequest`: which vectors are asked for, and how they are stored; checked without torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.errors import WorkloadError, nearest_names
from vramfit.models.sentence_folder import own_files
from vramfit.records.codec import check_place
from vramfit.settings.precision import exact_problems
from vramfit.tasks import all_tasks, find_task, vector_task

STORED: dict[str, str] = {
    "float32": "<f4",
    "float16": "<f2",
    "int8": "|i1",
    "uint8": "|u1",
    "binary": "|i1",
    "ubinary": "|u1",
}
"""dtype that is asked for → numpy's name of what is stored."""
DTYPES = tuple(STORED)
"""Types of the numbers of a vector, as sentence-transformers names them."""
ENDINGS = (".npy", ".safetensors", ".jsonl", ".parquet")
"""Of an output; each is a format."""
NUM_BLOCKS, BLOCK_BYTES = 64, 4096
"""Of a file of weights, what is read to tell it from another: training changes every weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeRequest:
    """Vectors that are asked for.

    Raises:
        WorkloadError: every problem at once.
    """

    model: str
    """A sentence-transformers folder, or any encoder."""
    task: str | None = None
    """`embedding`: pooled as the folder says, else the mean at unit length; `features`: the mean as it is."""
    output: str | None = None
    """A file whose ending, one of `ENDINGS`, says how vectors are written; None gives them as an array."""
    dtype: str = "float32"
    """One of `DTYPES`."""
    dims: int | None = None
    """Numbers that are kept of a vector, from its start; at unit length again where the model's vectors have it."""
    prompt: str | None = None
    """What goes before every text; None takes `prompt_name`, or what the folder says."""
    prompt_name: str | None = None
    """One of the folder's prompts."""
    calibration: str | None = None
    """A file of texts whose vectors say which range int8 and uint8 cover; without, the first part of the data."""
    resume: bool = False
    """Continue an interrupted run after its last complete part."""
    exact: bool = False
    """fp32, where otherwise a GPU that has bf16 uses it."""
    precision: str | None = None
    """Arithmetic; None takes what is usual on the device."""
    text_column: str | None = None
    """The column of texts; None finds it by its name."""
    max_rows: int | None = None
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used; an index says which are there."""
    seq: int | None = None
    """Tokens at which texts are cut; None takes what the model says."""
    batch: int | None = None
    """Texts of full length in a batch; None takes what fits."""
    attention: str | None = None
    fused: bool = False
    """Each layer as one function, in packed batches on a GPU."""
    memory: str | int | None = None
    """What PyTorch may reserve."""
    gpu: str | None = None
    device: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise WorkloadError(problems)

    def _problems(self) -> Iterator[str]:
        if self.dtype not in DTYPES:
            nearest = nearest_names(str(self.dtype), DTYPES, 1)[0]
            yield f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)} (nearest: {nearest})"
        if self.output is not None and Path(self.output).suffix.lower() not in ENDINGS:
            yield f"output {self.output}: its ending is none of {', '.join(ENDINGS)}, which say how vectors are written"
        if self.task is not None and not find_task(self.task).gives_vectors:
            tasks = ", ".join(task.name for task in all_tasks() if task.gives_vectors)
            yield f"task {self.task} gives no vectors of texts; those that do: {tasks}"
        for name in ("dims", "batch", "seq", "max_rows"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                yield f"{name} {value!r} is not a whole number from 1"
        yield from exact_problems(self)
        if self.prompt is not None and self.prompt_name is not None:
            yield "prompt and prompt_name both say what goes before a text: give one"
        if self.calibration is not None and not self.needs_ranges:
            yield f"calibration is for dtype int8 and uint8, not {self.dtype}"
        if self.resume and self.output is None:
            yield "resume continues an output, and none is named"
        if self.skip_bad_rows and self.output is None:
            yield "skip_bad_rows is for an output, whose index says which rows are there"

    @property
    def needs_ranges(self) -> bool:
        """Whether numbers are stored as steps between the least and the greatest of each place."""
        return self.dtype in ("int8", "uint8")

    @property
    def path(self) -> Path:
        """The output."""
        assert self.output is not None
        return Path(self.output)

    @property
    def task_or_usual(self) -> str:
        """The task, by name."""
        return self.task or vector_task().name

    def look_at_output(self, data: Any) -> None:
        """Refuse an output that cannot be written, before anything is computed.

        Raises:
            VramfitError: a folder, a folder that is not there, or the data itself.
        """
        check_place(self.path, data, self.model, what="vectors")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeReport:
    """What a run has written."""

    output: str
    num_vectors: int
    width: int
    """Numbers that are stored of a vector."""
    dtype: str
    arithmetic: str
    """The precision that was computed in."""
    prompt: str
    """What went before every text."""
    num_rows: int
    """Of the data."""
    num_bad_rows: int
    """Left out."""
    first_bad_row: str
    num_truncated: int
    max_length: int
    """Tokens at which texts were cut."""
    num_encoded: int
    """Texts of this run, without those of runs before it."""
    seconds: float
    """That these took, from the first text to the last vector."""
    num_recoveries: int
    reserved_bytes: int | None
    notes: tuple[str, ...] = ()


def fingerprint(model: str) -> str:
    """Tells a model's folder from another, wherever it lies; the name where it is no folder."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    digest = hashlib.blake2b(digest_size=16)
    for file in own_files(folder, ".safetensors", ".onnx", ".bin", ".json", ".txt", ".model"):
        num_bytes = file.stat().st_size
        digest.update(f"{file.relative_to(folder)}:{num_bytes};".encode())
        with file.open("rb") as stream:
            for place in range(NUM_BLOCKS):
                stream.seek(num_bytes * place // NUM_BLOCKS)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()
