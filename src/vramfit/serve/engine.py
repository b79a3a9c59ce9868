"""`Engine`: requests to answers inside one process: read, tokenized together, run in batches that fit, taken apart."""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vramfit.errors import RecoveryExhausted
from vramfit.runtime.data.samples import Samples
from vramfit.serve.loading import Loaded, load_model
from vramfit.serve.requests import INVOCATIONS, Answers, Asked, Known, Refused, Reply, beginning, has_more, problem
from vramfit.serve.settings import MAX_REQUEST_CHARACTERS, MAX_REQUEST_TOKENS, ServeSettings
from vramfit.serve.shapes import READERS
from vramfit.tasks.parts import pooling
from vramfit.tasks.parts.joint import width_of
from vramfit.tasks.parts.reading import Encoded, texts_of

PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0)
"""Before a text that does not fit by itself is tried again: others may leave the GPU meanwhile."""
TOGETHER = 2
"""Times that what is left of a round is tried together, before each text is tried by itself."""

SEVERAL = "send it in several requests"

Replies = list[tuple[Hashable, Reply]]
OnReplies = Callable[[Replies], None]
Row = dict[str, Any]
CLEAN_RUNS = 20
"""So many rounds without running out, and twice as much is tried."""


@dataclass(slots=True)
class Part:
    """One request of a round."""

    asked: Asked
    num_left: int = 0
    """Samples without an answer."""
    num_tokens: int = 0
    rows: dict[int, list[Row]] = field(default_factory=dict)
    """Input → what was said of it, a row for each window."""


@dataclass(slots=True)
class Round:
    """Requests that are answered together."""

    parts: dict[Hashable, Part] = field(default_factory=dict)
    refused: list[tuple[Hashable, Reply]] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)
    owners: list[tuple[Hashable, int]] = field(default_factory=list)
    """Of each sample: its request, and which of its inputs it is."""


