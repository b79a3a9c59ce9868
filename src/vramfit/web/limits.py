"""How much one request, one prediction and all of them together may take."""

MAX_BATCH = 65_536
MAX_SEQ = 32_768
MAX_LABELS = 100_000
MAX_RANK = 1_024
MAX_NAME = 200
"""Characters of a model's or a GPU's name."""
QUICK_S = 20.0
"""Seconds of computing that an estimate may take."""
SLOW_S = 90.0
"""The same of a plan or of a largest batch."""
WALL_FACTOR = 4.0
"""So much longer may it take by the clock, on a machine that is busy with other things."""
MAX_WAITING = 512
"""Requests that wait for a worker; the next one is told to come again."""
MAX_REMEMBERED_BYTES = 48 * 2**20
"""Answers that are kept."""

BATCH_STOPS = (
    *range(1, 17),
    *(20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
"""Where the slider of the page halts; any other batch can be typed."""
SEQ_STOPS = (*range(32, 513, 32), 640, 768, 896, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROW_OF_GPUS = ("rtx-3060", "t4", "rtx-4080", "a10g", "rtx-4090", "a100-40gb", "l40s", "h100-sxm")
"""GPUs that the page names the largest batch for."""
