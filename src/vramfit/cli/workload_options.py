"""Options of the command line made of settings, for every verb that describes a workload or a run.

A verb is a function whose first parameter is a `WorkloadOptions`; `takes_workload` makes of it the function that typer
reads, with one parameter for each setting. What a value may be is the setting's to say: here text becomes values, and
an option that is not given is not passed on.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import is_path, look_at_gpu, look_at_model
from vramfit.errors import WorkloadError
from vramfit.settings import SETTINGS, Setting
from vramfit.settings.values import MAX_COUNT, Choice, Switch
from vramfit.tasks import DEFAULT, find_task
from vramfit.workload import Workload

if TYPE_CHECKING:
    from vramfit.planner.lengths import Lengths

MAX_CELLS = 64
"""Batches times lengths of one table."""
PANELS = {"job": "The job", "how": "How it is done", "machine": "The machine"}
LISTS = ("batch", "seq")
"""Settings of which several values give a table."""
_TRUST = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Let the model's repository run its own Python code here.",
        rich_help_panel=PANELS["machine"],
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What was given on the command line."""

    model: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were given, as text or as typer read them; a list of batches or lengths is text."""
    trust_remote_code: bool = False

    def keywords(self, *, trains: bool = True) -> dict[str, Any]:
        """Keywords of the one workload that was described; a list of batches or lengths is refused.

        Args:
            trains: whether the verb trains where no mode is given.
        """
        cells = self.cells()
        if len(cells) > 1:
            raise typer.BadParameter("this verb takes one batch and one length, not a list")
        self._look(trains=trains)
        return cells[0]

    def cells(self) -> list[dict[str, Any]]:
        """Keywords of every workload of the table: length by length, batch by batch."""
        shared = {name: value_of(name, given) for name, given in self.given.items() if name not in LISTS}
        if self.trust_remote_code:
            shared["trust_remote_code"] = True
        batches = [{"batch": n} for n in parse_counts(self.given.get("batch"), "--batch")] or [{}]
        seqs = [{"seq": n} for n in parse_counts(self.given.get("seq"), "--seq")] or [{}]
        num_cells = len(batches) * len(seqs)
        if num_cells > MAX_CELLS:
            raise typer.BadParameter(
                f"--batch and --seq make a table of {num_cells:,} cells; at most {MAX_CELLS} are predicted at once"
            )
        return [{**shared, **seq, **batch} for seq in seqs for batch in batches]

    def check(self) -> None:
        """Raise for what is wrong in itself, before anything heavy is loaded."""
        for keywords in self.cells():
            Workload.from_keywords(model=self.model, **{k: v for k, v in keywords.items() if k != "trust_remote_code"})
        self._look()

    def _look(self, *, trains: bool = True) -> None:
        """Raise for names and lengths that nothing has and a task without a loss, which torch is not needed to tell."""
        mode = self.given.get("mode")
        why_no_loss = find_task(self.given.get("task", DEFAULT)).why_no_loss
        if why_no_loss and (mode == "train" or (mode is None and trains)):
            raise WorkloadError([why_no_loss])
        look_at_gpu(self.given.get("gpu"))
        if self.model:
            look_at_model(self.model, parse_counts(self.given.get("seq"), "--seq"))


def value_of(keyword: str, given: Any) -> Any:
    """The value of a setting that was given; lengths may be in a file."""
    if keyword == "lengths":
        return parse_lengths(given).values
    return SETTINGS[keyword].value.parse(given) if isinstance(given, str) else given


def takes_workload(
    *, without: Sequence[str] = (), plans: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a verb of a function `(options: WorkloadOptions, **own)`.

    Args:
        without: settings that the verb does not take.
        plans: whether what is not given is chosen: switches can then be refused too (`--no-compile`).
    """

    def make(verb: Callable[..., None]) -> Callable[..., None]:
        shared = {s.keyword: s for s in SETTINGS.values() if s.keyword not in without}
        model = shared.pop("model", None)
        parameters = [] if model is None else [_argument(model)]
        parameters += parameters_of(shared.values(), lists=LISTS, plans=plans)
        if "trust_remote_code" not in without:
            parameters.append(_parameter("trust_remote_code", _TRUST, False))
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in list(inspect.signature(verb).parameters.values())[1:]]

        @wraps(verb)
        def run(**values: Any) -> None:
            name = values["model"] or "" if model is None else values.pop("model")
            given = given_of(shared.values(), values)
            verb(
                WorkloadOptions(model=name, given=given, trust_remote_code=values.pop("trust_remote_code", False)),
                **values,
            )

        run.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*parameters, *own)}
        return run

    return make