class Engine:
    """Answers requests with one model; `prepare` and `run` may be called from two threads, one each.

    Args:
        loaded: the model.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.run_device = loaded.run_device
        self.budget_bytes = loaded.budget_bytes
        self.task, self._kind = loaded.trained.task, loaded.trained.kind
        self.known = known_of(loaded)
        self.max_length = loaded.trained.max_length
        self.num_batches = self.num_tokens = 0
        """That went through so far; tokens without padding."""
        self._trained, self._inference = loaded.trained, loaded.inference
        self._top_k = loaded.top_k
        self._ceiling = Ceiling(loaded.inference.max_tokens)

    @property
    def max_tokens(self) -> int:
        """Of a batch, for now: less than planned for a while after memory has run out."""
        return self._ceiling.num_tokens

    @property
    def num_recoveries(self) -> int:
        """How often memory ran out and a batch was split."""
        return self._inference.num_recoveries

    def rehearse(self) -> None:
        """Run the largest batch there can be: what is slow the first time is behind, and what does not fit is known.

        Raises:
            RecoveryExhausted: not even one text of full length fits.
        """
        ids = [self._trained.tokenizer.unk_token_id or 0] * self.max_length
        num_samples = max(self.max_tokens // self.max_length, 1)
        samples = self._samples([Encoded({"row": n}, ids, (), (), len(ids)) for n in range(num_samples)])
        self._inference.run(samples, lambda output, batch, numbers: None)
        self._ceiling = Ceiling(self._inference.max_tokens)

    def prepare(self, requests: Iterable[tuple[Hashable, str, bytes]]) -> Round:
        """Read and tokenize requests; what is wrong is noted as its answer.

        Args:
            requests: something to know each by, the path that it was sent to, and its body.
        """
        made = Round()
        references: list[Row] = []
        owners: list[tuple[Hashable, int]] = []
        for key, path, body in requests:
            try:
                asked = READERS[path](body, self.known)
                cut = self._cut(asked)
            except Refused as refusal:
                made.refused.append((key, refusal.reply))
                continue
            made.parts[key] = Part(asked)
            for place, reference in enumerate(cut):
                references.append({**reference, "row": len(references), "top_k": asked.top_k or self._top_k})
                owners.append((key, place))
        pieces: dict[Hashable, list[Encoded]] = {key: [] for key in made.parts}
        for sample in self._kind.encode_requests(references, self._trained.tokenizing):
            pieces[owners[sample.reference["row"]][0]].append(sample)
        for key, samples in pieces.items():
            num_tokens = sum(len(sample.ids) for sample in samples)
            longest = max((sample.full_length for sample in samples), default=0)
            wrong = _too_long(num_tokens, len(samples)) if num_tokens > MAX_REQUEST_TOKENS else None
            if longest > self.max_length and not made.parts[key].asked.may_cut:
                wrong = problem(413, f"a text has more than {self.max_length:,} tokens", '"truncate": true cuts it')
            if wrong is not None:
                del made.parts[key]
                made.refused.append((key, wrong))
                continue
            made.parts[key].num_left, made.parts[key].num_tokens = len(samples), num_tokens
            made.encoded += samples
            made.owners += [owners[sample.reference["row"]] for sample in samples]
        return made

    def run(self, work: Round, send: OnReplies) -> None:
        """Answer a round; `send` gets the answers of each batch as soon as it is through."""
        if work.refused:
            send(work.refused)
        left = dict.fromkeys(range(len(work.encoded)))
        for pause_s in PAUSES_S[:TOGETHER]:
            if self._try(work, left, left, pause_s, send) is None:
                return
        for number in list(left):
            self._run_alone(work, number, left, send)

    def answer(self, body: bytes, path: str = INVOCATIONS) -> Reply:
        """The answer to one request."""
        found: Replies = []
        self.run(self.prepare([(0, path, body)]), found.extend)
        return found[0][1]

    def _cut(self, asked: Asked) -> list[Row]:
        """The inputs of a request, without what lies beyond what is read of them.

        Raises:
            Refused: too much to tokenize; known before all of it is.
        """
        made, size = [], 0
        tokenizer = self._trained.tokenizer
        for reference in asked.references:
            one = self._kind.cut_request(reference, lambda text: beginning(text, tokenizer, self.max_length))
            made.append(one)
            size += sum(map(len, texts_of(one)))
            if size > MAX_REQUEST_CHARACTERS:
                what = f"the texts have more than the {MAX_REQUEST_CHARACTERS:,} characters of one request"
                raise Refused(413, what, SEVERAL)
            if "context" in one and has_more(one["context"], tokenizer, MAX_REQUEST_TOKENS):
                raise Refused(413, f"a context has more than {MAX_REQUEST_TOKENS:,} tokens", SEVERAL)
        return made

    def _run_alone(self, work: Round, number: int, left: dict[int, None], send: OnReplies) -> None:
        failure = None
        for pause_s in PAUSES_S:
            failure = self._try(work, [number], left, pause_s, send)
            if failure is None:
                return
        left.pop(number)
        key, _ = work.owners[number]
        if work.parts.pop(key, None) is not None:
            send([(key, problem(503, f"memory is short: {failure}", "come again later"))])

    def _try(
        self, work: Round, wanted: Iterable[int], left: dict[int, None], pause_s: float, send: OnReplies
    ) -> str | None:
        """Run some samples; gives what was said where one of them does not fit by itself."""
        numbers = [n for n in wanted if n in left]
        if not numbers:
            return None
        time.sleep(pause_s)
        samples = self._samples([work.encoded[n] for n in numbers])

        def take(output: Any, batch: Any, chosen: list[int]) -> None:
            self.num_batches += 1
            self.num_tokens += sum(samples.lengths[i] for i in chosen)
            references = [samples.references[i] for i in chosen]
            rows = self._kind.predictions(output, batch, references, self._trained.tokenizing)
            if any(_has_logits(work, numbers[i]) for i in chosen):
                rows = [row | {"logits": logits} for row, logits in zip(rows, output.logits.tolist(), strict=True)]
            replies: Replies = []
            for i, row in zip(chosen, rows, strict=True):
                left.pop(numbers[i])
                replies += self._note(work, numbers[i], row)
            send(replies)

        self._inference.max_tokens = self._ceiling.num_tokens
        try:
            self._inference.run(samples, take)
        except RecoveryExhausted as failure:
            return str(failure)
        finally:
            self._ceiling.note(self._inference.max_tokens)
        return None

    def _samples(self, encoded: Sequence[Encoded]) -> Samples:
        return Samples(self.task, encoded, self._trained.tokenizing)

    def _note(self, work: Round, number: int, row: Row) -> Replies:
        """The answer to a request, once this row was its last."""
        key, place = work.owners[number]
        part = work.parts.get(key)
        if part is None:  # another of its texts has been refused
            return []
        part.rows.setdefault(place, []).append(row)
        part.num_left -= 1
        if part.num_left:
            return []
        del work.parts[key]
        return [(key, self._reply(part))]

    def _reply(self, part: Part) -> Reply:
        rows = [part.rows[place] for place in range(len(part.asked.references))]
        try:
            return Reply(200, part.asked.write(Answers(rows, part.num_tokens)))
        except (ValueError, ArithmeticError):
            return problem(500, "the model gives values that are no numbers", "look at its weights: vramfit doctor")


def open_engine(settings: ServeSettings, worker: int = 0) -> Engine:
    """The engine of one worker; where there is a budget, its largest batch has been run.

    Raises:
        NoPlanFits, RecoveryExhausted: the memory does not hold the weights and one text of full length.
        CheckpointError, UnknownModel, WorkloadError: as `load_model`.
    """
    engine = Engine(load_model(settings, worker))
    if engine.run_device.has_budget:
        engine.rehearse()
    return engine


def known_of(loaded: Loaded) -> Known:
    """What requests depend on of a model."""
    trained, model = loaded.trained, loaded.inference.model
    config: Any = model.config
    num_labels = config.num_labels if trained.kind.pools_sequences else 0
    names = trained.label_names or tuple(str(config.id2label[n]) for n in range(num_labels))
    head = pooling.head_of(model) if trained.kind.gives_vectors else None
    return Known(
        task=trained.task,
        max_length=trained.max_length,
        num_labels=num_labels,
        label_names=names if num_labels else (),
        problem_type=getattr(config, "problem_type", None),
        num_dims=0 if head is None else width_of(head, model),
        normalizes=head is not None and head.normalizes and head.dims is None,
        pooling=None if head is None else head.pooling,
        dtype=str(getattr(model, "dtype", torch.float32)).removeprefix("torch."),
    )


def _has_logits(work: Round, number: int) -> bool:
    """Whether a sample's request wants what the head gives as it is."""
    part = work.parts.get(work.owners[number][0])
    return part is not None and part.asked.has_logits


def _too_long(num_tokens: int, num_pieces: int) -> Reply:
    text = f"{num_tokens:,} tokens in {num_pieces:,} pieces are more than the {MAX_REQUEST_TOKENS:,} of one request"
    return problem(413, text, SEVERAL)


class Ceiling:
    """The tokens of a batch.

    >>> ceiling = Ceiling(800)
    >>> ceiling.note(200)
    >>> ceiling.num_tokens
    200
    """

    def __init__(self, planned: int) -> None:
        self.num_tokens = planned
        self._planned = planned
        self._num_clean = 0

    def note(self, num_tokens: int) -> None:
        """What a round ended with; less than it began with where memory ran out."""
        if num_tokens < self.num_tokens:
            self.num_tokens, self._num_clean = num_tokens, 0
            return
        self._num_clean += 1
        if self._num_clean >= CLEAN_RUNS and self.num_tokens < self._planned:
            self.num_tokens, self._num_clean = min(2 * self.num_tokens, self._planned), 0
