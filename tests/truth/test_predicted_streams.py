"""Predicted request streams against recorded ones: traced here without a GPU, identical request for request."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.truth.cases import H200, load_stream, model_of, workload_of

from vramfit.models.resolve import resolve
from vramfit.records.stream import Stream
from vramfit.techniques import optimizers
from vramfit.trace.run import Session, prepare, tracing
from vramfit.trace.values import give_inputs
from vramfit.workload import Workload

Events = list[tuple[str, int]]
FULL = ("trace_0", "trace_1", "trace_2", "trace_3", "trace_6")
LABELLED = [(file, index) for file in ("labelled_0", "labelled_1") for index in range(8)]
FUSED_BY_SCRIPT = {262144: 6, 65536: 4, 524288: 1}
"""DeBERTa's position buckets are a TorchScript function: from its second call on, torch fuses it on CUDA, and
these temporaries of the two-layer case are no longer asked for. A trace, which fuses nothing, has them."""


def recorded(run: dict[str, Any]) -> Events:
    kinds = {"alloc": "A", "free_completed": "F"}
    return [(kinds[e[0]], e[2]) for e in run["events"] if e[0] in kinds]


def predicted(stream: Stream) -> Events:
    sizes: list[int] = []
    events: Events = []
    for event in stream.events:
        if event > 0:
            sizes.append(event)
            events.append(("A", event))
        else:
            events.append(("F", sizes[-event]))
    return events


def settled(events: Events) -> Events:
    """Runs of frees in one order: which of two tensors dies first at the end of a scope does not matter."""
    result: Events = []
    frees: Events = []
    for event in events:
        if event[0] == "F":
            frees.append(event)
        else:
            result += [*sorted(frees), event]
            frees = []
    return result + sorted(frees)


def inputs(case: dict[str, Any], batch: int) -> dict[str, torch.Tensor]:
    """Inputs as the recording scripts made them on the device."""
    ids = torch.zeros(batch, case["seq"], dtype=torch.long, device="meta")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def labels(case: dict[str, Any], given: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    task = case.get("task", "cls")
    if task == "cls":
        return {"labels": torch.zeros(batch, dtype=torch.long, device="meta")}
    if task == "tok":
        return {"labels": torch.zeros(batch, case["seq"], dtype=torch.long, device="meta")}
    if task == "mlm":
        chosen = torch.rand(batch, case["seq"], device="meta") < 0.15
        return {"labels": torch.where(chosen, given["input_ids"], -100)}
    ones = torch.ones(batch, dtype=torch.long, device="meta")
    return {"start_positions": ones, "end_positions": ones}


def full_model_loop(session: Session, model: Any, case: dict[str, Any], workload: Workload) -> Iterator[str]:
    """The loop of the five whole-model recordings: fresh inputs and labels every step."""
    tracer, batch = session.tracer, case["batch"]
    optimizer = optimizers.make(workload.optimizer, model.parameters()) if workload.trains else None
    for step in range(4):
        segment = f"step{step}"
        tracer.begin(segment, "forward")
        given = inputs(case, batch)
        give_inputs(tracer.values, model, workload, given)
        if optimizer is not None:
            with session.autocast():
                loss = model(**given, labels=torch.zeros(batch, dtype=torch.long, device="meta")).loss
            tracer.begin(segment, "backward")
            loss.backward()
            tracer.begin(segment, "optimizer")
            optimizer.step()
            optimizer.zero_grad()
            del loss
        else:
            with torch.no_grad(), session.autocast():
                output = model(**given)
            del output
        del given
        yield segment
    tracer.begin("end", "end")


def labelled_loop(session: Session, model: Any, case: dict[str, Any], workload: Workload) -> Iterator[str]:
    """The loop of the labelled recordings: one batch, two steps."""
    tracer, batch = session.tracer, case["batch"]
    tracer.begin("inputs", "inputs")
    given = inputs(case, batch)
    give_inputs(tracer.values, model, workload, given)
    given |= labels(case, given, batch)
    yield "inputs"
    optimizer = optimizers.make(workload.optimizer, model.parameters())
    scaler = torch.amp.GradScaler("meta") if workload.precision == "amp-fp16" else None
    for step in range(2):
        segment = f"step{step}"
        tracer.begin(segment, "forward")
        with session.autocast():
            loss = model(**given).loss
        tracer.begin(segment, "backward")
        if scaler is None:
            loss.backward()
            tracer.begin(segment, "optimizer")
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            tracer.begin(segment, "optimizer")
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        del loss
        yield segment
    tracer.begin("end", "end")


def predict(case: dict[str, Any], loop: Any) -> Stream:
    workload = workload_of(case)
    model = prepare(resolve(model_of(case), task=workload.task), workload)
    with tracing(model, workload, H200, probe=None) as session:
        segments = list(loop(session, model, case, workload))
    order = [(name, name) for name in ["load", *segments]]
    return session.tracer.template.instantiate(case["batch"], order)


@pytest.mark.parametrize("name", FULL)
def test_a_whole_model_is_predicted_request_for_request(name: str) -> None:
    run = load_stream(name)
    assert settled(predicted(predict(run["case"], full_model_loop))) == settled(recorded(run))


@pytest.mark.parametrize(("file", "index"), LABELLED)
def test_a_two_layer_model_is_predicted_request_for_request(
    file: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_stream(file)[index]
    if run["case"]["model"] == "mpnet-base":
        _compute_mpnet_positions_on_the_host(monkeypatch)
    if run["case"]["model"] == "modernbert-base":
        _multiply_modernbert_frequencies_as_matrices(monkeypatch)
    real, ours = settled(recorded(run)), settled(predicted(predict(run["case"], labelled_loop)))
    if run["case"]["model"] == "deberta-v3-base":
        assert _surplus(ours, real) == {("A", n): count for n, count in FUSED_BY_SCRIPT.items()}
        assert _surplus(real, ours) == {}
        return
    assert ours == real


def _surplus(left: Events, right: Events) -> dict[tuple[str, int], int]:
    from collections import Counter

    return dict(Counter(e for e in left if e[0] == "A") - Counter(e for e in right if e[0] == "A"))


def _compute_mpnet_positions_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17, which was recorded, made MPNet's position buckets on the host; newer ones do not."""
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    def compute_position_bias(self: Any, x: torch.Tensor, position_ids: Any = None, num_buckets: int = 32) -> Any:
        batch, length = x.size(0), x.size(1)
        positions = torch.arange(length, dtype=torch.long)
        buckets = self.relative_position_bucket(positions[None, :] - positions[:, None], num_buckets=num_buckets)
        values = self.relative_attention_bias(buckets.to(x.device))
        return values.permute([2, 0, 1]).unsqueeze(0).expand((batch, -1, length, length)).contiguous()

    monkeypatch.setattr(MPNetEncoder, "compute_position_bias", compute_position_bias)


def _multiply_modernbert_frequencies_as_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17, which was recorded, made rotary angles with a matrix product; newer ones multiply."""
    from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> Any:
        frequencies = getattr(self, f"{layer_type}_inv_freq")
        scaling = getattr(self, f"{layer_type}_attention_scaling")
        expanded = frequencies[None, :, None].expand(position_ids.shape[0], -1, 1).to(torch.float)
        positions = position_ids[:, None, :].float()
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            angles = (expanded @ positions).transpose(1, 2)
            both = torch.cat((angles, angles), dim=-1)
            cos = both.cos() * scaling
            sin = both.sin() * scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)

    monkeypatch.setattr(ModernBertRotaryEmbedding, "forward", forward)
