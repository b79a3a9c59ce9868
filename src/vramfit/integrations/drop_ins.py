"""`fit_encoder` and `fit_reranker`: models of sentence-transformers that encode and score inside a memory budget.

A fitted model keeps its class, its modules and all code around its passes: arguments, prompts, conversions. Only the
loop over batches (`_inference`) is another one, that of `runtime/inference.py`. What that loop cannot compute goes
through the model's own.
"""

import inspect
import threading
import warnings
from typing import Any, ClassVar, TypeVar, Unpack

import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.integrations.text_passes import Key, Passes, Reader, TextRows, Unfit, Wishes, plan_passes, progress
from vramfit.integrations.trainer.models import PACKAGE, VECTOR, encoder_in, is_sentence_model, read_head
from vramfit.models.anatomy import max_positions
from vramfit.records.estimate import Estimate
from vramfit.runtime.data.samples import LONGEST
from vramfit.runtime.device import RunDevice, enforce
from vramfit.tasks import DEFAULT
from vramfit.tasks.parts.pooling import EmbeddingHead
from vramfit.techniques.application import settings_found, use_expandable_segments

LOOP = "_inference"
"""The method of sentence-transformers that runs batches; before 6.2 that is `encode` or `predict`."""
LOGITS = ("logits", ["logits"], ("logits",))
OF_TOKENIZING = {"task", "processing_kwargs"}
"""Further arguments of a call that only tokenizing reads, unless a module says otherwise."""
Kind = TypeVar("Kind", bound="Fitted")


def fit_encoder(model: Any, **wishes: Unpack[Wishes]) -> "FittedEncoder":
    """Let a SentenceTransformer encode inside a budget, in place: `encode` and what calls it stay as they are.

    Batches are made by tokens, as many as fit the memory, of texts of like length; where the GPU has the kernel for the
    model's precision, texts lie end to end, without padding. Memory that runs out costs nothing: the batch is done
    again in halves. The `batch_size` of a call is not used.

    Args:
        model: on its device. Calls for anything but vectors of texts, and calls of several processes, go through its
            own code, unplanned.
        memory, gpu: the budget, as for `plan`; without both, what is free on the model's GPU. On a CPU nothing is
            planned without them.
        max_tokens: of a batch at most, whatever fits.
        packs: whether texts lie end to end; None where the GPU has the kernel for it.
        device: `emulated` counts what a GPU of size `memory` would.

    Returns:
        What was planned; its `undo()` gives the model back as it was.

    Raises:
        WorkloadError: a model that cannot be fitted, or was already; nothing was changed.
        NoPlanFits: not even one text of full length fits; nothing was changed.
        BudgetExceeded: the process holds more than the budget already.
    """
    fitted = _fit(FittedEncoder, model, wishes)
    config = encoder_in(model).config
    saved_as = ", ".join(getattr(config, "architectures", None) or ())
    if saved_as.endswith("ForSequenceClassification") and config.num_labels == 1:
        warnings.warn(
            f"this model was saved as a reranker ({saved_as} with one score): the means of its tokens were not trained "
            "to be compared. Load it with CrossEncoder and take fit_reranker, unless it was trained for vectors since",
            stacklevel=2,
        )
    return fitted


def fit_reranker(model: Any, **wishes: Unpack[Wishes]) -> "FittedReranker":
    """Let a CrossEncoder score inside a budget, in place: `predict`, `rank` and what calls them stay as they are.

    Args:
        model, **wishes: as for `fit_encoder`.

    Returns:
        What was planned; its `undo()` gives the model back as it was.

    Raises:
        WorkloadError, NoPlanFits, BudgetExceeded: as `fit_encoder`.
    """
    return _fit(FittedReranker, model, wishes)


def _fit(kind: type[Kind], model: Any, wishes: Wishes) -> Kind:
    unknown = [name for name in wishes if name not in Wishes.__annotations__]
    if unknown:
        raise TypeError(f"{kind.made_by}() got an unexpected keyword argument {unknown[0]!r}")
    problems = [kind.problem_with(model)]
    if problems == [None] and kind.loop_of(model) in vars(model):
        problems.append("this model was fitted already: undo that first, to fit it otherwise")
    most = wishes.get("max_tokens")
    if most is not None and (type(most) is not int or most < 1):
        problems.append(f"max_tokens {most!r} is no number of tokens: give a whole number from 1")
    device = wishes.get("device")
    if device not in (None, "emulated"):
        problems.append(f"device {device!r} is not emulated: the model runs where it is, and model.to() moves it")
    found = [f"{kind.made_by}: {problem}" for problem in problems if problem is not None]
    if found:
        raise WorkloadError(found)
    fitted = kind(model, wishes)
    setattr(model, kind.loop_of(model), fitted)
    return fitted


