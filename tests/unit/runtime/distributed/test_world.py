"""What the environment says of the processes that were launched."""

import pytest

from vramfit.errors import WorkloadError
from vramfit.runtime.distributed.processes import World

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchruns_variables_are_read() -> None:
    world = World.of(TORCHRUN)
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)
    assert world is not None
    assert world.num_nodes == 2
    assert World.of({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("name", "value", "says"), [("RANK", "8", "beyond"), ("WORLD_SIZE", "many", "many"), ("LOCAL_RANK", "-1", "-1")]
)
def test_variables_that_make_no_sense_are_refused(name: str, value: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        World.of({**TORCHRUN, name: value})
