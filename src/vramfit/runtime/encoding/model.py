"""`Encoder`: a model opened for its vectors: precision, prompt and width decided, weights loaded last."""

import json
from dataclasses import replace
from typing import Any

import torch

from vramfit.models.sentence_folder import find_prompt
from vramfit.runtime.device import RunDevice
from vramfit.runtime.encoding import texts
from vramfit.runtime.encoding.outputs import cut
from vramfit.runtime.encoding.request import EncodeRequest, fingerprint
from vramfit.runtime.inference import Inference
from vramfit.runtime.onnx_model import arithmetic_of, exported_file
from vramfit.runtime.retrieval import check_dims
from vramfit.runtime.trained import open_model
from vramfit.settings import having
from vramfit.settings.precision import decided, named
from vramfit.tasks.parts import pooling
from vramfit.tasks.parts.joint import width_of
from vramfit.tasks.parts.reading import Tokenizing, check_room


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
        self._trained = replace(trained, prompt=self.prompt)
        self._run_device = RunDevice(request.device, memory=request.memory)
        self._request = decided(request, self._run_device.capability)
        exported = exported_file(request.model)
        self.arithmetic = named(self._request) if exported is None else arithmetic_of(exported)
        """The precision that is computed in."""
        check_room(trained.tokenizer, trained.max_length, pair=False)

    def load(self) -> None:
        """Load the weights, with a batch that fits beside them.

        Raises:
            NoPlanFits: not even one text fits.
            WorkloadError: vectors that are to be cut to more numbers than they have.
        """
        trained, request = self._trained, self._request
        names = {name for name in having(in_inference=True) if hasattr(request, name)} - {
            "model",
            "task",
            "seq",
            "batch",
        }
        settings = trained.suited(self._run_device, **{name: getattr(request, name) for name in names})
        inference = trained.load(self._run_device, batch=request.batch, **settings)
        if not trained.kind.pools_itself:
            pooling.attach(inference.model, pooling.EmbeddingHead("mean", normalizes=False))
            workload = trained.workload(**settings)
            inference = Inference(inference.model, self._run_device, max_tokens=inference.max_tokens, workload=workload)
        head = pooling.head_of(inference.model)
        assert head is not None
        check_dims(inference.model, [self._dims] if self._dims is not None else [])
        self.inference = inference
        self.width = self._dims or width_of(head, inference.model)
        """Numbers of a vector."""
        self._normalizes = head.normalizes and request.dims is not None

    def cut(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors at the length that is asked for; at the folder's, as sentence-transformers cuts them."""
        return cut(vectors, self._dims, normalizes=self._normalizes)

    @property
    def _dims(self) -> int | None:
        parts = self._trained.parts
        folder = None if parts is None else json.loads(parts.settings or "{}").get("truncate_dim")
        return self._request.dims or (folder if type(folder) is int and folder > 0 else None)

    @property
    def task(self) -> str:
        """By name."""
        return self._trained.task

    @property
    def tokenizing(self) -> Tokenizing:
        """How texts become tokens."""
        return self._trained.tokenizing

    @property
    def max_length(self) -> int:
        """Tokens at which texts are cut."""
        return self._trained.max_length

    @property
    def part_rows(self) -> int:
        """Rows that are read, encoded and kept together."""
        return texts.PART_ROWS if self._run_device.computes_apart else texts.HOST_PART_ROWS

    @property
    def num_recoveries(self) -> int:
        """How often a batch ran out of memory and was halved."""
        return self.inference.num_recoveries if hasattr(self, "inference") else 0

    @property
    def reserved_bytes(self) -> int | None:
        """The reserved peak."""
        return self._run_device.reserved_bytes

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide what the numbers are: a run that goes on has the same."""
        request = self._request
        return {
            "model": fingerprint(request.model),
            "task": self.task,
            "precision": self.arithmetic,
            "dtype": request.dtype,
            "dims": self._dims,
            "prompt": self.prompt,
            "seq": self.max_length,
            "text_column": request.text_column,
            "calibration": request.calibration,
            "skip_bad_rows": request.skip_bad_rows,
        }
