"""Memory that several models share, and the names that they have."""

from pathlib import Path

import pytest
from tests.unit.serve.small_servers import write_head

from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.serve.loading import load_model, need_of
from vramfit.serve.server import divide, shared
from vramfit.serve.settings import Need, ServeSettings, names_of


def test_shares_hold_what_is_needed_and_as_many_tokens_each(tmp_path: Path) -> None:
    settings = ServeSettings(
        model=str(write_head(tmp_path, "features")), devices=("emulated",), memory="400MiB", num_workers=2
    )
    need = need_of(settings)
    assert 0 < need.token_bytes < need.least_bytes
    least = ServeSettings(model=settings.model, devices=("emulated",), memory=need.least_bytes)
    loaded = load_model(least)
    assert loaded.inference.max_tokens >= loaded.trained.max_length
    with pytest.raises(NoPlanFits):
        load_model(ServeSettings(model=settings.model, devices=("emulated",), memory=need.least_bytes * 3 // 4))
    assert need.times(2) == Need(2 * need.least_bytes, 2 * need.token_bytes)
    assert settings.most_sharers == 2
    with pytest.raises(WorkloadError, match="offload is for one model"):
        need_of(ServeSettings(model=settings.model, devices=("emulated",), memory="400MiB", offload="weights"))


def test_shares_add_up_or_say_what_is_missing() -> None:
    needs = [Need(100, 1.0), Need(200, 3.0), Need(300, 4.0)]
    shares = divide(1_000, ["a", "b", "c"], needs)
    assert shares == {"a": 150, "b": 350, "c": 500}
    with pytest.raises(NoPlanFits, match=r"the models take 600 B with one text each") as caught:
        divide(599, ["a", "b", "c"], needs)
    assert caught.value.shortfall_bytes == 1


def test_one_model_keeps_everything_and_several_need_memory() -> None:
    one = ServeSettings(model="m", memory="1GiB")
    assert shared({"m": one}) == {"m": one}
    with pytest.raises(WorkloadError, match="2 models need memory"):
        shared({name: ServeSettings(model=name) for name in "ab"})


def test_a_folder_has_its_own_name_unless_it_is_given_another(tmp_path: Path) -> None:
    (tmp_path / "my model=1").mkdir()
    folder = str(tmp_path / "my model=1")
    assert names_of([folder, f"x={folder}"]) == {"my-model-1": folder, "x": folder}
    (tmp_path / "current").symlink_to(folder)
    assert names_of([f"{tmp_path}/current", f"{folder}/.."]) == {
        "current": f"{tmp_path}/current",
        tmp_path.name: f"{folder}/..",
    }
    for wrong in (f"={folder}", f"a/b/c={folder}", f"é={folder}"):
        with pytest.raises(WorkloadError, match="is no name for a model"):
            names_of([wrong])
