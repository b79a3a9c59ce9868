"""Runs: the code that was predicted, on real tensors."""
