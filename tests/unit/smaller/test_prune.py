"""Models pruned to fewer layers and neurons: a folder that transformers loads, and that answers as the masked model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import COMMON, FAMILIES
from tests.unit.smaller.tokenizers_made import ENGLISH, write_corpus, write_multilingual
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.smaller import comparison
from vramfit.smaller import prune as prunes
from vramfit.smaller.neurons import best_neurons, find_feed_forwards, measure_importance
from vramfit.smaller.prune import PruneReport, PruneRequest, measure_latency, prune
from vramfit.smaller.rows import Rows, make_samples
from vramfit.smaller.shapes import Measure, PruneTarget
from vramfit.smaller.source import Source, load_answering

SIZES = {"vocab_size": 400, "max_position_embeddings": 66, "num_hidden_layers": 4, "n_layers": 4}


def write_family(folder: Path, family: str, **changes: Any) -> Path:
    """A classifier of a family with random weights, and a tokenizer."""
    write_multilingual(folder, "wordpiece")
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(COMMON | FAMILIES.get(family, {}) | SIZES | changes))
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def run(folder: Path, output: Path, measure: Measure = measure_latency, **target: Any) -> PruneReport:
    data = write_corpus(folder.parent / "data.txt")
    source = Source(model=str(folder))
    request = PruneRequest(source=source, data=(str(data),), output=output, target=PruneTarget(**target))
    return prune(request, measure=measure)


@torch.no_grad()
def masked_by_hand(folder: Path, pruned: Any, layers: tuple[int, ...]) -> torch.Tensor:
    """What the whole model answers without the neurons and layers that the pruned one does not have."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    whole = encoder_layers(model)
    for place, part in zip(layers, find_feed_forwards(pruned)[1], strict=True):
        up, down = (find_feed_forwards(model)[1][place].ups[0], find_feed_forwards(model)[1][place].down)
        kept = {tuple(row.tolist()) for row in part.ups[0].weight}
        lost = [i for i in range(down.in_features) if tuple(up.weight[i].tolist()) not in kept]
        assert len(lost) == down.in_features - part.num_neurons
        down.weight[:, lost] = 0.0
    for place, layer in enumerate(whole):
        if place not in layers:
            layer.register_forward_hook(
                lambda module, args, kwargs, output: (args[0], *output[1:]) if isinstance(output, tuple) else args[0],
                with_kwargs=True,
            )
    return answer(model, folder)


