"""The published MiniLM in every precision, beside what transformers makes of it."""

import pytest
import torch
from tests.unit.loader.checkpoints import logits, minilm, sentences
from transformers import AutoModel, AutoModelForSequenceClassification

from vramfit.loader.load import load
from vramfit.techniques.quantization import inner_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", DTYPES)
def test_outputs_are_those_of_transformers_to_the_bit(precision: str) -> None:
    folder = minilm()
    ours, report = load(folder, task="features", precision=precision, device="cpu")
    theirs = AutoModel.from_pretrained(folder, dtype=DTYPES[precision])
    batch = sentences(folder)
    assert torch.equal(logits(ours, batch), logits(theirs, batch))
    assert report.num_tensors == 103
    assert (report.fresh, report.files) == ((), ("model.safetensors",))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lower_precision_is_the_full_one_cast(precision: str) -> None:
    folder = minilm()
    ours, _ = load(folder, task="features", precision=precision, device="cpu")
    full = AutoModel.from_pretrained(folder, dtype=torch.float32).to(DTYPES[precision])
    assert torch.equal(logits(ours, sentences(folder)), logits(full, sentences(folder)))


def test_every_tensor_and_buffer_is_the_same_and_the_configuration_says_where_from() -> None:
    folder = minilm()
    ours, _ = load(str(folder), task="features", device="cpu")
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32)
    assert dict(ours.named_buffers()).keys() == dict(theirs.named_buffers()).keys()
    for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
        mine = ours.get_parameter(name) if isinstance(tensor, torch.nn.Parameter) else ours.get_buffer(name)
        assert torch.equal(mine, tensor), name
        assert mine.requires_grad == tensor.requires_grad
    assert ours.config.name_or_path == str(folder)
    assert (ours.config.dtype, ours.training) == (theirs.config.dtype, False)


def test_full_precision_on_the_host_stays_a_view_of_the_file() -> None:
    _, report = load(minilm(), task="features", device="cpu")
    if report.host_anonymous_bytes is None:
        pytest.skip("this system does not tell anonymous memory")
    assert report.host_anonymous_bytes < report.num_bytes // 8


def test_a_new_head_is_drawn_the_same_way_every_time_and_named() -> None:
    torch.manual_seed(11)
    first, report = load(minilm(), num_labels=3, device="cpu")
    assert torch.equal(torch.randn(2), torch.randn(2, generator=torch.Generator().manual_seed(11)))
    second, _ = load(minilm(), num_labels=3, device="cpu")
    assert set(report.fresh) == {"classifier.weight", "classifier.bias"}
    assert torch.equal(first.classifier.weight, second.classifier.weight)
    assert first.classifier.weight.shape == (3, 384)
    assert 0.015 < first.classifier.weight.std() < 0.025
    assert not first.classifier.bias.any()


def test_a_fresh_head_has_the_same_weights_in_every_precision() -> None:
    full, _ = load(minilm(), device="cpu")
    half, _ = load(minilm(), precision="bf16", device="cpu")
    assert torch.equal(full.classifier.weight.bfloat16(), half.classifier.weight)


def test_int8_keeps_the_direction_of_every_sentence() -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    folder = minilm()
    batch = sentences(folder)
    mask = batch["attention_mask"][..., None]

    def vectors(quantize: str | None) -> torch.Tensor:
        model, _ = load(folder, task="features", quantize=quantize, device="cpu")
        return (logits(model, batch) * mask).sum(1) / mask.sum(1)

    cosines = torch.nn.functional.cosine_similarity(vectors("int8"), vectors(None))
    assert cosines.min() >= 0.999


def test_int8_classifies_as_full_precision_does() -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    folder = minilm()
    ours, report = load(folder, quantize="int8", device="cpu")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    theirs.classifier.load_state_dict(load(folder, device="cpu")[0].classifier.state_dict())
    mine, reference = logits(ours, sentences(folder)), logits(theirs, sentences(folder))
    assert torch.nn.functional.cosine_similarity(mine.flatten(), reference.flatten(), dim=0) >= 0.999
    assert report.num_quantized == 36


def test_int8_takes_what_its_layout_says() -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    full, _ = load(minilm(), task="features", device="cpu")
    small, _ = load(minilm(), task="features", quantize="int8", device="cpu")
    num_quantized = sum(m.weight.numel() for m in full.encoder.modules() if isinstance(m, torch.nn.Linear))
    saved = _num_bytes(full) - _num_bytes(small)
    assert saved == 4 * num_quantized - (num_quantized + 5 * num_quantized // 64)


def _num_bytes(model: torch.nn.Module) -> int:
    return sum(part.numel() * part.element_size() for p in model.parameters() for _, part in inner_tensors(p))
