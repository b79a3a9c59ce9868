"""The state that a model has beside its weights: kept before a window, and put back where it is done again."""
