"""What each kernel asks of the allocator besides its outputs, and in which order: one file a family."""
