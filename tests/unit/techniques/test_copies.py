"""Copies that lie side by side at both ends are one; what arrives is the same."""

import torch

from vramfit.techniques.offloading.gradient_slots import Copies


def test_neighbours_are_one_copy_and_everything_arrives() -> None:
    source, target = torch.arange(100.0), torch.zeros(100)
    other = torch.arange(100.0, 200.0)
    copies = Copies()
    for begin, end in ((0, 10), (10, 25), (25, 26), (40, 60), (60, 70)):
        copies.add(target[begin:end], source[begin:end])
    copies.add(target[70:80], other[70:80])  # beside it at one end only
    assert [t.numel() for t in copies.targets] == [26, 30, 10]
    copies.send()
    expected = torch.zeros(100)
    expected[:26], expected[40:70], expected[70:80] = source[:26], source[40:70], other[70:80]
    assert torch.equal(target, expected)


def test_kinds_that_take_turns_find_their_neighbours() -> None:
    sources = [torch.randn(30) for _ in range(3)]
    targets = [torch.zeros(30) for _ in range(3)]
    copies = Copies(num_kinds=3)
    for begin in range(0, 30, 10):
        for target, source in zip(targets, sources, strict=True):
            copies.add(target[begin : begin + 10], source[begin : begin + 10])
    assert len(copies.targets) == 3
    copies.send()
    assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))


def test_another_type_or_another_memory_is_no_neighbour() -> None:
    block = torch.zeros(64, dtype=torch.uint8)
    wide, narrow = block[:32].view(torch.float32), block[32:].view(torch.bfloat16)
    copies = Copies()
    copies.add(torch.zeros(8), wide)
    copies.add(torch.zeros(16, dtype=torch.bfloat16), narrow)
    assert len(copies.targets) == 2
