"""How long the samples of a data set are, read as `vramfit train` reads them."""

from vramfit.errors import CheckpointError, VramfitError
from vramfit.models.tokenizers import load_tokenizer
from vramfit.planner.request import Lengths
from vramfit.runtime.data.samples import read_samples
from vramfit.runtime.data.source import without_labels

MAX_ROWS = 200_000
"""Rows whose tokens are counted; beyond them, a sample as long as the model allows is expected."""
WHOLE = 2**20
"""Tokens of a text at most: it is counted before it is cut. Questions are read in windows as they are trained."""
LONGEST = 512
"""Tokens of a sequence where neither the model nor the request says."""
STRIDE = 128
"""Tokens that two windows of a long context share, in question answering."""


def lengths_of_data(
    path: str, *, task: str, tokenizer: str, max_length: int, text_columns: tuple[str, ...] = ()
) -> Lengths:
    """Tokens of each sample, special ones included; rows that cannot be used are left out.

    Args:
        path: what `DataSource` takes.
        task: of the model.
        tokenizer: a folder with a tokenizer, or a hub id.
        max_length: of a window, where questions are asked.
        text_columns: guessed from their names where empty.

    Raises:
        VramfitError: a file, a column or a tokenizer that is not there, or cannot be read.
    """
    source = without_labels(path, task, text_columns, MAX_ROWS + 1)
    try:
        counter = load_tokenizer(tokenizer)
    except CheckpointError as error:
        raise VramfitError(str(error), hint="name the folder that holds tokenizer.json (--tokenizer)") from None
    limit = max_length if source.task == "question-answering" else WHOLE
    samples = read_samples(source, counter, max_length=limit, stride=min(STRIDE, limit // 4))
    found = tuple(max(n, 1) for n in samples.lengths)
    is_whole = len(found) <= MAX_ROWS
    first = "" if is_whole else f"the first {MAX_ROWS:,} rows of "
    return Lengths(values=found[:MAX_ROWS], source=f"{first}{source.name}", complete=is_whole)
