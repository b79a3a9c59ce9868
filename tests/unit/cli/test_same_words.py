"""One thing has one name on every verb; a name that it had elsewhere is understood too."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vramfit.cli.main import ALIASES, VERBS, find_verb, main, make_app
from vramfit.errors import VramfitError

CALLED = {
    "plan": "vramfit.planner.plan.plan",
    "estimate": "vramfit.estimator.predict.estimate",
    "max-batch": "vramfit.estimator.search.max_batch",
}


def asked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The keywords that a verb calls its function with."""
    found: dict[str, Any] = {}

    def called(model: str, **keywords: Any) -> None:
        found.update(keywords)
        raise VramfitError("enough")

    module, _, name = CALLED[arguments[0]].rpartition(".")
    import_module("vramfit.estimator.predict")  # it keeps the function that it finds when it is first imported
    monkeypatch.setattr(import_module(module), name, called)
    monkeypatch.setattr(sys, "argv", ["vramfit", *arguments])
    with pytest.raises(SystemExit):
        main()
    return found


@pytest.mark.parametrize("verb", CALLED)
@pytest.mark.parametrize("names", [("--num-gpus", "--num-nodes"), ("--gpus", "--nodes")])
def test_the_number_of_gpus_and_of_machines_has_two_names_everywhere(
    verb: str, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, nodes = names
    loop = () if verb == "plan" else ("--loop", "stepper")
    found = asked(monkeypatch, verb, "bert-tiny", "--gpu", "t4", gpus, "4", f"{nodes}=2", *loop)
    assert (found["num_gpus"], found["num_nodes"]) == (4, 2)


def test_only_one_of_two_names_is_shown() -> None:
    from typer.main import get_command

    group: Any = get_command(make_app(CALLED))
    for verb in CALLED:
        shown = {name for option in group.commands[verb].params for name in (*option.opts, *option.secondary_opts)}
        assert "--num-gpus" in shown
        assert not shown & {f"--{other}" for other in ALIASES}


def test_no_verb_has_an_option_of_its_own_by_another_name_of_one() -> None:
    for verb in VERBS:
        names = {name.replace("_", "-") for name in find_verb(verb).__annotations__}
        assert not names & set(ALIASES), verb


@pytest.mark.parametrize("given", ["12,80,64", "FILE"])
@pytest.mark.parametrize("verb", ["plan", "estimate"])
def test_lengths_are_numbers_or_a_file_on_every_verb(
    verb: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lengths.txt").write_text("12\n80\n64\n")
    lengths = str(tmp_path / "lengths.txt") if given == "FILE" else given
    more = () if verb == "plan" else ("--attention", "packed", "--loop", "stepper", "--precision", "amp-bf16")
    found = asked(monkeypatch, verb, "bert-tiny", "--gpu", "h200", "--batch", "3", "--lengths", lengths, *more)
    assert tuple(getattr(found["lengths"], "values", found["lengths"])) == (12, 80, 64)


@pytest.mark.parametrize("verb", ["plan", "estimate"])
def test_lengths_that_are_neither_are_refused(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(monkeypatch, verb, "bert-tiny", "--gpu", "h200", "--lengths", "nosuch.txt") == {}
    assert "'nosuch.txt' is neither a file that is there nor whole numbers" in capsys.readouterr().err


def test_what_nobody_chooses_is_taken_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.main import get_command

    group: Any = get_command(make_app(["estimate", "train", "serve"]))
    hidden = {
        verb: {p.name for p in group.commands[verb].params if getattr(p, "hidden", False)} for verb in group.commands
    }
    assert hidden == {"estimate": {"casts", "loop"}, "train": {"fail_at"}, "serve": {"fail_every"}}
    shown = {p.name: p.help for p in group.commands["estimate"].params}
    assert "adamw-fused" in shown["optimizer"]
    assert "adamw-single" not in shown["optimizer"]
    given = {"casts": "together", "loop": "stepper", "optimizer": "adamw-single", "precision": "amp-bf16"}
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    assert asked(monkeypatch, "estimate", "bert-tiny", "--gpu", "h200", *options).items() >= given.items()


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        (("--attention", "packed", "--precision", "amp-bf16"), "stepper"),
        (("--offload", "optimizer"), "stepper"),
        (("--num-gpus", "2"), "stepper"),
        (("--attention", "packed", "--precision", "amp-bf16", "--mode", "infer"), None),
        (("--precision", "amp-bf16"), None),
    ],
)
def test_the_loop_follows_from_settings_that_only_the_stepper_runs(
    options: tuple[str, ...], loop: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(monkeypatch, "estimate", "bert-tiny", "--gpu", "h200", *options).get("loop") == loop
