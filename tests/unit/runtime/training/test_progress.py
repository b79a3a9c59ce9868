"""How far a run has come, and which evaluation is the best."""

import json
import math

from vramfit.runtime.training.progress import Progress


def evaluated(*pairs: tuple[float, float], higher: bool = True) -> Progress:
    progress = Progress()
    for value, loss in pairs:
        progress.learned(10, 4)
        progress.lost(0.5)
        progress.evaluated(1.0, {"f1": value, "loss": loss}, value, higher=higher, time_s=0.1)
    return progress


def test_the_better_value_wins_and_the_loss_decides_between_equal_ones() -> None:
    assert evaluated((0.5, 1.0), (0.7, 2.0), (0.6, 0.1)).best_step == 2
    assert evaluated((0.5, 1.0), (0.5, 0.9), (0.5, 0.95)).best_step == 2
    assert evaluated((0.5, 1.0), (0.4, 1.0), higher=False).best_step == 2
    assert evaluated((0.5, 1.0), (math.nan, 0.0)).best_step == 1


def test_a_state_comes_back_as_it_was() -> None:
    progress = evaluated((0.5, 1.0), (0.4, 2.0))
    progress.losses.append(math.nan)
    again = Progress.from_state(json.loads(json.dumps(progress.state_dict())))
    assert again.evaluations == progress.evaluations
    assert (again.step, again.epoch, again.index, again.best_step) == (2, 0, 2, 1)
    assert again.num_without_better == 1
    assert again.last_losses(4) == [0.5, 0.5]


def test_the_losses_that_are_shown_are_those_of_one_epoch_at_most() -> None:
    progress = Progress()
    for loss in (4.0, 3.0, 2.0, math.nan, 0.25):
        progress.lost(loss)
    assert progress.last_losses(3) == [2.0, 0.25]
    assert progress.last_losses(1) == [0.25]
    assert progress.last_losses(1000) == [4.0, 3.0, 2.0, 0.25]
