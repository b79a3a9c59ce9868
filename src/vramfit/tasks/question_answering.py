"""Question answering: the words of a context that answer a question; a long context is read in windows."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vramfit.tasks.base import BatchRows, References, Rows, Task, zeros
from vramfit.tasks.parts.reading import (
    BadValue,
    Columns,
    Encoded,
    LabelNames,
    Reference,
    Row,
    Tokenizing,
    chunks,
    text_in,
    tokenize,
)
from vramfit.tasks.parts.results import AnswerMetrics, place_of, read_answers, rounded
from vramfit.units import shown

MIN_STEP = 8
"""A window of a context moves by at least this part of the length (one eighth), however long the question is."""
PLACES = ("start_positions", "end_positions")
LOGITS = ("start_logits", "end_logits")


class QuestionAnswering(Task):
    """See the module."""

    name = "question-answering"
    title = "Question answering"
    rank = 30
    auto_class = "AutoModelForQuestionAnswering"
    is_trained = is_served = True
    shares_head_names = True
    reads_padding = True
    why_packed = "an answer is sought among a text's own tokens, and no more among its padding"
    labels = place_labels = PLACES
    answers = LOGITS
    answers_tokens = True
    num_texts = (2, 2)
    text_names = (("question", "context"),)
    label_columns = ("answers", "answer", "answer_text")
    label_wanted = "the answers"
    naming_texts = "name them: --text-column QUESTION,CONTEXT"
    files = "question-answering takes a .json file as SQuAD has it, or JSON lines with question, context and answers"
    truth = "answers"
    reads_windows = True
    request_forms = ('{"question": "…", "context": "…"}',)
    request_fields = (("question", "context"),)
    takes_bare_text = False
    answers_every_word = True

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        return dict.fromkeys(PLACES, zeros(device, batch))

    def loss(self, model: Any, batch: Any) -> Any:
        """Half of the start's loss and half of the end's, each over the positions that are not ignored.

        Positions beyond the text are ignored: clamped to its length, which is then the ignored class.
        """
        from vramfit.tasks.parts.losses import HeadLoss, cross_entropy, logits_of

        def sums(output: Any, batch: Any) -> list[Any]:
            found = [logits_of(output, name) for name in LOGITS]
            length = found[0].shape[1]
            pairs = zip(found, PLACES, strict=True)
            return [cross_entropy(logits, batch[name].clamp(0, length), ignored=length) / 2 for logits, name in pairs]

        def counts(batch: Any) -> list[int]:
            length = batch["input_ids"].shape[1]
            if batch["input_ids"].device.type == "meta":
                return [batch[name].numel() for name in PLACES]
            return [int((batch[name].clamp(0, length) != length).sum()) for name in PLACES]

        return HeadLoss(sums, counts) if PLACES[0] in batch else None

    @property
    def packed_output_hook(self) -> Callable[..., Any]:
        return _answers_apart

    def numbers_per_sample(self, num_labels: int, seq: int, vocab_size: int) -> tuple[int, int]:
        return 2 * seq, 2

    def columns_wanted(self, *, labels: bool) -> str:
        return "question, context and answers" if labels else "question and context"

    def read_row(self, row: Row, columns: Columns, labels: LabelNames) -> Reference:
        """`id`, `question`, `context`; `answers`: texts, none for a question without an answer, or None; `answer_at`:
        where the first one begins and ends in the context, or None."""
        question, context = (text_in(row, column) for column in columns.texts)
        known: Reference = {"id": row.fields.get("id", row.number), "question": question, "context": context}
        if columns.label is None:
            return known | {"answers": None, "answer_at": None}
        answers = _answers(row.fields.get(columns.label), row.fields.get("answer_start"), columns.label)
        where = _locate(*answers[0], context) if answers else None
        return known | {"answers": [text for text, _ in answers], "answer_at": where}

    def encode(self, references: References, how: Tokenizing) -> Iterator[Encoded]:
        """Questions with their contexts; a long context comes in windows that overlap by `how.stride` tokens.

        Adds to each window's reference `question_number`; `context_at`: the place of its first token of the context;
        `offsets`: first and last character of each of these, end to end; `cls`: the token that means no answer.
        """
        tokenizer, max_length = how.tokenizer, how.max_length
        overlap = min(how.stride, max_length // 2)
        room = max_length - int(tokenizer.num_special_tokens_to_add(pair=True)) - overlap
        longest_question = max(room - max(max_length // MIN_STEP, 1), 1)
        overlap = max(min(overlap, room + overlap - longest_question - 1), 0)
        number = 0
        for chunk in chunks(references):
            questions = _shortened([r["question"] for r in chunk], tokenizer, longest_question)
            texts = [(question, r["context"]) for question, r in zip(questions, chunk, strict=True)]
            made = tokenize(
                tokenizer,
                texts,
                truncation="only_second",
                max_length=max_length,
                stride=overlap,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            owners = made["overflow_to_sample_mapping"]
            parts = [_context_part(made.sequence_ids(i)) for i in range(len(owners))]
            full = _full_lengths(made, owners, parts, overlap)
            for i, owner in enumerate(owners):
                yield _window(chunk[owner], number + owner, made, i, parts[i], full[owner], tokenizer)
            number += len(chunk)

    def batch_labels(self, batch: Any, rows: BatchRows, hiding: Any) -> Any:
        if not rows.are_labelled:
            return {}
        return {name: rows.labels.column(rows.indices, place) for place, name in enumerate(PLACES)}

    def metrics(self, how: Tokenizing, references: References) -> AnswerMetrics:
        return AnswerMetrics()

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`answer` with its characters and score, a row for each window (see `merged`)."""
        return [
            place_of(reference)
            | {
                "id": reference["id"],
                "question_number": reference["question_number"],
                "answer": answer.text,
                "start": answer.begin,
                "end": answer.end,
                "score": answer.score,
                "no_answer_score": answer.no_answer_score,
            }
            for answer, reference in zip(read_answers(output, references), references, strict=True)
        ]

    def merged(self, rows: Iterable[dict[str, Any]]) -> Rows:
        """One row a question, in the order of the questions: of the windows of a context, the best answer stays."""
        merged: dict[int, dict[str, Any]] = {}
        for row in rows:
            number = row["question_number"]
            known = merged.get(number, row)
            silence = min(known["no_answer_score"], row["no_answer_score"])
            best = row if (row["score"], -row["start"]) > (known["score"], -known["start"]) else known
            merged[number] = best | {"no_answer_score": silence}
        names = ("score", "no_answer_score")
        return [merged[number] | {name: rounded(merged[number][name]) for name in names} for number in sorted(merged)]

    def cut_request(self, reference: Reference, cut: Callable[[str], str]) -> Reference:
        return {**reference, "question": cut(reference["question"])}

    def encode_requests(self, references: References, how: Tokenizing) -> Iterator[Encoded]:
        return self.encode(references, how)


