"""Options of verbs: from settings, and from records whose fields are options.

`verb` turns a function into what typer reads. A parameter that is a `WorkloadOptions` becomes one option for each
setting, one that is another dataclass becomes one option for each field; all others stay as they are. A setting says
itself what its values are and whether help shows it: here text becomes values, and an option that is not given is not
passed on.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import is_path, look_at_gpu, look_at_model
from vramfit.errors import WorkloadError
from vramfit.settings import SETTINGS, Setting
from vramfit.settings.machine import Loop
from vramfit.settings.values import MAX_COUNT, Choice, Switch
from vramfit.tasks import DEFAULT, find_task
from vramfit.workload import Workload

if TYPE_CHECKING:
    from vramfit.planner.request import Lengths

MAX_CELLS = 64
"""Batches times lengths of one table."""
PREDICTED = {"max_grad_norm": "not clipped", "mask": "padded or ones, whichever takes more memory"}
"""What help says of a prediction's settings where nothing is given."""
PANELS = {"job": "The job", "how": "How it is done", "machine": "The machine"}
LISTS = ("batch", "seq")
"""Settings of which several values give a table."""
Verb = Callable[..., None]


def option(help: str, metavar: str | None = None, *names: str, panel: str | None = None, **more: Any) -> Any:
    """One option of a verb; its name is that of the parameter unless `names` are given."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


def opt(default: Any, help: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    """A field of a record of options; a switch without names is `--name`, without a negative."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "names": names, "more": more})


def argument(help: str, metavar: str) -> Any:
    """One positional argument of a verb."""
    return typer.Argument(help=help, metavar=metavar)


Json = Annotated[bool, option("Print JSON on stdout and nothing else there.", None, "--json")]
ALL_HELP = "vramfit.help_all"
"""Key of a context whose help shows every option."""


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[ALL_HELP] = True
        typer.echo(context.get_help(), color=context.color)
        raise typer.Exit


HELP_ALL = "Show all options and exit; --help shows the most used ones."
HelpAll = Annotated[bool, option(HELP_ALL, None, "--help-all", is_eager=True, callback=_show_all)]
ReceiptFile = Annotated[
    Path | None,
    option("Write a receipt: what was predicted and measured, nothing private (see vramfit receipts).", "FILE"),
]
TRUST = "Run Python code from the model's repository."
Trust = Annotated[bool, option(TRUST, None, "--trust-remote-code")]


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Settings that were given on the command line."""

    model: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were given, as text or as typer read them; a list of batches or lengths is text."""
    trust_remote_code: bool = False
    has_loop: bool = False
    """Whether the verb takes a loop, which then follows from the other settings where it is not given."""

    def keywords(self, *, trains: bool = True) -> dict[str, Any]:
        """Keywords of the one workload that was described; a list of batches or lengths is refused.

        Args:
            trains: whether the verb trains where no mode is given.
        """
        cells = self.cells()
        if len(cells) > 1:
            raise typer.BadParameter("this command takes one batch and one length, not a list")
        self._look(trains=trains)
        return cells[0]

    def cells(self) -> list[dict[str, Any]]:
        """Keywords of every workload of the table: length by length, batch by batch."""
        shared = {name: value_of(name, given) for name, given in self.given.items() if name not in LISTS}
        shared |= Loop().derived(shared) if self.has_loop else {}
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
        """Raise for what can be told without torch: unknown names, impossible lengths, a task without a loss."""
        mode = self.given.get("mode")
        why_no_loss = find_task(self.given.get("task", DEFAULT)).why_no_loss
        if why_no_loss and (mode == "train" or (mode is None and trains)):
            raise WorkloadError([why_no_loss])
        look_at_gpu(self.given.get("gpu"))
        if self.model:
            look_at_model(self.model, parse_counts(self.given.get("seq"), "--seq"))


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """Which settings a verb takes, and how its help shows them."""

    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)
    without: Sequence[str] = ()
    """Settings that the verb does not take."""
    plans: bool = False
    """Whether what is not given is chosen: switches can then be refused too (`--no-compile`)."""
    infers: bool = False
    """Whether the verb takes only values that inference has."""
    lists: Sequence[str] = LISTS
    """Settings that are read as text; more than one value is for `tables`."""
    tables: bool = False
    """Whether several batches or lengths give a table."""
    panels: Mapping[str, str] = field(default_factory=lambda: PANELS)
    """Group of settings → heading in the help."""
    defaults: Mapping[str, str] = field(default_factory=lambda: PREDICTED)
    """What help says where the verb's default is not the setting's."""
    positional: str = "model"
    required: Sequence[str] = ()

    @property
    def taken(self) -> list[Setting]:
        """The settings that the verb takes."""
        return [s for name, s in self.settings.items() if name not in self.without]

    def parameters(self) -> list[inspect.Parameter]:
        """One parameter a setting, for typer; None stands for what was not given."""
        first = [s for s in self.taken if s.keyword == self.positional]
        needed = [self.settings[name] for name in self.required]
        others = [s for s in self.taken if s not in (*first, *needed)]
        made = [_parameter(s.keyword, Annotated[str, argument(s.help, s.value.metavar or "")]) for s in first]
        for s in needed:
            shown = option(s.help, s.value.metavar, panel=self.panels["data"])
            made.append(_parameter(s.keyword, Annotated[str, shown]))
        made += [self._parameter(s) for s in others]
        if "trust_remote_code" not in (*self.without, *self.settings):
            shown = option(TRUST, None, "--trust-remote-code", panel=self.panels["machine"], show_default=False)
            made.append(_parameter("trust_remote_code", Annotated[bool, shown], False))
        return made

    @property
    def rare(self) -> frozenset[str]:
        """Parameters that only `--help-all` shows."""
        shown = (self.positional, *self.required)
        others = [s for s in self.taken if not s.is_basic and s.keyword not in shown]
        return frozenset(name for s in others for name in (s.keyword, f"no_{s.keyword}"))

    def take(self, values: dict[str, Any]) -> WorkloadOptions:
        """What was given, taken out of the values of the verb's parameters."""
        given: dict[str, Any] = {}
        for setting in self.taken:
            is_negative = isinstance(setting.value, Switch) and setting.default is True
            value = values.pop(f"no_{setting.keyword}" if is_negative else setting.keyword)
            if is_negative and value:
                given[setting.keyword] = False
            elif not is_negative and value is not None:
                given[setting.keyword] = value
        model = given.pop("model", None) or values.get("model") or ""
        trust = "trust_remote_code" not in given and values.pop("trust_remote_code", False)
        has_loop = any(s.keyword == Loop.keyword for s in self.taken)
        return WorkloadOptions(model=model, given=given, trust_remote_code=trust, has_loop=has_loop)

    def _parameter(self, setting: Setting) -> inspect.Parameter:
        name, is_list = setting.keyword, setting.keyword in self.lists
        kind = str if is_list else setting.value.option_type
        flag = f"--{(setting.option or name).replace('_', '-')}"
        if kind is bool and setting.default is True:
            flag, name = f"--no-{flag[2:]}", f"no_{name}"
        elif kind is bool and self.plans and setting.is_planned:
            flag = f"{flag}/--no-{flag[2:]}"
        metavar = None if kind is bool else "N,…" if is_list and self.tables else setting.value.metavar
        panel = self.panels[setting.group]
        shown = option(self._help(setting), metavar, flag, panel=panel, show_default=False, hidden=setting.hidden)
        return _parameter(name, Annotated[kind | None, shown], None)

    def _help(self, setting: Setting) -> str:
        """What it is, its values and its default."""
        said, default = [setting.help.replace("`", "")], self.defaults.get(setting.keyword)
        if setting.keyword in self.lists and self.tables:
            said.append("Several (1,4,8) give a table.")
        if isinstance(setting.value, Choice):
            names = [n for n in setting.value.shown_names if not self.infers or setting.inferred(n, packs=True) == n]
            said.append(f"One of {', '.join(names)}." if len(names) > 1 else f"Takes {names[0]}.")
        if default is None and setting.default not in (None, True, False, ()):
            default = "planned" if self.plans and setting.is_planned else str(setting.default)
        return " ".join([*said, *([f"Default: {default}."] if default else [])])


