"""Checkpoints to devices: streamed tensor by tensor, quantized on the way in, layers left on the host."""
