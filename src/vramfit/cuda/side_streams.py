"""CUDA streams beside the usual one. Memory asked for on a stream serves only that stream, even when it is free.

FSDP2 gathers layers and scatters gradients on streams of their own, so that they run beside the passes
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.11): what it gathers into is asked for on one, what
is left of the gradients on another. All else, also what gathered layers are copied to, is on the usual stream.
"""

ALL_GATHER = "all_gather"
SHARDED_GRADIENT = "sharded_gradient"
SIDE_STREAMS = {ALL_GATHER: 1, SHARDED_GRADIENT: 2}
"""By the operator of a request; any number but 0, which is the usual stream's."""