def _answers(value: Any, start: Any, column: str) -> list[tuple[str, int | None]]:
    """Texts and places, from any of the forms that answers come in."""
    if value is None:
        raise BadValue(f"no {column}")
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        texts = [texts] if isinstance(texts, str) else texts
        texts = texts if isinstance(texts, list) else [None]
        starts = starts if isinstance(starts, list) and len(starts) == len(texts) else [starts] * len(texts)
        pairs = list(zip(texts, starts, strict=True))
    else:
        entries = [{"text": value, "answer_start": start}] if isinstance(value, str) else value
        entries = entries if isinstance(entries, list) else [entries]
        entries = [e if isinstance(e, dict) else {"text": e} for e in entries]
        pairs = [(e.get("text"), e.get("answer_start")) for e in entries]
    if any(not isinstance(text, str) or not text.strip() for text, _ in pairs):
        raise BadValue(f"{column} has an answer without a text")
    return [(text, _place(begin)) for text, begin in pairs]


def _place(begin: Any) -> int | None:
    text = str(begin).strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _locate(answer: str, begin: int | None, context: str) -> tuple[int, int]:
    """Where an answer is: at its place, or else where it occurs nearest to it."""
    if begin is None or not context.startswith(answer, begin):
        wanted = begin or 0
        before, after = context.rfind(answer, 0, wanted + len(answer)), context.find(answer, wanted)
        found = [place for place in (before, after) if place >= 0]
        if not found:
            raise BadValue(f"the answer {shown(answer)} is not in its context")
        begin = min(found, key=lambda place: abs(place - wanted))
    return begin, begin + len(answer)


