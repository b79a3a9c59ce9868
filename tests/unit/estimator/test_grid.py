"""What fits over batches and lengths is what single estimates say."""

import pytest

from vramfit.estimator import search as grid_module
from vramfit.estimator.predict import estimate
from vramfit.estimator.search import fit_grid
from vramfit.workload import Workload


def test_every_cell_is_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_module, "BATCHES", (1, 64))
    monkeypatch.setattr(grid_module, "SEQS", (16, 128, 4096))
    cells: list[tuple[int, int]] = []
    workload = Workload(model="bert-tiny", batch=8, seq=32, memory=200 * 2**20)  # type: ignore[arg-type]
    made = fit_grid(workload, on_cell=lambda done, total: cells.append((done, total)))
    assert (made.micro_batches, made.seqs) == ((1, 8, 64), (16, 32, 128))  # no longer than the model's positions
    assert cells == [(n, 9) for n in range(1, 10)]
    for y, batch in enumerate(made.micro_batches):
        for x, seq in enumerate(made.seqs):
            expected = estimate("bert-tiny", batch=batch, seq=seq, memory="200MiB")
            assert made.safe_reserved_bytes[y][x] == expected.safe_reserved_bytes
            assert made.fits[y][x] == expected.fits
    assert {fits for row in made.fits for fits in row} == {True, False}


def test_accumulation_is_kept() -> None:
    workload = Workload(model="bert-tiny", batch=8, accumulate=4, seq=16)
    made = fit_grid(workload)
    expected = estimate("bert-tiny", batch=8, accumulate=4, seq=16).safe_reserved_bytes
    assert made.safe_reserved_bytes[made.micro_batches.index(2)][made.seqs.index(16)] == expected
    assert made.capacity_bytes is None
