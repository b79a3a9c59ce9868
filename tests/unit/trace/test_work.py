"""What a step does on the device: counted in the trace, the same at any batch."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.unit.trace.recording import H200
from transformers import BertConfig, BertForSequenceClassification

from vramfit.estimator.predict import work_of
from vramfit.models.resolve import resolve
from vramfit.records.stream import Work, WorkItem
from vramfit.trace.run import trace
from vramfit.trace.work import StretchTemplate, work_in_place
from vramfit.workload import Workload

TINY = BertConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    vocab_size=50,
    max_position_embeddings=64,
)
BASE = BertConfig()


def step_of(config: Any, batch: int = 4, *, at: int | None = None, **keywords: Any) -> Work:
    """The work of a step, from a trace for every batch or from one at a real batch."""
    workload = Workload(model="m", **({"seq": 16, "batch": batch} | keywords))
    assert workload.micro_batch is not None
    template = trace(resolve(config, task=workload.task), workload, H200, batch=at)
    return work_of(template, workload, workload.micro_batch)


def flops(work: Work, kind: str = "gemm", *phases: str) -> int:
    chosen = [(i, n) for i, n in work.items() if i.kind == kind and (not phases or i.phase in phases)]
    return sum(item.flops * item.num_calls * repeats for item, repeats in chosen)


def linear_flops(config: BertConfig, batch: int, seq: int) -> tuple[int, int]:
    """Two for each weight and row: of the encoder, whose rows are tokens, and of the head, whose rows are samples."""
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    sizes = {n: m.weight.numel() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    encoder = sum(size for name, size in sizes.items() if ".encoder." in name)
    return 2 * batch * seq * encoder, 2 * batch * (sum(sizes.values()) - encoder)


def summed(work: Work) -> Counter[WorkItem]:
    """Calls by what they do; how a trace groups them does not matter."""
    total: Counter[Any] = Counter()
    for item, repeats in work.items():
        words = [getattr(item, name) for name in WorkItem.__slots__ if name != "num_calls"]
        total[tuple(words)] += item.num_calls * repeats
    return total


def test_a_forward_of_bert_base_has_two_operations_a_weight_and_token() -> None:
    work = step_of(BASE, batch=8, seq=128, mode="infer")
    assert flops(work) == sum(linear_flops(BASE, 8, 128))
    heads, size = 12, 64
    assert flops(work, "attention") == 12 * 4 * 8 * heads * 128 * 128 * size


def test_backward_takes_twice_a_forward() -> None:
    work = step_of(BASE, batch=8, seq=128)
    assert flops(work, "gemm", "forward") == sum(linear_flops(BASE, 8, 128))
    assert flops(work, "gemm", "backward") == 2 * flops(work, "gemm", "forward")


def test_checkpointing_repeats_one_forward_of_the_layers() -> None:
    work = step_of(BASE, batch=8, seq=128, checkpointing="full")
    assert flops(work, "gemm", "recompute") == linear_flops(BASE, 8, 128)[0]
    assert flops(work, "attention", "recompute") == flops(work, "attention", "forward")
    plain = step_of(BASE, batch=8, seq=128)
    assert not [i for i, _ in plain.items() if i.phase == "recompute"]


def test_frozen_layers_have_no_backward() -> None:
    work = step_of(BASE, batch=8, seq=128, freeze="backbone")
    assert flops(work, "gemm", "backward") == 2 * 8 * 768 * 2


def test_eager_attention_counts_its_products_in_batches() -> None:
    work = step_of(TINY, batch=4, attention="eager", mode="infer")
    scores = [i for i, _ in work.items() if i.operator == "bmm"]
    assert {i.product for i in scores} == {(4 * 2, 16, 16, 8), (4 * 2, 16, 8, 16)}


@pytest.mark.parametrize("batch", [2, 3, 17])
@pytest.mark.parametrize(
    "keywords",
    [
        {"optimizer": "adamw"},
        {"optimizer": "adamw-single", "attention": "eager", "mask": "ones"},
        {"precision": "amp-fp16", "checkpointing": "full", "optimizer": "adamw-fused"},
        {"task": "masked-lm", "precision": "amp-bf16", "optimizer": "sgd"},
        {"mode": "infer", "precision": "bf16"},
    ],
    ids=str,
)
def test_the_trace_for_every_batch_equals_a_trace_at_that_batch(batch: int, keywords: dict[str, Any]) -> None:
    assert summed(step_of(TINY, batch, **keywords)) == summed(step_of(TINY, batch, at=batch, **keywords))


def test_views_cost_nothing_on_the_device() -> None:
    work = step_of(TINY)
    views = [i for i, _ in work.items() if i.operator in ("view", "t", "transpose", "expand", "detach")]
    assert views
    assert not any(i.num_launches or i.num_bytes or i.flops for i in views)


def test_only_the_steady_step_is_written_down() -> None:
    workload = Workload(model="m", batch=4, seq=16, accumulate=2)
    template = trace(resolve(TINY), workload, H200)
    assert set(template.work) == {"steady.micro0", "steady.micro1", "steady.optimizer"}


def test_micro_batches_after_the_second_repeat_it() -> None:
    two, five = (step_of(TINY, batch=2 * n, accumulate=n) for n in (2, 5))
    assert [s.num_repeats for s in five.segments] == [1, 4, 1]
    assert flops(five) * 2 == flops(two) * 5


def test_a_fused_optimizer_reads_and_writes_every_parameter_once() -> None:
    work = step_of(TINY, optimizer="adamw-fused")
    fused = next(i for i, _ in work.items() if i.operator == "_fused_adamw_")
    with torch.device("meta"):
        num_bytes = sum(p.nbytes for p in BertForSequenceClassification(TINY).parameters())
    assert fused.num_tensors == len(list(BertForSequenceClassification(TINY).parameters()))
    # weights, gradients and two moments; torch declares all four as written, and steps are four bytes each
    assert num_bytes * 8 <= fused.num_bytes <= num_bytes * 8 + 16 * fused.num_tensors


def test_a_loss_scaler_waits_for_the_device_before_the_step() -> None:
    def waits(precision: str) -> int:
        segment = step_of(TINY, precision=precision, mask="none").segments[-1]
        return sum(s.waits for s in segment.stretches)

    assert (waits("amp-fp16"), waits("amp-bf16")) == (1, 0)


def test_a_gathering_operator_reads_the_rows_it_takes() -> None:
    work = step_of(TINY, batch=2, mode="infer", mask="none")
    words = next(i for i, _ in work.items() if i.operator == "embedding")
    assert words.num_bytes == 2 * (2 * 16 * 16 * 4) + 2 * 16 * 8


def test_products_keep_their_type() -> None:
    types = {i.dtype for i, _ in step_of(TINY, precision="amp-bf16").items() if i.kind == "gemm"}
    assert types == {"bfloat16"}
    assert step_of(TINY, precision="tf32").tf32


def test_a_product_that_is_added_in_place_is_a_product() -> None:
    total, left, right = (torch.empty(*shape, device="meta") for shape in ((6, 8), (6, 4), (4, 8)))
    template = work_in_place("addmm_", (total, left, right), [total], None)
    calls = StretchTemplate()
    calls.count(template, "backward")
    (work,) = calls.at(1).items
    assert (work.kind, work.product, work.flops) == ("gemm", (1, 6, 8, 4), 2 * 6 * 8 * 4)
    assert work.num_bytes == 4 * (2 * 6 * 8 + 6 * 4 + 4 * 8)
