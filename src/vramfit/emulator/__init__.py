"""A GPU of any size on the CPU: real arithmetic, the simulated allocator as its memory."""
