"""Resolve, trace, replay → `Estimate`; the largest batch; what a single change would save."""