@torch.no_grad()
def answer(model: Any, folder: Path) -> torch.Tensor:
    batch = AutoTokenizer.from_pretrained(folder)(ENGLISH, padding=True, return_tensors="pt")
    found: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return found


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert", "mpnet"])
def test_the_folder_answers_as_the_masked_model_in_transformers(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", family)
    report = run(folder, tmp_path / "pruned", layers=3, neurons=24)
    pruned = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pruned").eval()
    assert len(encoder_layers(pruned)) == len(report.shape.layers) == 3
    assert {part.num_neurons for part in find_feed_forwards(pruned)[1]} == {24}
    expected = masked_by_hand(folder, pruned, report.shape.layers)
    torch.testing.assert_close(answer(pruned, tmp_path / "pruned"), expected, atol=1e-5, rtol=0)
    assert report.max_difference <= 1e-5
    whole = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert (answer(whole, folder) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("keep", [0.7, 0.5, 0.3])
def test_a_share_of_the_parameters_is_reached_and_not_missed_by_much(keep: float, tmp_path: Path) -> None:
    report = run(write_family(tmp_path / "whole", "bert"), tmp_path / "pruned", keep=keep)
    share = report.after.encoder_parameters / report.before.encoder_parameters
    assert keep - 0.15 < share <= keep
    assert report.shape == min(report.tried, key=lambda shape: shape.change)
    assert len(report.tried) >= (2 if keep >= 0.5 else 1)


def test_layers_that_share_their_weights_lose_neurons_only(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", "albert")
    report = run(folder, tmp_path / "pruned", neurons=16)
    assert report.after.encoder_parameters < report.before.encoder_parameters
    with pytest.raises(WorkloadError, match="share their weights"):
        run(folder, tmp_path / "other", layers=2, neurons=16)


def test_size_and_memory_are_targets_too(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", "bert")
    whole_bytes = (folder / "model.safetensors").stat().st_size
    report = run(folder, tmp_path / "sized", size_bytes=whole_bytes - 20_000)
    assert report.after.file_bytes < whole_bytes - 20_000 + 4096  # names and places are not counted
    with pytest.raises(WorkloadError, match="as small as that already"):
        run(folder, tmp_path / "fitted", memory_bytes=2**40)
    with pytest.raises(WorkloadError, match="more than"):
        run(folder, tmp_path / "fitted", memory_bytes=1)
    with pytest.raises(WorkloadError, match="embeddings and head alone"):
        run(folder, tmp_path / "fitted", size_bytes=1000)


class Counted:
    """Seconds by the parameters of layers, in place of a measurement; counts what it is asked."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def __call__(self, trained: Any, samples: Any) -> float:
        model = AutoModelForSequenceClassification.from_pretrained(trained.model)
        self.taken.append(sum(p.numel() for layer in encoder_layers(model) for p in layer.parameters()) / 1e6)
        return self.taken[-1]


def test_a_latency_is_reached_with_few_measurements(tmp_path: Path) -> None:
    folder, measure = write_family(tmp_path / "whole", "bert"), Counted()
    whole_s = measure(Source(model=str(folder)), None)
    report = run(folder, tmp_path / "pruned", measure, latency_s=0.6 * whole_s)
    assert report.latency is not None
    assert (report.latency.before_s, report.latency.num_measured) == (whole_s, len(measure.taken) - 1)
    assert report.latency.num_measured <= 6  # of 19 shares, and the whole model
    assert 0.45 * whole_s < report.latency.after_s <= 0.6 * whole_s
    assert report.latency.after_s == pytest.approx(report.after.encoder_parameters / 1e6)
    assert min(report.tried, key=lambda shape: shape.change) == report.shape
    assert max(s for s in measure.taken if s <= 0.6 * whole_s) == report.latency.after_s


def test_a_latency_that_is_there_or_out_of_reach_is_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", "bert")
    with pytest.raises(WorkloadError, match="nothing is pruned"):
        run(folder, tmp_path / "pruned", Counted(), latency_s=1.0)
    with pytest.raises(WorkloadError, match=r"a row takes .* ms in the fastest shape that was measured, more than"):
        run(folder, tmp_path / "pruned", Counted(), latency_s=1e-9)
    with pytest.raises(WorkloadError, match="layers 9: the model has 4"):
        run(folder, tmp_path / "pruned", Counted(), latency_s=0.01, layers=9)
    assert list(tmp_path.glob("*pruned*")) == []


def test_a_latency_is_the_median_of_what_compare_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_family(tmp_path / "whole", "bert")
    trained = Source(model=str(folder)).open()
    rows = Rows(files=(str(write_corpus(tmp_path / "data.txt")),), task=trained.task).first(5)
    assert vars(prunes)["time_alone"] is comparison.time_alone
    monkeypatch.setattr(prunes, "time_alone", lambda inference, samples: [0.1, 0.2, 0.9])
    assert measure_latency(trained, make_samples(rows, trained)) == 0.2


def test_heads_are_taken_out_where_the_configuration_can_say_so(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", "eurobert")
    report = run(folder, tmp_path / "pruned", heads=1, layers=3)
    pruned = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pruned").eval()
    assert (pruned.config.num_attention_heads, pruned.config.hidden_size, pruned.config.head_dim) == (1, 32, 16)
    assert (len(report.shape.layers), report.shape.heads) == (3, 1)
    whole = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for place, layer in zip(report.shape.layers, pruned.model.layers, strict=True):
        out = whole.model.layers[place].self_attn.o_proj.weight
        own = layer.self_attn.o_proj.weight
        (first,) = (begin for begin in (0, 16) if torch.equal(own, out[:, begin : begin + 16]))
        with torch.no_grad():
            out[:, 16 - first : 32 - first] = 0.0
    lost = [layer for place, layer in enumerate(whole.model.layers) if place not in report.shape.layers]
    for layer in lost:
        layer.register_forward_hook(lambda module, args, output: args[0])
    torch.testing.assert_close(answer(pruned, tmp_path / "pruned"), answer(whole, folder), atol=1e-5, rtol=0)


def test_heads_that_a_configuration_cannot_say_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="heads of bert models cannot be taken out"):
        run(write_family(tmp_path / "whole", "bert"), tmp_path / "pruned", heads=1)
    folder = write_family(tmp_path / "grouped", "eurobert", num_key_value_heads=1)
    with pytest.raises(WorkloadError, match="heads of eurobert models cannot be taken out"):
        run(folder, tmp_path / "pruned", heads=1)
    folder = write_family(tmp_path / "other", "eurobert")
    with pytest.raises(WorkloadError, match="heads 3: the model has 2 heads"):
        run(folder, tmp_path / "pruned", heads=3)
    folder = write_family(tmp_path / "indivisible", "eurobert", num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(WorkloadError, match="heads 3: the model has 4 heads") as refused:  # 32 is no multiple of 3
        run(folder, tmp_path / "pruned", heads=3)
    assert refused.value.hint == "numbers that its configuration can say: 1, 2, 4"


def test_neurons_that_matter_are_kept(tmp_path: Path) -> None:
    """Neurons whose way out is nearly closed cannot change an answer."""
    folder = write_family(tmp_path / "whole", "bert")
    trained = Source(model=str(folder)).open()
    model = load_answering(trained)
    _, parts = find_feed_forwards(model)
    with torch.no_grad():
        for part in parts:
            part.down.weight[:, ::2] *= 1e-3
    rows = Rows(files=(str(write_corpus(tmp_path / "data.txt")),), task=trained.task).first(5)
    importance = measure_importance(model, parts, make_samples(rows, trained), 2)
    assert [kept.tolist() for kept in best_neurons(importance, 24)] == [list(range(1, 48, 2))] * 4


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"keep": 0.0}, "not a share between 0 and 1"),
        ({"keep": 2.0}, "not a share between 0 and 1"),
        ({"keep": 0.5, "size_bytes": 10**6}, "give one"),
        ({"keep": 0.5, "layers": 1, "neurons": 1}, "give one"),
        ({"keep": 0.5, "latency_s": 0.1}, "give one"),
        ({"keep": 0.5, "heads": 1}, "give one"),
        ({}, "nothing says how small"),
    ],
)
def test_targets_that_contradict_themselves_are_refused(target: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        PruneTarget(**target)


def test_what_cannot_be_reached_is_refused_with_numbers(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", "bert")
    with pytest.raises(WorkloadError, match=r"cannot be pruned to .* parameters: the fewest"):
        run(folder, tmp_path / "pruned", keep=0.01)
    with pytest.raises(WorkloadError, match="layers 9: the model has 4"):
        run(folder, tmp_path / "pruned", layers=9)
    for same in ({"layers": 4}, {"neurons": 48}, {"layers": 4, "neurons": 48}):
        with pytest.raises(WorkloadError, match="as small as that already: nothing is pruned"):
            run(folder, tmp_path / "pruned", **same)
    assert not (tmp_path / "pruned").exists()


def test_memory_that_fewer_layers_alone_reach_is_a_target(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", "bert", hidden_size=512, num_attention_heads=8, intermediate_size=64)
    one = run(folder, tmp_path / "one", layers=1)
    assert one.after.serving_bytes is not None
    report = run(folder, tmp_path / "pruned", memory_bytes=one.after.serving_bytes)
    assert len(report.shape.layers) == 1
    with pytest.raises(WorkloadError, match="with the fewest layers and neurons that are tried, serving takes"):
        run(folder, tmp_path / "other", memory_bytes=2**20)


def test_checkpoints_of_the_run_do_not_count_as_the_models_files(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", "bert")
    saved = (folder / "model.safetensors").stat().st_size
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "weights.safetensors").write_bytes(bytes(saved))
    assert run(folder, tmp_path / "pruned", layers=2).before.file_bytes == saved


def test_a_folder_that_was_exported_is_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "whole", "bert")
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").touch()
    with pytest.raises(WorkloadError, match="is exported already"):
        run(folder, tmp_path / "pruned", layers=2)


def test_a_family_without_a_feed_forward_part_that_is_recognised_is_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "mobilebert", num_hidden_layers=2, hidden_size=32, intermediate_size=32, vocab_size=99
    )
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(WorkloadError, match="mobilebert models cannot be pruned"):
        find_feed_forwards(model)
