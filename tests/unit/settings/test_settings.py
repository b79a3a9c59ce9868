"""The catalogue of techniques, and the sentences about what does not go together."""

import subprocess
import sys
from typing import Any

import pytest

from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.settings import KINDS, SETTINGS, TECHNIQUES, conflicts, find, used_by
from vramfit.settings.values import Switch
from vramfit.workload import CHOICES, Workload

T4, V100, A100, K80 = ((7, 5), "t4"), ((7, 0), "v100"), ((8, 0), "a100"), ((3, 7), "k80")


def workload(**keywords: Any) -> Workload:
    return Workload(model="m", **keywords)


def test_every_technique_is_a_keyword_with_values_that_a_workload_takes() -> None:
    for technique in TECHNIQUES:
        assert technique.kind in KINDS
        assert technique.keyword in Workload.__dataclass_fields__
        for value in technique.values:
            if technique.keyword in CHOICES:
                assert value in CHOICES[technique.keyword], technique.name


def test_every_choice_that_saves_memory_is_in_the_catalogue() -> None:
    plain = {("attention", "eager"), ("optimizer", "adamw"), ("precision", "fp32"), ("allocator", "default")}
    for keyword in ("attention", "optimizer", "precision", "quantize", "offload", "allocator"):
        for value in CHOICES[keyword]:
            assert (find(keyword, value) is None) == ((keyword, value) in plain), (keyword, value)


def test_names_are_unique_and_lines_are_single() -> None:
    assert len({t.name for t in TECHNIQUES}) == len(TECHNIQUES)
    for technique in TECHNIQUES:
        for line in (technique.does, technique.costs):
            assert line
            assert "\n" not in line
            assert len(line) < 100


@pytest.mark.parametrize(
    ("keyword", "value", "kind"),
    [
        ("checkpointing", "full", "free"),
        ("checkpointing", 3, "free"),
        ("optimizer", "adamw-fused", "free"),
        ("optimizer", "adamw-8bit", "numeric"),
        ("optimizer", "adafactor", "different training"),
        ("precision", "amp-bf16", "numeric"),
        ("quantize", "int8", "numeric"),
        ("freeze", ("a.*",), "different training"),
        ("lora", 8, "different training"),
    ],
)
def test_a_value_has_its_class(keyword: str, value: Any, kind: str) -> None:
    found = find(keyword, value)
    assert found is not None
    assert found.kind == kind


def test_what_a_workload_uses_is_listed() -> None:
    used = used_by(workload(lora=8, quantize="int8", precision="amp-bf16", batch=8, accumulate=2, attention="eager"))
    assert [t.keyword for t in used] == ["accumulate", "precision", "quantize", "lora"]
    assert used_by(workload(attention="eager")) == ()


@pytest.mark.parametrize(
    ("keywords", "gpu", "said"),
    [
        ({"precision": "amp-bf16"}, T4, "precision amp-bf16: t4 (sm_75) has no bfloat16"),
        ({"precision": "bf16", "mode": "infer"}, V100, "slowly; take fp16"),
        ({"precision": "tf32"}, T4, "precision tf32: t4 (sm_75) has no TF32"),
        ({"quantize": "int4", "precision": "bf16", "mode": "infer"}, T4, "quantize int4: t4 (sm_75)"),
        ({"quantize": "int4", "mode": "infer"}, A100, "multiplies in bfloat16: take precision bf16, not fp32"),
        ({"optimizer": "adamw-8bit"}, K80, "compiled by Triton, which k80 (sm_37) is too old for"),
        ({"compile": True}, K80, "compile: Triton does not compile for k80"),
    ],
)
def test_what_a_gpu_lacks_is_one_sentence(keywords: Any, gpu: tuple[tuple[int, int], str], said: str) -> None:
    found = conflicts(workload(**keywords), *gpu)
    assert any(said in problem for problem in found), found
    assert not any("\n" in problem for problem in found)


@pytest.mark.parametrize(
    ("keywords", "gpu"),
    [
        ({"precision": "amp-bf16"}, A100),
        ({"precision": "amp-fp16"}, T4),
        ({"optimizer": "adamw-8bit"}, T4),
        ({"optimizer": "adamw-8bit", "mode": "infer"}, K80),
        ({"quantize": "int8", "mode": "infer"}, K80),
        ({"quantize": "int4", "precision": "bf16", "mode": "infer"}, A100),
    ],
)
def test_what_a_gpu_has_is_no_problem(keywords: Any, gpu: tuple[tuple[int, int], str]) -> None:
    assert conflicts(workload(**keywords), *gpu) == []


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"precision": "fp16"}, "precision fp16 cannot train"),
        ({"quantize": "int8"}, "weights cannot learn"),
        ({"quantize": "int4", "freeze": "backbone"}, "quantize int4 cannot train"),
        ({"lora": 8, "freeze": "encoder"}, "lora 8 adapts layers that freeze 'encoder'"),
        ({"lora": 8, "mode": "infer"}, "lora is for mode train"),
    ],
)
def test_what_contradicts_itself_is_refused_by_the_workload(keywords: Any, said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload(**keywords)
    assert said in str(caught.value)


def test_all_contradictions_come_at_once() -> None:
    with pytest.raises(WorkloadError) as caught:
        workload(precision="fp16", quantize="int4", lora=8, freeze=2)
    assert len(caught.value.problems) == 3


def test_a_prediction_tells_what_the_gpu_and_the_model_lack_at_once() -> None:
    with pytest.raises(WorkloadError) as caught:
        estimate("bert-tiny", seq=1000, precision="amp-bf16", gpu="k80", optimizer="adamw-8bit")
    assert len(caught.value.problems) == 3


def test_the_catalogue_is_read_without_torch() -> None:
    code = "import sys, vramfit.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("keyword", [s.keyword for s in SETTINGS.values() if isinstance(s.value, Switch)])
@pytest.mark.parametrize("value", ["yes", "no", 1, None])
def test_a_switch_is_true_or_false(keyword: str, value: object) -> None:
    with pytest.raises(WorkloadError, match=f"{keyword} .* is not True or False"):
        Workload(model="m", **{keyword: value})


def test_every_setting_says_what_it_is_and_takes_its_default() -> None:
    for setting in SETTINGS.values():
        assert setting.help.endswith("."), setting.keyword
        if setting.keyword != "model":
            assert setting.value.problems(setting.keyword, setting.default) == [], setting.keyword
        for technique in setting.techniques:
            assert technique.does, setting.keyword
