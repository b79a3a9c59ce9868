"""Live memory: what the allocator and the driver say, now and at the most."""
