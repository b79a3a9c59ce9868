"""GPUs: a catalogue of those that exist, the cloud instances that hold them, a probe of those present."""
