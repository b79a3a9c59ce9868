"""`vramfit receipts`: what others measured, beside what was predicted for them."""

from pathlib import Path
from typing import Annotated

from vramfit.cli.options import Json, argument, option, verb
from vramfit.cli.terminal import leave, print_json, say, show, working
from vramfit.errors import VramfitError
from vramfit.records.receipt import Receipt, read_receipt
from vramfit.report.receipts import render_receipts
from vramfit.units import counted

REFUSED = 1
MAX_FILES = 10_000


@verb("vramfit receipts receipts")
def receipts(
    folder: Annotated[Path, argument("A folder of receipts, or one receipt.", "FOLDER")],
    repeat: Annotated[
        bool,
        option("Predict every job again, and refuse a receipt that this version would not write.", None, "--repeat"),
    ] = False,
    json: Json = False,
) -> None:
    """Show receipts of `measure` and `train` as a table: predicted beside measured, by card.

    A receipt that is damaged, was changed or says what cannot be is refused with the reason.
    A digest shows damage; it is no signature.
    Exit codes: 0 when all are good, 1 when one is refused or there is none, 2 for a wrong name or value.
    """
    good, refused = read_folder(folder)
    if repeat:
        refused |= {name: why for name, why in _repeated(good).items() if why}
    kept = [receipt for name, receipt in good.items() if name not in refused]
    for name, why in refused.items():
        say(f"Refused {name}: {why}.", style="red")
    if json:
        print_json({"receipts": kept, "refused": refused})
    elif kept:
        show(kept, render_receipts, json=False)
    if refused:
        leave(REFUSED)


def read_folder(folder: Path) -> tuple[dict[str, Receipt], dict[str, str]]:
    """File name → receipt, and file name → why it is refused.

    Raises:
        VramfitError: no such folder, or nothing in it.
    """
    if not folder.exists():
        raise VramfitError(f"no such folder: {folder}", hint="vramfit measure … --receipt FILE writes a receipt")
    paths = sorted(folder.glob("*.json"))[:MAX_FILES] if folder.is_dir() else [folder]
    if not paths:
        raise VramfitError(
            f"{folder} has no receipts: no file in it ends with .json",
            hint="vramfit measure … --receipt FILE writes one",
        )
    good: dict[str, Receipt] = {}
    refused: dict[str, str] = {}
    for path in paths:
        try:
            good[path.name] = read_receipt(path)
        except VramfitError as error:
            refused[path.name] = str(error)
    return good, refused


def _repeated(good: dict[str, Receipt]) -> dict[str, str]:
    """File name → why a receipt cannot be what it says; empty for a good one, whose prediction is said."""
    found: dict[str, str] = {}
    with working(f"Predicting {counted(len(good), 'job')} again"):
        from vramfit.runtime.receipts import card_problems, repeat_prediction

        for name, receipt in good.items():
            words, is_possible = repeat_prediction(receipt)
            problems = [] if receipt.is_emulated else list(card_problems(receipt))
            found[name] = "; ".join([*problems, *([] if is_possible else [words])])
            say(f"{name}: {words}")
    return found
