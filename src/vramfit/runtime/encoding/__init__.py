"""Vectors of texts, streamed from any data to a file: part by part, and gone on with where a run has ended."""
