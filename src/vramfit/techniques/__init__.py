"""One file a technique: each changes a model or a step, on the meta device and on a real one alike."""
