"""`vramfit trim`: a model with the tokens that a corpus uses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vramfit.cli.first_look import look_at_file, look_at_model
from vramfit.cli.options import Json, Trust, argument, opt, option, parse_names, verb
from vramfit.cli.terminal import console, print_json, say, table, working
from vramfit.units import format_bytes

Model = Annotated[str, argument("A folder that transformers, sentence-transformers or vramfit saved.", "MODEL")]
Output = Annotated[str, option("Write the new folder here.", "DIR", "--output", "-o")]


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """A model, where a smaller one goes, and the rows that it is measured on."""

    model: Model
    output: Output
    data: Annotated[list[str] | None, option("Texts: CSV, TSV, JSON lines or plain text. May be repeated.", "FILE")] = (
        None
    )
    task: Annotated[str | None, option("Task (head) to use. Default: the model's own.", "NAME")] = None
    text_column: str | None = opt(None, "Column of the texts; two for pairs.", "NAME,…")
    max_rows: int | None = opt(None, "Read at most N rows of each file.", "N", min=1)
    trust_remote_code: Trust = False

    def look(self, *, needs_data: bool = True) -> None:
        """Refuse names and places that cannot be, before torch is imported."""
        from vramfit.smaller.folder import check_output

        if needs_data and not self.data:
            raise typer.BadParameter("give rows: --data FILE")
        look_at_model(self.model)
        check_output(Path(self.output))
        for file in self.data or ():
            look_at_file(file)

    @property
    def taken(self) -> dict[str, Any]:
        """Fields of every request that has a source."""
        from vramfit.smaller.source import Source

        source = Source(model=self.model, task=self.task, trust_remote_code=self.trust_remote_code)
        return {
            "source": source,
            "output": Path(self.output),
            "data": tuple(self.data or ()),
            "text_columns": parse_names(self.text_column),
            "max_rows": self.max_rows,
        }


@verb("vramfit trim xlm-roberta --data reviews.csv --output xlm-roberta-reviews")
def trim(options: SourceOptions, json: Json = False) -> None:
    """Remove the tokens that a corpus does not use: a smaller embedding, and the same answers on the corpus.

    Special tokens, bytes and characters are kept, so other texts still work, with more tokens than before.
    WordPiece, BPE and Unigram tokenizers are trimmed; every row of the corpus is compared, token by token.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 130 when interrupted.
    """
    options.look()
    with working("Trimming"):
        from vramfit.smaller.source import Reduction
        from vramfit.smaller.trim import trim as run

        report = run(Reduction(**options.taken))
    if json:
        print_json(report)
        return
    show_sizes({"before": report.before, "after": report.after})
    say(
        f"{report.num_rows:,} rows have the same tokens as before; answers differ by at most "
        f"{report.max_difference:.1g} on {report.num_compared:,} of them. In {report.output}",
        stderr=False,
    )


def show_sizes(models: dict[str, Any]) -> None:
    """Sizes side by side, a row for each model."""
    columns = ("", "tokens", "parameters", "in layers", "files", "serving", "training")
    shown = table(*columns, right=columns[1:])
    for name, sizes in models.items():
        memory = [sizes.serving_bytes, sizes.training_bytes]
        shown.add_row(
            name,
            f"{sizes.vocabulary:,}",
            f"{sizes.num_parameters:,}",
            f"{sizes.encoder_parameters:,}",
            format_bytes(sizes.file_bytes) if sizes.file_bytes else "–",
            *("–" if found is None else format_bytes(found) for found in memory),
        )
    console().print(shown)
    one = next(iter(models.values()))
    say(f"Memory is predicted for a GPU: {one.batch} × {one.seq} tokens in fp32, AdamW in training.", stderr=False)