def verb(example: str, **settings: Any) -> Callable[[Verb], Verb]:
    """Make a verb of a function.

    Args:
        example: a command, for the help.
        settings: fields of `SettingOptions`, for a function that takes `WorkloadOptions`.
    """

    def make(function: Verb) -> Verb:
        taken = SettingOptions(**settings)
        parameters: list[inspect.Parameter] = []
        makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
        known = inspect.signature(function).parameters
        for name, p in known.items():
            kind = p.annotation
            if kind is WorkloadOptions:
                parameters += taken.parameters()
                makers[name] = taken.take
            elif is_dataclass(kind):
                parameters += _field_parameters(kind)
                makers[name] = partial(_made, kind)
            else:
                parameters.append(p.replace(kind=p.KEYWORD_ONLY))
                makers[name] = itemgetter(name)

        rare = taken.rare if WorkloadOptions in (p.annotation for p in known.values()) else frozenset[str]()
        if rare:
            parameters.append(_parameter("help_all", HelpAll, False))

        @wraps(function)
        def run(**values: Any) -> None:
            function(**{name: made(values) for name, made in makers.items()})

        found: Any = run
        found.__signature__ = inspect.Signature(parameters)
        found.__annotations__ = {p.name: p.annotation for p in parameters}
        found.example = example
        found.rare = rare
        found.__doc__ = re.sub(r"(?<![.\n])\n(?!\n)", " ", inspect.getdoc(function) or "")  # help keeps line breaks
        return run

    return make


def _made(record: Any, values: dict[str, Any]) -> Any:
    return record(**{f.name: values.pop(f.name) for f in fields(record)})


def _field_parameters(record: Any) -> list[inspect.Parameter]:
    made = []
    for f in fields(record):
        kind: Any = f.type
        if f.metadata:
            names = f.metadata["names"] or ((f"--{f.name.replace('_', '-')}",) if kind is bool else ())
            shown = option(f.metadata["help"], f.metadata["metavar"], *names, **f.metadata["more"])
            kind = Annotated[kind, shown]
        made.append(_parameter(f.name, kind, ... if f.default is MISSING else f.default))
    return made


def _parameter(name: str, annotation: Any, default: Any = ...) -> inspect.Parameter:
    given = inspect.Parameter.empty if default is ... else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=given)


def value_of(keyword: str, given: Any) -> Any:
    """The value of a setting that was given; lengths may be in a file."""
    if keyword == "lengths":
        return parse_lengths(given).values
    return SETTINGS[keyword].value.parse(given) if isinstance(given, str) else given


def checked_choice(keyword: str, value: str) -> str:
    """A value of a setting, refused before anything heavy is imported where it is none.

    Raises:
        WorkloadError: with the names that there are, and the nearest.
    """
    problems = SETTINGS[keyword].value.problems(keyword, value)
    if problems:
        raise WorkloadError(problems)
    return value


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
    from vramfit.planner.request import lengths_of

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
