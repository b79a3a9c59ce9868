"""Checks of the environment and of models: one function a check, each gives findings."""
