"""torch on the meta device answers as on CUDA for the length of a trace, and not a moment longer."""

import logging
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from tests.unit.trace.recording import Small, meta
from torch.utils import checkpoint

from vramfit.cuda.dialect import Autocast, stand_ins

adam, optimizer = import_module("torch.optim.adam"), import_module("torch.optim.optimizer")


def everything() -> list[Any]:
    """What stand-ins replace."""
    return [
        torch.autocast,
        torch.amp.autocast,
        torch.is_autocast_enabled,
        torch.amp.is_autocast_available,
        checkpoint._get_autocast_kwargs,
        torch.utils._foreach_utils._get_foreach_kernels_supported_devices,
        torch.utils._foreach_utils._get_fused_kernels_supported_devices,
        optimizer._get_foreach_kernels_supported_devices,
        adam._device_dtype_check_for_fused,
        logging.getLogger("transformers").level,
    ]


def plain() -> torch.nn.Module:
    return torch.nn.Linear(4, 4, device="meta")


def test_everything_is_replaced_while_it_lasts_and_put_back_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "transformers")  # the command line, in this process, may have hushed it
    before = everything()
    with stand_ins(plain(), Autocast(None)):
        assert all(now != then for now, then in zip(everything(), before, strict=True))
    assert everything() == before


def test_an_exception_puts_everything_back_too() -> None:
    before = everything()
    with pytest.raises(ZeroDivisionError), stand_ins(plain(), Autocast(torch.float16)):
        raise ZeroDivisionError
    assert everything() == before


def test_the_wrapper_that_model_files_hold_by_name_is_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real, autocast = object(), Autocast(torch.bfloat16)
    file = sys.modules[Small.__module__]
    monkeypatch.setattr(file, "maybe_autocast", real, raising=False)
    with stand_ins(Small(), autocast):
        before = autocast.enter(True)
        with file.maybe_autocast(device_type="meta", enabled=False):
            assert not autocast.enabled
        assert autocast.enabled
        autocast.leave(before)
    assert file.maybe_autocast is real


def test_autocast_contexts_switch_the_traced_autocast() -> None:
    autocast = Autocast(torch.bfloat16)
    with stand_ins(plain(), autocast):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled("meta")
            with torch.amp.autocast(device_type="meta", enabled=False):
                assert not torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled()
        assert not autocast.enabled


def test_an_autocast_of_the_host_is_not_ours() -> None:
    autocast = Autocast(torch.bfloat16)
    with stand_ins(plain(), autocast), torch.autocast("cpu"):
        assert not autocast.enabled
        assert not torch.is_autocast_enabled("cpu")


def test_recomputation_goes_on_in_the_autocast_of_its_forward_pass() -> None:
    autocast = Autocast(torch.bfloat16)
    with stand_ins(plain(), autocast):
        assert checkpoint._get_autocast_kwargs("meta")[0] == {"enabled": False}
        with torch.autocast("cuda"):
            assert checkpoint._get_autocast_kwargs("meta")[0] == {"enabled": True}


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_optimizers_take_the_way_asked_for_on_meta_tensors(kind: dict[str, bool]) -> None:
    weight = meta(8, 8, learns=True)
    weight.grad = meta(8, 8)
    with stand_ins(plain(), Autocast(None)):
        made = torch.optim.AdamW([weight], **kind)
        made.step()
    assert made.state[weight]["exp_avg"].is_meta
    assert made.state[weight]["step"].is_meta == ("fused" in kind)
