"""`Setting`: everything about one keyword of a job, in one class; and `Technique`: what one of its values does.

A setting is a subclass in a module of this package; `vramfit.settings` finds it there. `Workload`, command-line
options, the training request, saved plans, reasons, words of reports, the schema of the API and the controls of the
page are derived from it. Nothing here imports torch: `apply` and `undo` import what they need when they run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vramfit.settings.values import Value

if TYPE_CHECKING:
    from torch.nn import Module as Module

    from vramfit.records.estimate import Estimate as Estimate
    from vramfit.workload import Workload as Workload
else:
    Estimate = Module = Workload = Any

Kind = Literal["free", "numeric", "different training"]
"""`free` changes no result beyond the order of sums, `numeric` computes the same training in fewer bits, `different
training` learns something else; the mildest first."""
Group = Literal["job", "how", "machine"]
BF16_CAPABILITY = (8, 0)
"""The first with bfloat16 and TF32 arithmetic, and the first that torch's int4 product is built for."""
TRITON_CAPABILITY = (7, 0)
"""The first that Triton compiles for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """Values of a setting that take less memory or time."""

    keyword: str = ""
    """Of the setting; filled in by it."""
    values: tuple[str, ...]
    """A name in capitals stands for a value of the user's."""
    kind: Kind
    does: str
    """What it does to memory, in one line."""
    costs: str
    """What it costs in quality, in one line."""
    why: str = ""
    """Why a plan takes it, where that is more than what it does."""

    @property
    def name(self) -> str:
        """As people write it: the keyword and its values."""
        return f"{self.keyword} {' | '.join(self.values)}"

    def covers(self, value: Any) -> bool:
        """Whether a value of the keyword is this technique."""
        return str(value) in self.values or (value is not None and any(v.isupper() for v in self.values))


def given(keyword: str, name: str, says: str) -> Callable[[Any], bool]:
    """What is `asked` of a setting where only one thing matters: whether it is given, and not False.

    Args:
        name: of the property that `Workload` gets.
        says: its docstring.
    """

    def ask(w: Any) -> bool:
        return getattr(w, keyword) not in (None, False)

    ask.__name__, ask.__doc__ = name, says
    return ask