def _argument(setting: Setting) -> inspect.Parameter:
    return _parameter("model", Annotated[str, typer.Argument(metavar="MODEL", help=setting.help)], ...)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=empty if default is ... else default
    )


def given_of(settings: Iterable[Setting], values: dict[str, Any]) -> dict[str, Any]:
    """Take what was given for settings out of the values of a verb's parameters."""
    given = {}
    for setting in settings:
        is_negative = isinstance(setting.value, Switch) and setting.default is True
        value = values.pop(f"no_{setting.keyword}" if is_negative else setting.keyword)
        if is_negative and value:
            given[setting.keyword] = False
        elif not is_negative and value is not None:
            given[setting.keyword] = value
    return given


def parameters_of(
    settings: Iterable[Setting],
    *,
    lists: Sequence[str] = (),
    plans: bool = False,
    panels: Mapping[str, str] = PANELS,
    defaults: Mapping[str, str] | None = None,
) -> list[inspect.Parameter]:
    """One parameter a setting, for typer; None stands for what was not given.

    Args:
        lists: settings that are read as text, of which several values may be given.
        plans: whether what is not given is chosen: a switch can then be turned off too.
        panels: group of settings → heading in the help.
        defaults: what help says of settings that are not as they are by themselves.
    """
    made = []
    for setting in settings:
        name, kind = setting.keyword, str if setting.keyword in lists else setting.value.option_type
        option = f"--{(setting.option or name).replace('_', '-')}"
        if kind is bool and setting.default is True:
            option, name = f"--no-{option[2:]}", f"no_{name}"
        elif kind is bool and plans and setting.is_planned:
            option = f"{option}/--no-{option[2:]}"
        help = _help(
            setting, is_list=setting.keyword in lists, plans=plans, default=(defaults or {}).get(setting.keyword)
        )
        metavar = {bool: None, str: "N,…" if setting.keyword in lists else setting.value.metavar}
        shown = metavar.get(kind, setting.value.metavar)
        annotated = typer.Option(
            option, help=help, metavar=shown, rich_help_panel=panels[setting.group], show_default=False
        )
        made.append(_parameter(name, Annotated[kind | None, annotated], None))
    return made


def _help(setting: Setting, *, is_list: bool, plans: bool, default: str | None) -> str:
    """What it is, its values and its default."""
    said = [setting.help.replace("`", "")]
    if is_list:
        said.append("Several (1,4,8) give a table.")
    if isinstance(setting.value, Choice):
        said.append(f"One of {', '.join(setting.value.names)}.")
    if default is None and setting.default not in (None, True, False, ()):
        default = "planned" if plans and setting.is_planned else str(setting.default)
    return " ".join([*said, *([f"Default: {default}."] if default else [])])


def parse_counts(text: str | None, option: str, *, unique: bool = True) -> list[int]:
    """Whole numbers from `1,4,8`; a usage error names the one that is none."""
    if text is None:
        return []
    counts = []
    for part in text.split(","):
        digits = part.strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and 1 <= int(digits) <= MAX_COUNT):
            raise typer.BadParameter(
                f"{option} {text[:60]!r}: {digits[:20]!r} is not a whole number from 1 to {MAX_COUNT:,}"
            )
        counts.append(int(digits))
    return sorted(set(counts)) if unique else counts


def parse_lengths(text: str) -> "Lengths":
    """Tokens of each sample, from numbers or from a file of them.

    Raises:
        VramfitError: a file with something else in it.
    """
    from vramfit.planner.lengths import lengths_of

    if not text.replace(",", "").replace(" ", "").isdecimal():
        if is_path(text):
            return lengths_of(text)
        raise typer.BadParameter(
            f"--lengths {text[:60]!r} is neither a file that is there nor whole numbers (12,80,512)"
        )
    return lengths_of(parse_counts(text, "--lengths", unique=False))


def parse_names(text: str | None) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
