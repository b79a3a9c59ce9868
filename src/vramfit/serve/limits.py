"""How much one request, all that wait, and one batch may take."""

MAX_BODY_BYTES = 8 * 2**20
"""Of one request; SageMaker passes 6 MB on to a real-time endpoint."""
MAX_REQUEST_TOKENS = 65_536
"""Of all texts of one request, as cut; a long context counts every window."""
MAX_REQUEST_CHARACTERS = 16 * MAX_REQUEST_TOKENS
"""Of its texts, each as far as it is tokenized."""
MAX_WAITING = 1024
"""Requests that wait for a worker; the next one is told to come again."""
MAX_WAITING_BYTES = 256 * 2**20
"""What their bodies may take together."""
MAX_COMING_BYTES = 256 * 2**20
"""The same of requests that have not come whole yet."""
TIMEOUT_S = 55.0
"""Until an answer; SageMaker gives up after 60."""
BODY_S = 20.0
"""Until a request has been sent whole."""
STOP_S = 20.0
"""After a polite kill, what still waits is told to come again; SageMaker kills after 30."""
CONTEXT_BYTES = 700 * 2**20
"""What CUDA takes for each further worker on a GPU, where the budget is what is free: 701 MiB on an H200 after
attention."""
MAX_SAMPLES_A_BATCH = 256
"""Of full length: beyond, nothing is gained."""
CPU_TOKENS = 1_024
"""Of a batch on a CPU: more are no faster, and everybody waits for them."""
OFFLOADED_BATCHES = (8, 4, 2, 1)
"""Samples of full length that are tried where layers wait in host memory: the fewer, the more layers stay."""
BYTES_A_TOKEN = 4
"""Of a request's body, roughly: how it is guessed what a request weighs before it is read."""