def _shortened(questions: list[str], tokenizer: Any, most: int) -> list[str]:
    """Questions cut to a number of tokens, so that some of the context is always in sight."""
    made = tokenizer(questions, add_special_tokens=False, verbose=False)
    long = [len(ids) > most for ids in made["input_ids"]]
    return [_shorten(q, tokenizer, most) if cut else q for q, cut in zip(questions, long, strict=True)]


def _shorten(question: str, tokenizer: Any, most: int) -> str:
    """Cut inside a word, what is left may split into more tokens than before: then a little more is cut."""
    for limit in range(most, 0, -1):
        made = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if len(made["input_ids"]) <= most:
            break
        question = question[: made["offset_mapping"][limit - 1][1]]
    return question


def _context_part(sequence: list[int | None]) -> tuple[int, int]:
    """First token of the context, and the one after its last."""
    if 1 not in sequence:
        return 0, 0
    begin = sequence.index(1)
    return begin, begin + sequence.count(1)


def _full_lengths(made: Any, owners: list[int], parts: list[tuple[int, int]], overlap: int) -> list[int]:
    """Tokens that each question takes with its whole context."""
    full: dict[int, int] = {}
    for ids, owner, (begin, end) in zip(made["input_ids"], owners, parts, strict=True):
        full[owner] = full[owner] + end - begin - overlap if owner in full else len(ids)
    return [full[owner] for owner in range(len(full))]


def _window(
    reference: Reference, number: int, made: Any, i: int, part: tuple[int, int], full: int, tokenizer: Any
) -> Encoded:
    ids, offsets = made["input_ids"][i], made["offset_mapping"][i][slice(*part)]
    cls = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
    flat = array("i", (place for span in offsets for place in span))
    known = reference | {"question_number": number, "context_at": part[0], "offsets": flat, "cls": cls}
    labels: list[int] = []
    if reference["answers"] is not None:
        labels = _answer_tokens(reference["answer_at"], offsets, part[0]) or [cls, cls]
    return Encoded(known, ids, made["token_type_ids"][i], labels, full)


def _answer_tokens(where: tuple[int, int] | None, offsets: list[tuple[int, int]], begin: int) -> list[int] | None:
    """First and last token of an answer; None where the window does not hold all of it."""
    if where is None or not offsets or where[0] < offsets[0][0] or where[1] > offsets[-1][1]:
        return None
    starts = [start for start, _ in offsets]
    first = max(bisect_right(starts, where[0]) - 1, 0)
    last = max(bisect_right(starts, where[1] - 1) - 1, first)
    return [begin + first, begin + last]


def _answers_apart(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Logits of starts and ends as a row for each sequence; places beyond its end cannot be chosen."""
    import torch

    longest = kwargs.get("max_length_q")
    if kwargs.get("cu_seq_lens_q") is None or longest is None:
        return output
    ends = kwargs["cu_seq_lens_q"].long()
    places = torch.arange(longest, device=ends.device)
    inside = places < ends.diff()[:, None]
    for name in LOGITS:
        logits = output[name]
        rows = logits.new_full((len(ends) - 1, longest), torch.finfo(logits.dtype).min)
        setattr(output, name, rows.masked_scatter(inside, logits[0]))
    return output


TASK = QuestionAnswering()
