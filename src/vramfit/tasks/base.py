"""`Task`: all that vramfit asks of a task, in one class; a task's file overrides what is different about it.

The defaults are those of a task of transformers that takes one text a sample and is predicted only: to be trained and
served, a task says what it reads and what it answers. Importing a task imports no torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramfit.tasks.parts.reading import (
    Asked,
    BadValue,
    Columns,
    Encoded,
    LabelNames,
    Reference,
    Row,
    Tokenizing,
    encode_texts,
    text_in,
)

if TYPE_CHECKING:
    import torch

    from vramfit.tasks.embedding import HeadParts
    from vramfit.tasks.parts.losses import HeadLoss
    from vramfit.tasks.parts.results import RunningMetrics

    Batch = dict[str, torch.Tensor]

References = Sequence[Reference]
Rows = list[dict[str, Any]]
IGNORED = -100
"""The label of a token that no loss counts."""
PER_TOKEN = 2
"""Dimensions of a tensor that has a column for each token."""
SINGLE_TEXTS = [
    "text",
    "sentence",
    "content",
    "review",
    "utterance",
    "query",
    "question",
    "message",
    "comment",
    "tweet",
]
"""Names that data sets have for a column of texts."""
PRIVATE_KEYS = ("row", "id", "question_number")
"""Of a row of predictions, what a client of the server need not know."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Which samples a batch is made of, and what is known of them beside their tokens."""

    indices: Sequence[int]
    lengths: Sequence[int]
    """Tokens of each."""
    epoch: int
    labels: Any
    """A `TokenStore` of all samples' labels, as `encode` gave them."""
    are_labelled: bool
    how: Tokenizing
    """What the labels mean: names of classes, what the head learns."""


