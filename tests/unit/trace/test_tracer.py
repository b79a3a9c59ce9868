"""What operators ask for under the tracer: storages followed from their first reference to their last."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.trace.recording import Asked, asked, meta, record

from vramfit.errors import TraceError, WorkloadError
from vramfit.units import MIB

KIB = 1024


def requests(action: Any, **keywords: Any) -> list[Asked]:
    return asked(record(lambda begin: action(), **keywords))


def operators(found: list[Asked], part: str | None = None) -> list[str]:
    return [a.operator for a in found if part in (None, a.part)]


def test_a_new_tensor_is_a_request_of_its_size() -> None:
    assert requests(lambda: meta(256, 4)) == [Asked("empty", "", "forward", 4 * KIB, freed=False)]


def test_operators_that_write_in_place_ask_for_nothing() -> None:
    def action() -> torch.Tensor:
        x, y = meta(256), meta(256)
        x.add_(1).mul_(y).clamp_(0, 1)
        torch.relu_(x)
        torch.add(x, y, out=y)
        x[3:7].fill_(0)
        x.copy_(y)
        return x

    assert operators(requests(action)) == ["empty", "empty"]


def test_what_is_written_in_place_is_what_comes_back() -> None:
    same: list[bool] = []

    def action() -> None:
        x, y = meta(4), meta(4)
        same.extend([x.add_(1) is x, torch.add(x, y, out=y) is y])
        torch._foreach_add_([x, y], 1.0)

    requests(action)
    assert same == [True, True]


def test_views_share_one_request_which_ends_with_the_last_of_them() -> None:
    def action() -> Any:
        x = meta(16, 16)
        view = x.view(256)[10:]
        del x
        y = meta(64)
        del y
        return view.reshape(2, 123).t()

    found = requests(action)
    assert [(a.size, a.freed) for a in found] == [(KIB, False), (256, True)]


def test_a_free_is_written_where_the_last_reference_goes() -> None:
    def action() -> Any:
        x = meta(256)
        y = x + 1
        del x
        return y * 2

    assert record(lambda begin: action()).events == [KIB, KIB, 0, KIB, -1]


def test_a_tensor_without_elements_asks_for_nothing() -> None:
    assert requests(lambda: meta(0, 8)) == []
    assert requests(lambda: (meta(0, 8) + 1, meta(4)))[0].size == 16


def test_tensors_on_the_host_are_not_requests() -> None:
    assert requests(lambda: (torch.zeros(100), torch.ones(3) + torch.arange(3))) == []


def test_equal_numbers_of_different_types_are_different_calls() -> None:
    sizes = [a.size for a in requests(lambda: [torch.full((64,), v, device="meta") for v in (0, 0.0, False, 1, 1.0)])]
    assert sizes == [512, 256, 64, 512, 256]


def test_parameters_and_buffers_are_loaded_children_first_and_tied_ones_once() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model.register_buffer("table", torch.zeros(16))
    model[1].weight = model[0].weight
    found = asked(record(lambda begin: None, model))
    assert [(a.operator, a.module, a.part, a.size) for a in found] == [
        ("parameter", "0", "load", 256),
        ("parameter", "0", "load", 32),
        ("parameter", "1", "load", 32),
        ("parameter", "", "load", 64),
    ]


# -- backward ----------------------------------------------------------------------------------------


def backward(loss_of: Any, **keywords: Any) -> list[Asked]:
    """Requests of a backward pass; gradients of leaves stay."""
    leaf = meta(256, learns=True)

    def action(begin: Any) -> Any:
        loss = loss_of(leaf)
        begin("backward")
        loss.backward()
        return leaf.grad

    return [a for a in asked(record(action, **keywords)) if a.part == "backward"]


def test_autograd_sums_two_fresh_gradients_in_place() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        return (torch.sin(y) * torch.cos(y)).sum()

    assert "add" not in operators(backward(loss))


def test_a_weight_that_is_tied_sums_its_two_gradients_out_of_place() -> None:
    """Its decoder's gradient is a transposed view, which autograd does not write into (as recorded on an H200)."""
    table, ids = meta(100, 32, learns=True), torch.empty(8, dtype=torch.long, device="meta")

    def action(begin: Any) -> Any:
        loss = F.linear(F.embedding(ids, table), table).sum()
        begin("backward")
        loss.backward()
        return table.grad

    found = [a for a in asked(record(action)) if a.part == "backward" and a.size == 100 * 32 * 4]
    assert [(a.operator, a.freed) for a in found] == [
        ("mm", True),
        ("embedding_dense_backward", True),
        ("add", False),
    ]


def test_an_expanded_gradient_is_not_written_into() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        return y.sum() + y.sum()

    assert operators(backward(loss)).count("add") == 1


def test_the_gradient_of_a_gather_is_scattered_into_its_zeros() -> None:
    index = torch.empty(64, dtype=torch.long, device="meta")
    found = operators(backward(lambda x: torch.gather(x * 1.0, 0, index).sum()))
    assert "new_zeros" in found or "zeros" in found
    assert "scatter_add" not in found


