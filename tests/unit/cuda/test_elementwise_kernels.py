"""Kernels with one hidden temporary, or an order of their own."""

from tests.unit.cuda.profiles import left_over, script_of, spec, temporaries


def test_dropout_asks_for_its_mask_before_its_output() -> None:
    x = spec(8, 128, 768)
    steps = script_of("native_dropout", x, 0.1, True, outputs=(x, spec(8, 128, 768, dtype="bool")))
    assert steps == [("out", 1, 0), ("out", 0, 0)]


def test_softmax_backward_makes_a_product_after_its_output() -> None:
    grad, output = spec(8, 128, dtype="float32"), spec(8, 128, dtype="float16")
    steps = script_of("_softmax_backward_data", grad, output, -1, outputs=(output,))
    assert steps == [("out", 0, 0), ("temp", 0, 8 * 128 * 4), ("free", 0, 0)]


def test_an_embedding_copies_expanded_indices_for_its_own_length_only() -> None:
    table, out = spec(512, 768), spec(16, 128, 768)
    expanded = script_of("embedding", table, spec(16, 128, dtype="int64", stride=(0, 1)), outputs=(out,))
    assert expanded == [("temp", 0, 16 * 128 * 8), ("out", 0, 0), ("free", 0, 0)]


def test_an_embedding_takes_indices_that_lie_flat_as_they_are() -> None:
    table, out = spec(512, 768), spec(16, 128, 768)
    for indices in (
        spec(16, 128, dtype="int64"),
        spec(1, 128, dtype="int64", stride=(0, 1)),
        spec(128, dtype="int64", stride=(2,)),
    ):
        assert script_of("embedding", table, indices, outputs=(out,)) == [("out", 0, 0)]


def test_indexing_copies_the_indices_that_are_broadcast() -> None:
    x, rows, columns = spec(100, 200), spec(16, 1, dtype="int64"), spec(8, dtype="int64")
    steps = script_of("index", x, (rows, columns), outputs=(spec(16, 8),))
    assert temporaries(steps) == [16 * 8 * 8, 16 * 8 * 8]
    assert left_over(steps) == set()


def test_indexing_with_equal_or_missing_indices_copies_nothing() -> None:
    x, rows = spec(100, 200), spec(16, dtype="int64")
    assert script_of("index", x, (rows, rows), outputs=(spec(16),)) == [("out", 0, 0)]
    assert script_of("index", x, (None, rows), outputs=(spec(100, 16),)) == [("out", 0, 0)]


def test_nonzero_holds_its_count_until_the_end() -> None:
    steps = script_of("nonzero", spec(64), outputs=(spec(64, 1, dtype="int64"),))
    assert steps[0] == ("temp", 0, 4)
    assert steps[-1] == ("free", 0, 0)
    assert left_over(steps) == set()


def test_a_running_sum_of_another_type_is_converted_after_the_output() -> None:
    mask, out = spec(8, 128, dtype="bool"), spec(8, 128, dtype="int64")
    assert script_of("cumsum", mask, 1, outputs=(out,)) == [("out", 0, 0), ("temp", 0, out.nbytes), ("free", 0, 0)]
    assert script_of("cumsum", out, 1, outputs=(out,)) == [("out", 0, 0)]


def test_layer_norm_copies_what_is_not_contiguous_while_it_runs() -> None:
    permuted, weight = spec(8, 128, 768, stride=(98304, 1, 128)), spec(768)
    outputs = (spec(8, 128, 768), spec(8, 128, 1), spec(8, 128, 1))
    steps = script_of("native_layer_norm", permuted, (768,), weight, weight, 1e-5, outputs=outputs)
    assert steps == [("temp", 0, permuted.nbytes), ("out", 0, 0), ("out", 1, 0), ("out", 2, 0), ("free", 0, 0)]
    gradients = (spec(8, 128, 768), weight, weight)
    backward = script_of("native_layer_norm_backward", permuted, permuted, (768,), outputs=gradients)
    assert temporaries(backward) == [permuted.nbytes, permuted.nbytes]
    assert left_over(backward) == set()


def test_layer_norm_of_contiguous_tensors_asks_for_its_outputs_alone() -> None:
    x, weight = spec(8, 128, 768), spec(768)
    steps = script_of("native_layer_norm", x, (768,), weight, weight, 1e-5, outputs=(x, spec(8, 128, 1), None))
    assert steps == [("out", 0, 0), ("out", 1, 0)]


def test_a_depthwise_convolution_takes_the_gradient_of_its_weights_first() -> None:
    """Seen in Nystroemformer: the copy of the input goes before the gradient of the input is made."""
    x, weight = spec(2, 4, 8, 16, stride=(512, 16, 64, 1)), spec(4, 1, 3, 1)
    steps = script_of("convolution_backward", x, x, weight, outputs=(spec(2, 4, 8, 16), weight, None))
    copies = [("temp", 0, x.nbytes), ("temp", 1, x.nbytes)]
    assert steps == [*copies, ("out", 1, 0), ("free", 1, 0), ("out", 0, 0), ("free", 0, 0)]
