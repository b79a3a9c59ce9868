"""Several processes that train one model together, on PyTorch's own engine: torchrun, DDP and FSDP2."""
