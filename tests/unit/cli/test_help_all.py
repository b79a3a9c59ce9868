"""`--help` shows what people set most, `--help-all` every option."""

import sys

import pytest

from vramfit.cli.main import main
from vramfit.cli.options import SettingOptions
from vramfit.errors import WorkloadError
from vramfit.loader.load import make_request
from vramfit.settings import SETTINGS


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["vramfit", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", ["estimate", "plan"])
def test_rare_settings_are_only_in_the_long_help(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = shown(monkeypatch, capsys, verb, "--help")
    long = shown(monkeypatch, capsys, verb, "--help-all")
    for option in ("--batch", "--seq", "--gpu", "--memory", "--precision", "--help-all"):
        assert f"{option} " in short
        assert f"{option} " in long
    for option in ("--mask-above", "--quantize", "--host-memory"):
        assert f"{option} " not in short
        assert f"{option} " in long
    assert "--casts" not in long  # hidden everywhere


def test_the_short_help_of_train_has_what_a_first_run_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = shown(monkeypatch, capsys, "train", "--help")
    for option in ("--model", "--output", "--eval-data", "--epochs", "--lr", "--batch", "--memory", "--resume"):
        assert f"{option} " in short
    assert "--label-smoothing" not in short
    assert "--label-smoothing" in shown(monkeypatch, capsys, "train", "--help-all")


@pytest.mark.parametrize(
    ("verb", "default"),
    [(verb, "padded or ones, whichever takes more memory") for verb in ("estimate", "plan", "max-batch")]
    + [("measure", "padded")],
)
def test_help_says_which_mask_is_taken(
    verb: str, default: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(shown(monkeypatch, capsys, verb, "--help-all").replace("│", " ").split())
    assert f"One of none, ones, padded. Default: {default}." in words


def test_load_lists_only_what_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(shown(monkeypatch, capsys, "load", "--help-all").replace("│", " ").split())
    assert "What is kept in host memory until the GPU needs it. Takes weights." in words
    assert "One of sdpa, eager, packed." in words
    for value in ("optimizer", "activations"):
        with pytest.raises(WorkloadError, match=f"offload {value} is for training; a load offers offload weights"):
            make_request("bert-tiny", offload=value)


def test_every_setting_is_in_one_of_the_two() -> None:
    taken = SettingOptions()
    names = {s.keyword for s in taken.taken}
    assert names == set(SETTINGS)
    assert {"batch", "seq", "gpu", "memory"}.isdisjoint(taken.rare)
    assert {"quantize", "no_dropout", "loop"} <= taken.rare
