"""Checkpoints: what the files hold and what is wrong with them, told from headers, before anything is loaded."""
