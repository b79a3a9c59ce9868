"""DDP's buckets follow the order in which autograd comes to the parameters."""

from vramfit.trace.replica import _arrivals


def test_every_leaf_arrives_once_and_not_in_its_own_order() -> None:
    order = _arrivals(20)
    assert sorted(order) == list(range(20))
    assert order not in (list(range(20)), list(reversed(range(20))))


def test_the_order_is_the_same_every_time() -> None:
    assert _arrivals(201) == _arrivals(201)
