"""A model and a step, run on the meta device → the stream of requests CUDA would see."""
