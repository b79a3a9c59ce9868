"""The inference server: requests batched by tokens inside a memory budget, computed in worker processes."""