class Task:
    """One task. Subclasses set what is different; see `tasks/sequence_classification.py` for a whole one."""

    # What it is.
    name: str
    """As users write it."""
    title: str
    """As the page shows it."""
    rank: int = 100
    """Its place in lists; lower comes first."""
    auto_class: str
    """The auto class of transformers that knows which model of a family has this head."""
    has_head: bool = True
    """False for an encoder alone."""

    # What it allows.
    is_trained: bool = False
    """Whether vramfit reads data for it, trains, evaluates and predicts with it."""
    is_served: bool = False
    why_no_loss: str | None = None
    """Why it cannot be trained without a loss of the user's own; None where its labels are enough."""
    has_classes: bool = False
    """Whether the size of its head is the number of labels in the data."""
    shares_head_names: bool = False
    """Whether families call the weights of its head by names that other tasks' heads have too: no file says which of
    them it holds."""
    can_record: bool = False
    """Whether its loss leaves out labels that are ignored, as CUDA graphs need it: rows are filled up with them."""
    can_smooth: bool = False
    """Whether its loss can be smoothed."""
    pools_sequences: bool = False
    """Whether its head looks at one vector a sequence, so that packed rows are pooled before it."""
    pools_itself: bool = False
    """Whether its head pools the vectors of tokens, those of packed rows too."""
    ranks_candidates: bool = False
    """Whether it gives a score to a query beside a candidate."""
    losses: tuple[str, ...] = ()
    """Losses to choose from, the usual one first; none for a task whose labels say what its loss is."""
    joint_losses: tuple[str, ...] = ()
    """Those of them that look at all texts of a step at once: no pass has a loss of its own."""
    says: Mapping[str, Any] = {}
    """What the configuration of a model says that has learned it."""
    why_not_unpacked: str | None = None
    """Why packed outputs are not laid out again as padded ones, in evaluation and prediction; None where they are."""
    reads_padding: bool = False
    """Whether its loss runs over padding too, so that a batch's width is part of the training."""
    why_packed: str = ""
    """What packing changes about it, for the reasons of a plan."""
    has_problems: bool = False
    """Whether its head learns one of several things, which the labels decide: `tasks/parts/heads.py`."""
    max_scores: int | None = None
    """The most scores that are given of one text, word or mask; None for a task without scores to choose from."""
    answers: tuple[str, ...] = ()
    """What of a model's output a student of it learns from; none for a task that is not distilled."""
    answers_tokens: bool = False
    """Whether an answer has a row for each token; otherwise one for each sample."""
    gives_vectors: bool = False
    """Whether a text is answered with its vector, pooled from those of its tokens."""

    # Learning.
    labels: tuple[str, ...] = ("labels",)
    """Inputs that only its loss reads."""
    place_labels: tuple[str, ...] = ()
    """Those of them that are a token's place in its sequence."""
    counts_samples: bool = False
    """Whether every sample has one label, so that a mean over labels is one over samples."""

    def fewest_texts(self, loss: str) -> int:
        """Texts of a sample that go through the model one by one, where a workload does not say."""
        return 1

    def texts_problems(self, loss: str, num_texts: int) -> Iterator[str]:
        """Why a loss cannot take samples of so many texts."""
        yield from ()

    def learn_by(self, model: Any, how: Any) -> None:
        """Keep with a model how texts are compared (a `Contrast`), for a task with losses to choose from."""

    def recognises(self, config: Any) -> bool:
        """Whether a configuration was saved for this task, where its class alone does not say."""
        return False

    def finish_model(self, model: Any, parts: "HeadParts | None") -> None:
        """Give a model of transformers, on the meta device, what its task needs beside it.

        Args:
            parts: what its folder says of a head that pools; None where none does.

        Raises:
            CheckpointError: parts that do not go together.
        """

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> "Batch":
        """Labels of a batch without data."""
        return {}

    def meta_batch(self, mask: str, batch: int, seq: int, device: Any) -> "Batch":
        """Inputs of a batch without data, but for labels: ids, and a mask as a workload wants it."""
        import torch

        inputs = {"input_ids": torch.zeros(batch, seq, dtype=torch.long, device=device)}
        if mask != "none":
            inputs["attention_mask"] = torch.ones(batch, seq, dtype=torch.long, device=device)
            if mask == "padded" and seq > 1 and inputs["attention_mask"].device.type != "meta":
                inputs["attention_mask"][batch // 2 :, (seq + 1) // 2 :] = 0
        return inputs

    def loss(self, model: Any, batch: "Batch") -> "HeadLoss | None":
        """The loss that a batch's labels call for, where they are labels of this task."""
        return None

    @property
    def packed_output_hook(self) -> Callable[..., Any] | None:
        """A forward hook on a model that takes packed batches, for outputs that have a row for each sequence."""
        return None

    def numbers_per_sample(self, num_labels: int, seq: int, vocab_size: int) -> tuple[int, int]:
        """Logits and labels of a sample, as an evaluation that gathers both keeps them."""
        return vocab_size * seq, seq

    def num_labels(self, names: Sequence[str] = ()) -> int | None:
        """The size of its head, given the names of the classes; None leaves it to the configuration."""
        return len(names) or None if self.has_classes else None

    # Data.
    num_texts: tuple[int, int] = (1, 1)
    """The fewest and the most columns of text."""
    text_names: tuple[tuple[str, ...], ...] = tuple((name,) for name in SINGLE_TEXTS)
    """Names of columns that hold the texts, tried in order."""
    label_columns: tuple[str, ...] = ()
    """Names of columns that hold the label; none where texts are their own labels."""
    label_wanted: str = "the label"
    """What the column of labels holds, in words."""
    naming_texts: str = "name it: --text-column NAME"
    """How the columns of text are named on the command line."""
    files: str | None = None
    """What files it takes, for a task that not every table has columns for."""
    truth: str | None = None
    """The key of a reference that holds what is true of it; None where texts are their own labels."""
    takes_lists: bool = True
    """Whether a column of lists may hold its texts or labels."""
    reads_windows: bool = False
    """Whether texts that are too long are read in windows that overlap; otherwise they are cut."""
    reads_conll: bool = False
    """Whether files of one token and its tag a line are for it."""
    guesses_header: bool = False
    """Whether two columns without a header can be told apart by their values."""
    reads_blank_lines: bool = True
    """Whether a blank line of a text file is a row, and a bad one."""

    learns_numbers: bool = False
    """Whether what `encode` gives as labels are numbers, and not classes."""

    @property
    def reads_labels(self) -> bool:
        """Whether labels are a column of their own."""
        return self.truth is not None

    def columns_wanted(self, *, labels: bool) -> str:
        """What columns of text hold, in words; `labels`: where those are looked for too."""
        return "the text"

    def choose_columns(self, asked: Asked) -> Columns | None:
        """The columns to read; None leaves that to the names above.

        Raises:
            DataError: columns that do not go with what is asked for.
        """
        return None

    def read_row(self, row: Row, columns: Columns, labels: LabelNames) -> Reference:
        """What a sample needs of a row; by default `texts`, one of them.

        Raises:
            BadValue: it cannot be used; says why.
        """
        return {"texts": (text_in(row, columns.texts[0]),)}

    def read_labels(self, references: References, columns: Columns, labels: LabelNames) -> Mapping[int, BadValue]:
        """Read what is true of rows, in place, where only all of them together tell what that is.

        Args:
            references: as `read_row` gave them; those with labels.
            labels: is told what was decided.

        Returns:
            Number of a reference → what is wrong with it.
        """
        return {}

    def class_names(self, labels: LabelNames, references: References) -> tuple[str, ...]:
        """Names of the classes; none for a task that has no classes."""
        return ()

    def check_labels(self, file: str, labels: LabelNames, num_rows: int, *, has_others: bool) -> None:
        """Refuse labels of another kind.

        Args:
            has_others: whether there are other columns to name.

        Raises:
            DataError: what they are, and what to do.
        """

    def unusable(self, references: References) -> dict[int, str]:
        """Number of a reference → why it cannot be used beside the others."""
        return {}

    def nothing_to_learn(self, references: References) -> str | None:
        """Why training data teaches nothing though each of its rows could; None where it can be learned from."""
        return None

    def data_settings(self, references: References, loss: str | None) -> dict[str, Any]:
        """Settings of a workload that follow from the data.

        Args:
            references: of samples, as `encode` gave them.
            loss: the one that was chosen.
        """
        return {}

    def notes(self, labels: LabelNames, names: Sequence[str], num_rows: int) -> tuple[str, ...]:
        """What to know of the labels that were read."""
        return labels.notes

    def encode(self, references: References, how: Tokenizing) -> Iterable[Encoded]:
        """References to tokens and labels, in their order."""
        return encode_texts(references, how)

    def hiding(self, tokenizer: Any, seed: int, probability: float) -> Any:
        """How tokens are hidden to learn from; None where they are not."""
        return None

    def batch_labels(self, batch: "Batch", rows: BatchRows, hiding: Any) -> "Batch":
        """What a padded batch has beside or instead of its tokens to learn from.

        Args:
            hiding: what `hiding` gave.
        """
        return {}

    def text_ids(self, references: References) -> Sequence[int]:
        """A number for each text that those share that are never each other's negatives; of a task with samples of
        several texts."""
        return ()

    # Answers.
    def metrics(self, how: Tokenizing, references: References) -> "RunningMetrics":
        """The metrics of some samples, at the start.

        Args:
            how: the names of the classes, and thresholds that were chosen before.
        """
        raise NotImplementedError(f"{self.name} has no metrics")

    def predictions(self, output: Any, batch: "Batch", references: References, how: Tokenizing) -> Rows:
        """A row for each sample of a batch, in its order; each names the `row` and the `index` of its reference.

        Where a reference has a `top_k`, as many of the best labels or tokens with their probabilities, as `scores`.
        Scores have six significant digits.

        Args:
            output: with logits, on any device.
            batch: its inputs.
            references: of its samples.
            how: the names of the classes, and the tokenizer that gives tokens their text.
        """
        raise NotImplementedError(f"{self.name} makes no predictions")

    def merged(self, rows: Iterable[dict[str, Any]]) -> Rows:
        """Rows of windows, as one row for each text."""
        return list(rows)

    # Serving.
    request_forms: tuple[str, ...] = ('"a text"',)
    """What one input looks like, as JSON."""
    request_fields: tuple[tuple[str, ...], ...] = (("text",),)
    """Fields of an input that is an object, tried in order."""
    takes_bare_text: bool = True
    """Whether an input may be a text by itself."""
    answers_every_word: bool = False
    """Whether all of a text is read; otherwise it is cut where the model's length ends."""

    def cut_request(self, reference: Reference, cut: Callable[[str], str]) -> Reference:
        """A request's reference without what lies beyond what is read of it."""
        return {**reference, "texts": tuple(map(cut, reference["texts"]))}

    def encode_requests(self, references: References, how: Tokenizing) -> Iterator[Encoded]:
        """References of requests to tokens, in any order; their `row` tells them apart."""
        for num_texts in (1, 2):
            yield from encode_texts([r for r in references if len(r["texts"]) == num_texts], how)

    def reply(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What is said of one input, given its rows, one for each window."""
        return {name: value for name, value in self.merged(rows)[0].items() if name not in PRIVATE_KEYS}

    # Names and words.
    @property
    def class_ending(self) -> str:
        """How the class of its head is called, after the name of its family."""
        return self.auto_class.removeprefix("AutoModel")

    @property
    def long_texts(self) -> str:
        """What becomes of texts that are too long."""
        return "read in overlapping windows" if self.reads_windows else "cut"


def zeros(device: Any, *shape: int) -> "torch.Tensor":
    """Labels without data."""
    import torch

    return torch.zeros(*shape, dtype=torch.long, device=device)