def test_what_was_written_over_takes_its_gradient_out_of_a_copy() -> None:
    index, values = torch.empty(64, dtype=torch.long, device="meta"), torch.empty(64, device="meta")
    assert "index_put" in operators(backward(lambda x: (x * 1.0).index_put((index,), values).sum()))
    assert "index_put" not in operators(backward(lambda x: (x * 1.0)[index].sum()))


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, -1e9), (torch.bfloat16, torch.finfo(torch.float32).min)])
def test_what_a_type_cannot_hold_is_refused(dtype: torch.dtype, value: float) -> None:
    x = torch.empty(4, dtype=dtype, device="meta")
    fills: list[Any] = [lambda v: x.masked_fill(x > 0, v), lambda v: x.masked_fill_(x > 0, v), lambda v: x.fill_(v)]
    for fill in fills:
        record(lambda _, fill=fill: fill(-float("inf")))
        with pytest.raises(WorkloadError, match="does not run in this precision"):
            record(lambda _, fill=fill: fill(value))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_halves_are_transformed_in_powers_of_two_alone() -> None:
    x = torch.empty(2, 192, 768, device="meta")
    record(lambda _: torch.fft.fftn(x, dim=(1, 2)))
    record(lambda _: torch.fft.fftn(x[:, :64, :256].half(), dim=(1, 2)))
    for transform in (lambda: torch.fft.fftn(x.half(), dim=(1, 2)), lambda: torch.fft.irfft(x.half(), n=96)):
        with pytest.raises(WorkloadError, match=r"powers of two, and here they are"):
            record(lambda _, transform=transform: transform())


def test_a_second_backward_adds_to_the_gradient_that_is_there() -> None:
    leaf = meta(256, learns=True)

    def action(begin: Any) -> Any:
        for _ in range(2):
            begin("forward")
            loss = (leaf * 2).sum()
            begin("backward")
            loss.backward()
            del loss
        return leaf.grad

    found = [a for a in asked(record(action)) if a.part == "backward" and a.size == KIB]
    assert [a.freed for a in found] == [False, True]


# -- what CUDA adds ----------------------------------------------------------------------------------


def products(bias: bool) -> list[Asked]:
    x, w = meta(64, 32), meta(48, 32, learns=True)
    b = meta(48, learns=True) if bias else None

    def action(begin: Any) -> Any:
        loss = (F.linear(x, w, b) + F.linear(x, w, b)).sum()
        begin("backward")
        loss.backward()
        return w.grad

    return [a for a in asked(record(action)) if a.operator.endswith("_workspace")]


def test_each_thread_takes_its_workspace_once_and_keeps_it() -> None:
    found = products(bias=True)
    assert [(a.operator, a.part, a.size, a.freed) for a in found] == [
        ("cublas_workspace", "forward", 32 * MIB, False),
        ("cublaslt_workspace", "forward", MIB, False),
        ("cublas_workspace", "backward", 32 * MIB, False),
    ]


def test_products_without_a_bias_take_no_second_workspace() -> None:
    assert [a.operator for a in products(bias=False)] == ["cublas_workspace", "cublas_workspace"]


def test_the_workspace_comes_after_the_output_of_the_first_product() -> None:
    assert operators(requests(lambda: meta(4, 8) @ meta(8, 4))) == ["empty", "empty", "mm", "cublas_workspace"]


def test_the_driver_is_told_when_the_model_and_cublas_are_loaded() -> None:
    stream = record(lambda begin: meta(4, 8) @ meta(8, 4))
    assert [m.name for m in stream.marks if m.kind == "driver"] == ["model_loaded", "cublas_loaded"]


def test_efficient_attention_keeps_its_random_state_on_the_host() -> None:
    q = meta(2, 4, 32, 64, learns=True)
    found = [a for a in requests(lambda: F.scaled_dot_product_attention(q, q, q)) if "attention" in a.operator]
    assert [a.size for a in found] == [2 * 4 * 32 * 64 * 4, 2 * 4 * 32 * 4]


def test_autocast_casts_a_weight_once_and_frees_the_copy_when_it_ends() -> None:
    x, w = meta(64, 32), meta(48, 32, learns=True)

    def action(begin: Any) -> Any:
        with torch.autocast("cuda"), torch.no_grad():
            for _ in range(3):
                F.linear(x, w)

    copies = [a for a in asked(record(action, precision="amp-bf16")) if a.size == 48 * 32 * 2]
    assert [(a.operator, a.freed) for a in copies] == [("_to_copy", True)]


# -- data --------------------------------------------------------------------------------------------


def test_nonzero_is_taken_to_find_everything() -> None:
    found = requests(lambda: (meta(8, 16) > 0).nonzero())
    assert found[-1].operator == "nonzero"
    assert [a.size for a in found if not a.freed] == [8 * 16 * 2 * 8]


def test_nothing_is_wrong_with_what_is_computed() -> None:
    answers: list[bool] = []
    requests(lambda: answers.append(bool(meta(4).isnan().any())))
    assert answers == [False]


@pytest.mark.parametrize(
    ("ask", "operator"),
    [
        (lambda x: bool(x.sum() > 0), "_local_scalar_dense"),
        (lambda x: x.max().item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
        (lambda x: int(x.argmax()), "_local_scalar_dense"),
        (lambda x: torch.unique(x), "_unique2"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select"),
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: x.tolist(), "_to_copy"),
    ],
)
def test_asking_for_a_value_is_an_error_that_names_the_operator(ask: Any, operator: str) -> None:
    with pytest.raises(TraceError) as caught:
        requests(lambda: ask(meta(8)))
    assert caught.value.operator == operator
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_an_optimizer_may_ask_for_norms_and_overflows() -> None:
    answers: list[float] = []

    def action(begin: Any) -> None:
        begin("optimizer")
        answers.extend([meta(8).norm().item(), meta(1, dtype=torch.long).item()])

    record(action)
    assert answers == [0.0, 0]
