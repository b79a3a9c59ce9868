"""Students made of a teacher's layers: which layers, and that their weights are the teacher's."""

import copy
from itertools import pairwise

import pytest
import torch
from tests.unit.runtime.small_models import FAMILIES, make_batch, make_model

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.smaller.students import chosen_layers, keep_layers, spread


def test_layers_are_spread_from_the_first_to_the_last() -> None:
    for num_layers in range(2, 25):
        for num_kept in range(2, num_layers + 1):
            kept = spread(num_kept, num_layers)
            assert len(set(kept)) == num_kept
            assert (kept[0], kept[-1]) == (0, num_layers - 1)
            gaps = [b - a for a, b in pairwise(kept)]
            assert max(gaps) - min(gaps) <= 1
    assert chosen_layers(None, 6) == chosen_layers(3, 6) == (0, 2, 5)
    assert chosen_layers((4, 1), 6) == (1, 4)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "albert"])
def test_a_student_has_the_weights_of_the_layers_it_kept(family: str) -> None:
    model = make_model(family, "sequence-classification", num_hidden_layers=4, n_layers=4).eval()
    student = copy.deepcopy(model)
    keep_layers(student, (0, 3))
    assert student.config.num_hidden_layers == 2
    fresh = type(model)(student.config).eval()
    fresh.load_state_dict(student.state_dict())
    batch = {name: value for name, value in make_batch("sequence-classification").items() if name != "labels"}
    with torch.no_grad():
        assert torch.allclose(fresh(**batch).logits, student(**batch).logits, atol=1e-6)
    for place, kept in enumerate((0, 3)):
        own, teachers = (encoder_layers(m)[i].state_dict() for m, i in ((student, place), (model, kept)))
        assert all(torch.equal(own[name], teachers[name]) for name in teachers)


def test_layers_that_share_their_weights_cannot_be_taken_out() -> None:
    model = make_model("albert", "sequence-classification")
    with pytest.raises(WorkloadError, match="passes 2 layers and holds the weights of 1 layer: none can be taken out"):
        keep_layers(model, (0,))


def test_a_first_layer_that_is_made_otherwise_stays() -> None:
    """ModernBERT's has no norm before its attention: another one in its place would lose its own."""
    model = make_model("modernbert", "sequence-classification", num_hidden_layers=4)
    with pytest.raises(WorkloadError, match="first layer of ModernBertForSequenceClassification is made otherwise"):
        keep_layers(model, (1, 3))
    keep_layers(model, (0, 3))
