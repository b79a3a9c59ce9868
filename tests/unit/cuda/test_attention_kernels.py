"""What the attention kernels ask for around their outputs."""

from dataclasses import replace

from tests.unit.cuda.profiles import H200, left_over, script_of, spec, temporaries

from vramfit.cuda.kernels.attention import efficient_workspace_bytes

B, H, S, D = 16, 12, 256, 64
SHAPE = (B, H, S, D)
ROW_MAJOR = (S * H * D, D, H * D, 1)  # as [batch, rows, heads, size]


def test_cudnn_asks_for_seed_and_offset_before_output_and_logsumexp() -> None:
    q = spec(*SHAPE, dtype="bfloat16")
    outputs = (q, spec(B, H, S, 1), None, None, None, None, spec(dtype="int64"), spec(dtype="int64"), None)
    steps = script_of("_scaled_dot_product_cudnn_attention", q, q, q, None, True, outputs=outputs)
    assert [i for kind, i, _ in steps if kind == "out"] == [6, 7, 0, 1]
    assert temporaries(steps) == [256]
    assert left_over(steps) == set()


def test_cudnn_without_a_logsumexp_does_not_ask_for_one() -> None:
    q = spec(*SHAPE, dtype="bfloat16")
    outputs = (q, None, None, None, None, None, spec(dtype="int64"), spec(dtype="int64"), None)
    steps = script_of("_scaled_dot_product_cudnn_attention", q, q, q, None, False, outputs=outputs)
    assert [i for kind, i, _ in steps if kind == "out"] == [6, 7, 0]


def test_cudnn_backward_keeps_dq_and_the_row_sums_in_fp32() -> None:
    q = spec(*SHAPE, dtype="float16")
    steps = script_of("_scaled_dot_product_cudnn_attention_backward", q, q, q, q, outputs=(q, q, q))
    assert temporaries(steps) == [4 * B * H * S * D + 4 * B * H * S + 256]
    assert [kind for kind, _, _ in steps] == ["out", "out", "out", "temp", "free"]


def test_efficient_attention_asks_for_a_logsumexp_only_when_something_learns() -> None:
    q = spec(*SHAPE)
    name = "_scaled_dot_product_efficient_attention"
    learning = script_of(name, q, q, q, None, True, outputs=(q, spec(B, H, S), None, None))
    frozen = script_of(name, q, q, q, None, False, outputs=(q, spec(B, H, 0), None, None))
    assert learning == [("out", 0, 0), ("out", 1, 0)]
    assert frozen == [("out", 0, 0)]


def test_efficient_backward_in_fp32_makes_product_sum_and_delta() -> None:
    q = spec(*SHAPE, stride=ROW_MAJOR)
    steps = script_of("_scaled_dot_product_efficient_attention_backward", q, q, q, q, outputs=(q, q, q, None))
    rows = 4 * B * H * S
    assert temporaries(steps) == [rows * D, rows, rows, B * H * (S // 64) * (16 + 64 * 64 * 4)]
    assert left_over(steps) == set()


def test_efficient_backward_in_half_needs_no_product() -> None:
    q = spec(*SHAPE, dtype="float16", stride=ROW_MAJOR)
    steps = script_of("_scaled_dot_product_efficient_attention_backward", q, q, q, q, outputs=(q, q, q, None))
    assert len(temporaries(steps)) == 2


def test_efficient_backward_copies_a_gradient_that_does_not_lie_row_by_row() -> None:
    q, grad = spec(*SHAPE, stride=ROW_MAJOR), spec(*SHAPE)
    steps = script_of("_scaled_dot_product_efficient_attention_backward", grad, q, q, q, outputs=(q, q, q, None))
    assert temporaries(steps)[0] == grad.nbytes
    assert steps[-1] == ("free", 0, 0)


def test_the_gradient_of_a_bias_is_an_output_like_the_others() -> None:
    q, bias = spec(*SHAPE, stride=ROW_MAJOR), spec(B, H, S, S)
    steps = script_of("_scaled_dot_product_efficient_attention_backward", q, q, q, q, outputs=(q, q, q, bias))
    assert [i for kind, i, _ in steps if kind == "out"] == [0, 1, 2, 3]


def test_the_efficient_workspace_grows_by_blocks_of_rows() -> None:
    sizes = [efficient_workspace_bytes(n, n, 64, 64, 4, 12) for n in (1, 64, 65, 128)]
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3] == 2 * sizes[0]


def test_wide_heads_in_half_precision_need_room_for_the_keys() -> None:
    assert efficient_workspace_bytes(128, 128, 256, 256, 2, 12) > efficient_workspace_bytes(128, 128, 256, 256, 4, 12)


def test_flash_backward_rounds_rows_to_128_and_heads_to_32() -> None:
    exact, odd = spec(2, 4, 256, 64, dtype="float16"), spec(2, 4, 200, 40, dtype="float16")
    name = "_scaled_dot_product_flash_attention_backward"
    rounded = temporaries(script_of(name, exact, exact, exact, exact, outputs=(exact,) * 3))
    assert rounded == [4 * 2 * 4 * 256, 4 * 2 * 4 * 256 * 64]
    assert temporaries(script_of(name, odd, odd, odd, odd, outputs=(odd,) * 3)) == rounded


def test_flash_keeps_its_random_state_on_the_device() -> None:
    q = spec(*SHAPE, dtype="float16")
    state = spec(2, dtype="int64")
    outputs = (q, spec(B, H, S), None, None, None, None, state, spec(dtype="int64"), None)
    steps = script_of("_scaled_dot_product_flash_attention", q, q, q, outputs=outputs, gpu=H200)
    assert [i for _, i, _ in steps] == [0, 1, 6, 7]


def test_a_safe_softmax_is_written_over_the_softmax_since_torch_2_11() -> None:
    scores = spec(B, H, S, S)
    steps = script_of("_safe_softmax", scores, -1, outputs=(scores,))
    assert temporaries(steps) == [B * H * S * S, B * H * S, 4]
    assert left_over(steps) == set()
    before = script_of("_safe_softmax", scores, -1, outputs=(scores,), gpu=replace(H200, torch_version=(2, 10)))
    assert temporaries(before) == [4 * B * H * S * S, 4, B * H * S * S, B * H * S, 4]