class Setting:
    """One keyword of a job. Class variables describe it; methods say what it does, and are overridden where it does."""

    keyword: ClassVar[str]
    order: ClassVar[int]
    """Where it stands in lists, in help and in `Workload`."""
    value: ClassVar[Value]
    default: ClassVar[Any] = None
    help: ClassVar[str]
    """One or two sentences, for the command line, the API and the reference."""
    group: ClassVar[Group] = "how"
    option: ClassVar[str | None] = None
    """Its name on the command line, where that is not the keyword."""
    techniques: ClassVar[tuple[Technique, ...]] = ()
    asked: ClassVar[tuple[Callable[[Any], Any], ...]] = ()
    """What other code asks of it: functions of a workload, which become properties of that name of `Workload`, and of
    every other record that has the setting."""
    is_worked_out: ClassVar[bool] = False
    """Whether a workload works it out where it is not given."""

    hidden: ClassVar[bool] = False
    """Whether help, the page and the docs leave it out: it is taken all the same, and saved plans hold it."""
    is_planned: ClassVar[bool] = False
    """Whether a plan chooses it where the user does not."""
    planned_default: ClassVar[Any] = None
    """What a plan takes where it has no reason for another value; None: the default."""
    proposes: ClassVar[tuple[Any, ...]] = ()
    """Values that a plan tries besides, wherever nothing contradicts them; each costs a trace."""
    if_possible: ClassVar[str] = ""
    """What a plan says that could not take it. A plan takes such a setting where it can, though it was asked for."""
    not_exact: ClassVar[str] = ""
    """Why a plan that must change no result (`exact`) does not take it."""
    own_kernels: ClassVar[bool] = False
    """Whether layers run kernels of vramfit's own in packed passes: a plan then packs whatever the padding, does not
    compile, and leaves it out where nothing fits with it."""
    few_measured: ClassVar[str] = ""
    """Why predictions with it are less sure than others, where they are."""
    implies: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values, and the other settings that each needs: they are taken where they are not given."""
    allows: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Names for `allow`, and what each means: values that a plan takes only where it is allowed."""
    in_run: ClassVar[bool | None] = None
    """Whether `vramfit train` takes it; None: where a plan chooses it."""
    in_inference: ClassVar[bool] = False
    """Whether evaluation and inference keep it."""
    at_load: ClassVar[bool] = False
    """Whether it decides how weights lie: `vramfit load` takes it."""
    of_weights: ClassVar[bool] = False
    """Whether it is the type of the weights, or where they wait."""
    less_weight: ClassVar[Any] = None
    """A value with which the weights of any model take less on a device, and are all there."""
    is_kept_on_resume: ClassVar[bool] = True
    """Whether a resumed run has it as it was, whatever it is planned for."""
    is_live: ClassVar[bool] = False
    """Whether a run can go on with another value from one step to the next, to the same result but for the order of
    sums."""
    must_match_on_resume: ClassVar[bool] = True
    """Whether another value makes it another training, which a checkpoint is not for."""
    in_trace: ClassVar[Literal["layers", "step", ""]] = "layers"
    """What of a trace goes by it: what each layer does, only the step around them, or nothing, since it is filled in
    afterwards."""
    is_trainers_own: ClassVar[bool] = False
    """Whether a Trainer says it, so that a plan for the Trainer must have it as it is there."""
    not_fitted: ClassVar[str] = ""
    """Why a plan that `fit_trainer` puts on a Trainer cannot have it."""
    is_measured: ClassVar[bool] = True
    """Whether `vramfit measure` can run it."""
    on_page: ClassVar[bool] = True
    """Whether the page and the API take it."""
    label: ClassVar[str] = ""
    """Its name on the page, where that is not the keyword."""
    about: ClassVar[str] = ""
    """What the page says below it, where help is too terse for that."""
    labels: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Values and how the page calls them; an empty one stands for none."""
    modes: ClassVar[tuple[str, ...]] = ("train", "forward", "infer")
    """Modes for which the page offers it."""
    pattern: ClassVar[str] = ""
    """The form of a text that the API takes for it, where values are texts of a form."""
    in_answers: ClassVar[bool] = False
    """Whether the API names it in every answer; others only where they are not the default."""
    is_observed: ClassVar[bool] = False
    """Whether advice after a failure names it: a program that is watched shows it."""
    is_basic: ClassVar[bool] = False
    """Whether `--help` and the page show it at once; other settings are in `--help-all` and under Advanced."""

    is_said: ClassVar[bool] = True
    """Whether reports name it where it is not the default; what a headline says anyway is not said again."""
    applied: ClassVar[int] = 0
    """In which order settings change a model; 0 for those that do not."""

    is_of_steps: ClassVar[bool] = False
    """Whether only steps need the change: outside of them, a model computes as its own code says."""

    is_undone: ClassVar[bool] = False
    """Whether a workload that does not ask for the change takes it back."""

    def contradictions(self, w: Workload) -> Iterator[str]:
        """What does not go together with it, whatever the model and the GPU; the default goes with everything."""
        yield from ()

    def gpu_problems(self, w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
        """Why a GPU cannot run it; every GPU runs the default."""
        yield from ()

    def advised(self, now: Estimate) -> Iterator[Mapping[str, Any]]:
        """Changes of it that may take less memory than a job takes now, each with the other keywords it needs."""
        yield from ()

    def seen_in_trace(self, w: Workload) -> Any:
        """What a trace sees of its value."""
        return getattr(w, self.keyword)

    def in_few_layers(self, w: Workload) -> Any:
        """The value with which two layers of the model take no more than all of them.

        Raises:
            LookupError: there is none; only a trace of all layers says what they take.
        """
        return getattr(w, self.keyword)

    @property
    def usual(self) -> Any:
        """What a plan takes where it has no reason for another value."""
        return self.default if self.planned_default is None else self.planned_default

    def planned(self, w: Workload, model: Module, capability: tuple[int, int]) -> Any:
        """The same for this model, which is on the meta device, and a GPU of this compute capability."""
        return self.usual

    def wished(self, w: Workload, model: Module, capability: tuple[int, int]) -> Any:
        """What a plan takes where the user asks for it, if it can be."""
        return self.planned(w, model, capability)

    def settled(self, chosen: Mapping[str, Any]) -> Any:
        """What a plan takes: the value that was chosen, or the default where the other settings do not allow it."""
        return chosen[self.keyword]

    def is_applied_for(self, w: Workload) -> bool:
        """Whether a workload asks for a change of the model."""
        return getattr(w, self.keyword) not in (None, False, self.default)

    def trainer_arguments(self, w: Workload) -> Mapping[str, Any]:
        """As keywords of transformers' `TrainingArguments`.

        Raises:
            VramfitError: they have nothing like it.
        """
        return {}

    def inferred(self, value: Any, *, packs: bool) -> Any:
        """What evaluation keeps of a value, where it keeps the setting; `packs`: whether its passes may be packed."""
        return value

    def apply(self, model: Module, w: Workload) -> None:
        """Change a model, on the meta device or on a real one, as the workload asks for.

        Raises:
            WorkloadError: the model does not have what it needs.
            MissingExtra: a package is missing.
        """

    def apply_to_steps(self, model: Module, w: Workload) -> None:
        """The same for a model that was prepared before; may be called again."""
        self.apply(model, w)

    def undo(self, model: Module) -> None:
        """Take the change back, where it was made and can be."""

    def change(self, model: Module, w: Workload) -> None:
        """Give a model in a run the value of the workload that the run goes on with; for what `is_live`."""

    def kept(self, w: Workload) -> Any:
        """The value by which a plan is asked to leave the setting as a run has it; None: no plan would change it."""
        return getattr(w, self.keyword)

    def words(self, w: Workload) -> str | None:
        """How a report calls it; None where it is as it is by itself."""
        value = getattr(w, self.keyword)
        if not self.is_said or value is None or value == self.default:
            return None
        if value is True:
            return self.keyword
        return f"{self.keyword} {self.shown(value)}"

    def brief(self, w: Workload) -> str | None:
        """The same in a list of what a plan chose."""
        return self.words(w)

    def shown(self, value: Any) -> str:
        """A value as people write it."""
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def options(self, value: Any) -> list[str]:
        """The value as options of a command; none for the default."""
        option = f"--{self.keyword.replace('_', '-')}"
        if value is None or value == self.default:
            return []
        return [option] if value is True else [option, self.shown(value)]

    @property
    def is_in_run(self) -> bool:
        """Whether `vramfit train` takes it."""
        return self.is_planned if self.in_run is None else self.in_run

    def technique(self, value: Any) -> Technique | None:
        """The technique that a value is; None for what is none, such as fp32."""
        return next((t for t in self.all_techniques if t.covers(value)), None)

    @property
    def all_techniques(self) -> tuple[Technique, ...]:
        """With the keyword filled in."""
        return tuple(replace(t, keyword=self.keyword) for t in self.techniques)
