"""`Encoder`: a model opened for its vectors: precision, prompt and width decided, weights loaded last.

Vectors in the types that they are stored in: int8, uint8, binary and ubinary mean what `quantize_embeddings` of
sentence-transformers 6.2 gives.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.models.hub import exported_file
from vramfit.models.sentence_folder import find_prompt
from vramfit.runtime.device import RunDevice
from vramfit.runtime.encoding import texts
from vramfit.runtime.encoding.request import STORED, EncodeRequest, fingerprint
from vramfit.runtime.inference import Inference
from vramfit.runtime.onnx_model import INT8, arithmetic_of
from vramfit.runtime.retrieval import check_dims
from vramfit.runtime.trained import open_model
from vramfit.settings import having
from vramfit.settings.precision import decided, named
from vramfit.tasks.parts import pooling
from vramfit.tasks.parts.joint import width_of
from vramfit.tasks.parts.reading import check_room

Array = npt.NDArray[Any]
NUM_STEPS = 255
FEW_VECTORS = 100
"""Ranges of fewer vectors are said to be unsteady, as sentence-transformers says."""


class Encoder:
    """A model that gives vectors.

    Raises:
        UnknownModel, CheckpointError: no model there, or one that vramfit cannot compute.
        WorkloadError: no such device or settings.
    """

    def __init__(self, request: EncodeRequest) -> None:
        trained = open_model(
            request.model,
            task=request.task_or_usual,
            seq=request.seq,
            trust_remote_code=request.trust_remote_code,
            or_vectors=True,
        )
        self.prompt = find_prompt(trained.parts, request.prompt, request.prompt_name)
        """What goes before every text."""
        self.trained = replace(trained, prompt=self.prompt)
        self.run_device = RunDevice(request.device, memory=request.memory)
        self._request = decided(request, self.run_device.capability)
        exported = exported_file(request.model)
        self.arithmetic = named(self._request) if exported is None else arithmetic_of(exported)
        if request.exact and self.arithmetic == INT8:
            raise WorkloadError(
                [f"exact is fp32, and {exported} computes in int8"],
                hint="leave exact out, delete the int8 file (the fp32 one beside it is run then), or give the folder "
                "that it was exported from",
            )
        """The precision that is computed in."""
        check_room(trained.tokenizer, trained.max_length, pair=False)

    def load(self) -> None:
        """Load the weights, with a batch that fits beside them.

        Raises:
            NoPlanFits: not even one text fits.
            WorkloadError: vectors that are to be cut to more numbers than they have.
        """
        trained, request = self.trained, self._request
        names = {name for name in having(in_inference=True) if hasattr(request, name)} - {
            "model",
            "task",
            "seq",
            "batch",
        }
        settings = trained.suited(self.run_device, **{name: getattr(request, name) for name in names})
        inference = trained.load(self.run_device, batch=request.batch, **settings)
        if not trained.kind.pools_itself:
            pooling.attach(inference.model, pooling.EmbeddingHead("mean", normalizes=False))
            workload = trained.workload(**settings)
            inference = Inference(inference.model, self.run_device, max_tokens=inference.max_tokens, workload=workload)
        head = pooling.head_of(inference.model)
        assert head is not None
        head.dims = head.dims if request.dims is None else None
        check_dims(inference.model, [request.dims] if request.dims is not None else [])
        self.inference = inference
        self.width = request.dims or width_of(head, inference.model)
        """Numbers of a vector."""
        self._normalizes = head.normalizes

    def cut(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors at the length that is asked for."""
        return cut(vectors, self._request.dims, normalizes=self._normalizes)

    @property
    def part_rows(self) -> int:
        """Rows that are read, encoded and kept together."""
        return texts.PART_ROWS if self.run_device.computes_apart else texts.HOST_PART_ROWS

    @property
    def num_recoveries(self) -> int:
        """How often a batch ran out of memory and was halved."""
        return self.inference.num_recoveries if hasattr(self, "inference") else 0

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide what the numbers are: a run that goes on has the same."""
        request = self._request
        return {
            "model": fingerprint(request.model),
            "task": self.trained.task,
            "precision": self.arithmetic,
            "dtype": request.dtype,
            "dims": request.dims,
            "prompt": self.prompt,
            "seq": self.trained.max_length,
            "text_column": request.text_column,
            "calibration": request.calibration,
        }


def stored_width(dtype: str, width: int) -> int:
    """Numbers that are stored of a vector; eight signs are one.

    >>> stored_width("binary", 12), stored_width("int8", 12)
    (2, 12)
    """
    return math.ceil(width / 8) if dtype.endswith("binary") else width


def cut(vectors: torch.Tensor, dims: int | None, *, normalizes: bool) -> torch.Tensor:
    """The first numbers of each vector, at unit length again where the whole one has it."""
    if dims is None or dims == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dims]
    return F.normalize(kept, dim=-1) if normalizes else kept


def ranges_of(vectors: Array, before: Array | None = None) -> Array:
    """The least and the greatest number of each place, of those before too."""
    lows, highs = vectors.min(0), vectors.max(0)
    if before is not None:
        lows, highs = np.minimum(lows, before[0]), np.maximum(highs, before[1])
    return np.vstack((lows, highs)).astype(np.float32)


def check_calibration(num_vectors: int, dtype: str) -> None:
    """Raises WorkloadError where one vector is all that a range could be taken from."""
    if num_vectors < 2:
        raise WorkloadError(
            [f"dtype {dtype} takes its ranges from vectors of the data, and there is only one"],
            hint="give a file of texts that are like the data: --calibration FILE",
        )


def stored(vectors: Array, dtype: str, ranges: Array | None = None) -> Array:
    """Vectors in the type that is asked for.

    Args:
        ranges: of int8 and uint8: the least and the greatest number of each place.
    """
    if dtype.endswith("binary"):
        packed = np.packbits(vectors > 0, axis=-1)
        return packed if dtype == "ubinary" else (packed - np.uint8(128)).view(np.int8)
    if not dtype.endswith("int8"):
        return vectors.astype(STORED[dtype])
    assert ranges is not None
    steps = (ranges[1] - ranges[0]) / NUM_STEPS
    steps = np.where(steps == 0, 1, steps)
    places = np.clip(np.floor((vectors - ranges[0]) / steps), 0, NUM_STEPS)
    made: Array = places.astype(np.uint8) if dtype == "uint8" else (places - 128).astype(np.int8)
    return made
