"""The step: one piece of code that trains, evaluates or infers, on meta tensors and on real ones alike."""
