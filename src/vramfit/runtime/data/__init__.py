"""Data sets: files read and checked, tokenized once, batched by length; metrics and predictions of what comes out."""