class Fitted:
    """Stands in for the loop over batches of one model; its subclasses know what passes give.

    Args:
        model: of sentence-transformers.
        wishes: what its calls are planned for.
    """

    made_by: ClassVar[str]
    method: ClassVar[str]
    task: ClassVar[str]
    takes: ClassVar[str]
    """The class of models."""
    arguments: ClassVar = frozenset({"prompt", "batch_size", "show_progress_bar"})
    """Of `_inference`, which passes know."""

    def __init__(self, model: Any, wishes: Wishes) -> None:
        self.model = model
        self.num_recoveries = 0
        """How often memory ran out and a batch was halved."""
        self.num_planned = self.num_own = 0
        """Calls that went through in planned batches, and those that went through the model's own code."""
        self._wishes: Wishes | None = wishes
        self._lock = threading.RLock()
        self._share_before: float | None = None
        self._passes: Passes | None = None
        self.run_device = RunDevice(wishes.get("device") or str(model.device), memory=wishes.get("memory"))
        self._find_passes(model.device)
        self._hold_budget()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, such as that of a worker process: it runs the model's own code."""
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _wishes=None, _passes=None, _lock=threading.RLock(), _share_before=None)
        self.num_recoveries = self.num_planned = self.num_own = 0

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a batch, for now: fewer than planned for a while after memory ran out. None once undone."""
        return None if self._passes is None else self._passes.ceiling.num_tokens

    @property
    def packs(self) -> bool:
        """Whether texts lie end to end, so that padding takes nothing."""
        return self._passes is not None and self._passes.key.packs

    def estimate(self) -> Estimate | None:
        """What the largest batch takes, as predicted; None where there is nothing to fit into, and once undone."""
        with self._lock:
            return None if self._passes is None else self._passes.estimate()

    def undo(self) -> None:
        """Give the model back as it was."""
        with self._lock:
            loop = self.loop_of(self.model)
            if vars(self.model).get(loop) is self:
                delattr(self.model, loop)
            if self._share_before is not None:
                torch.cuda.set_per_process_memory_fraction(self._share_before, self.run_device.device)
            self._wishes = self._passes = self._share_before = None

    def __call__(self, *given: Any, **asked: Any) -> Any:
        """As the loop of the model, with the same arguments; one call at a time."""
        loop = self.loop_of(self.model)
        with self._lock, torch.inference_mode():
            try:
                made = (self._loop if loop == LOOP else self._around)(*given, **asked)
                self.num_planned += 1
                return made
            except Unfit:
                self.num_own += 1
        return getattr(type(self.model), loop)(self.model, *given, **asked)

    def _loop(self, inputs: list[Any], *, device: Any = None, **asked: Any) -> Any:
        where = self.model._resolve_inference_device(device)
        return self._finish(self._run(inputs, where, asked), where, asked)

    def _around(self, *given: Any, **asked: Any) -> Any:
        """The method of before 6.2, whose loop is given all texts as one batch; planned passes stand in for forward."""
        model, method = self.model, getattr(type(self.model), self.method)
        bound = inspect.signature(method).bind_partial(model, *given, **asked)
        bound.apply_defaults()
        call = bound.arguments
        if call["pool"] is not None or isinstance(call["device"], list):
            raise Unfit
        known: dict[str, Any] = {name: call[name] for name in ("output_value", "show_progress_bar") if name in call}
        call.update(show_progress_bar=False, batch_size=call["batch_size"] and call["batch_size"] << 62)

        def forward(features: dict[str, Any], **more: Any) -> dict[str, torch.Tensor]:
            put_back()
            inputs, where = features.pop("inputs"), model.device
            made = self._finish(self._run(inputs, where, features | known), where, known)
            return dict.fromkeys((VECTOR, "scores"), made)

        def put_back() -> None:
            for name in ("preprocess", "forward"):
                vars(model).pop(name, None)

        vars(model).update(preprocess=lambda inputs, **more: {"inputs": inputs} | more, forward=forward)
        try:
            return method(*bound.args, **bound.kwargs)
        finally:
            put_back()

    def _run(self, inputs: list[Any], where: torch.device, asked: dict[str, Any]) -> torch.Tensor:
        """What passes give for each input, in the order of the call, on the host.

        Raises:
            Unfit: they do not give what is asked for.
        """
        passes = self._find_passes(where) if inputs and self._is_known(asked) else None
        if passes is None:
            raise Unfit
        model, inference = self.model, passes.inference
        model.eval()
        of_tokenizing = {name: asked[name] for name in OF_TOKENIZING & asked.keys()}
        reader = Reader(model, passes.key, passes.module, {"prompt": asked["prompt"], **of_tokenizing})
        found: list[torch.Tensor] = []

        def take(part: TextRows, output: Any, batch: Any, rows: list[int]) -> None:
            made = self._read(output, asked)
            if not found:
                found.append(made.new_empty((len(inputs), *made.shape[1:])))
            found[0][part.numbers[rows]] = made

        inference.max_tokens, before = passes.ceiling.num_tokens, inference.num_recoveries
        with progress(len(inputs), asked["show_progress_bar"]) as tell, passes.packed():
            try:
                inference.run_parts(reader.parts(inputs), take, tell)
            finally:
                passes.ceiling.note(inference.max_tokens)
                self.num_recoveries += inference.num_recoveries - before
        return found[0]

    def _find_passes(self, where: torch.device) -> Passes | None:
        """How batches go through the model as it is now; None where its own code is to run."""
        wishes = self._wishes
        if wishes is None or self.problem_with(self.model) is not None:
            return None
        module = self.module_of(self.model)
        longest = self.model.max_seq_length or max_positions(module) or LONGEST
        settings = settings_found(module, where, packs=wishes.get("packs"))
        key = Key(self.task, where, tuple(settings.items()), longest, self._parts())
        if self._passes is None or self._passes.key != key:
            if self.run_device.emulated is None and where != self.run_device.device:
                self.run_device = RunDevice(str(where))
            with torch.inference_mode(False):
                self._passes = plan_passes(key, module, self._head(), self.run_device, wishes)
        return self._passes

    def _hold_budget(self) -> None:
        """Hold the process to the memory that was given."""
        memory, device = (self._wishes or {}).get("memory"), self.run_device.device
        use_expandable_segments(device)
        if memory is not None and device.type == "cuda":
            self._share_before = torch.cuda.get_per_process_memory_fraction(device)
            enforce(memory, device)

    @classmethod
    def loop_of(cls, model: Any) -> str:
        """The method that a fitted model has another one for."""
        return LOOP if hasattr(type(model), LOOP) else cls.method

    @classmethod
    def problem_with(cls, model: Any) -> str | None:
        """Why a model cannot be fitted; None where it can."""
        if not is_sentence_model(model, cls.takes):
            others = [f.made_by for f in (FittedEncoder, FittedReranker) if is_sentence_model(model, f.takes)]
            instead = f": {others[0]} takes it" if others else ""
            return f"it takes a {cls.takes}, not {type(model).__name__}{instead}"
        loop = getattr(type(model), cls.loop_of(model))
        if loop.__module__.partition(".")[0] != PACKAGE or not hasattr(model, "preprocess"):
            return f"{type(model).__name__} has no known loop over batches: take sentence-transformers 6.0.1 or newer"
        if getattr(model, "_placement_is_delegated", False):
            return "a device map places its layers: load it on one device"
        if model._can_flatten_inputs():
            return "it already packs texts, with flash attention: load it with attn_implementation sdpa"
        around = [model, *model.children()]
        if any(m._compiled_call_impl or m._forward_hooks or m._forward_pre_hooks for m in around):
            return "its modules are compiled or have forward hooks, which planned passes would leave out"
        return cls._unread(model)

    @staticmethod
    def _unread(model: Any) -> str | None:
        """What of the modules is not known; None where all of it is."""
        raise NotImplementedError

    @staticmethod
    def module_of(model: Any) -> Any:
        """The model of transformers inside."""
        raise NotImplementedError

    def _parts(self) -> tuple[Any, ...]:
        """What decides how outputs are read."""
        return tuple(map(id, (self.module_of(self.model), *self.model.children())))

    def _head(self) -> EmbeddingHead | None:
        return None

    def _is_known(self, asked: dict[str, Any]) -> bool:
        """Whether passes give what a call asks for."""
        more = asked.keys() - self.arguments
        return more <= OF_TOKENIZING and not more & set(self.model.get_model_kwargs())

    def _read(self, output: Any, asked: dict[str, Any]) -> torch.Tensor:
        """What is kept of the output of a pass, on the host."""
        raise NotImplementedError

    def _finish(self, found: torch.Tensor, where: torch.device, asked: dict[str, Any]) -> torch.Tensor:
        """What a call gives, of all outputs."""
        raise NotImplementedError


class FittedEncoder(Fitted):
    """A SentenceTransformer that encodes inside a budget."""

    made_by, method, task, takes = "fit_encoder", "encode", "embedding", "SentenceTransformer"
    arguments = Fitted.arguments | {"output_value", "save_to_cpu", "normalize_embeddings", "truncate_dim"}

    @staticmethod
    def _unread(model: Any) -> str | None:
        head = read_head(model)
        return head if isinstance(head, str) else None

    @staticmethod
    def module_of(model: Any) -> Any:
        return encoder_in(model)

    def _parts(self) -> tuple[Any, ...]:
        return (*super()._parts(), self.model[1].pooling_mode)

    def _head(self) -> EmbeddingHead:
        head = read_head(self.model)
        assert isinstance(head, EmbeddingHead), "problem_with has looked"
        return head.eval()

    def _is_known(self, asked: dict[str, Any]) -> bool:
        if asked["output_value"] != "sentence_embedding" or (asked["prompt"] and not self.model[1].include_prompt):
            return False
        # under autocast, dense layers give 16 bits; here they compute in their own type
        has_dense = any(True for part in list(self.model.children())[2:] for _ in part.parameters())
        is_cast = torch.is_autocast_enabled(self.model.device.type)
        return super()._is_known(asked) and not (has_dense and is_cast)

    def _read(self, output: Any, asked: dict[str, Any]) -> torch.Tensor:
        vectors: torch.Tensor = output.embedding.cpu()[:, : asked.get("truncate_dim")]
        if asked.get("normalize_embeddings"):
            vectors = F.normalize(vectors, p=2, dim=1)
        return vectors

    def _finish(self, found: torch.Tensor, where: torch.device, asked: dict[str, Any]) -> torch.Tensor:
        if not torch.is_autocast_enabled(where.type):  # heads compute in fp32
            found = found.to([p.dtype for p in self.model.parameters()][-1])
        return found if asked.get("save_to_cpu") else found.to(where)


class FittedReranker(Fitted):
    """A CrossEncoder that scores inside a budget."""

    made_by, method, task, takes = "fit_reranker", "predict", DEFAULT, "CrossEncoder"
    arguments = Fitted.arguments | {"activation_fn", "apply_softmax"}

    @staticmethod
    def _unread(model: Any) -> str | None:
        from transformers import PreTrainedModel

        first, *others = model.children()
        text = getattr(first, "modality_config", {}).get("text", {})
        if others or not isinstance(getattr(first, "model", None), PreTrainedModel):
            names = ", ".join(type(part).__name__ for part in (first, *others))
            return f"its modules are {names}, and a model of transformers that gives scores is known"
        if text.get("method") != "forward" or text.get("method_output_name") not in LOGITS:
            return f"{type(first).__name__} takes its scores from something else than the logits of its model"
        return None

    @staticmethod
    def module_of(model: Any) -> Any:
        return model[0].model

    def _read(self, output: Any, asked: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = output.logits.cpu()
        return logits if logits.dtype.itemsize >= torch.float32.itemsize else logits.float()

    def _finish(self, found: torch.Tensor, where: torch.device, asked: dict[str, Any]) -> torch.Tensor:
        scores = found.to(where)
        if "activation_fn" not in asked:
            return scores
        if asked["activation_fn"] is not None:
            scores = asked["activation_fn"](scores)
        if self.model.num_labels == 1 and scores.ndim > 1:
            scores = scores.squeeze(-1)
        return torch.softmax(scores, dim=1) if asked["apply_softmax"] and scores.ndim > 1 else scores
