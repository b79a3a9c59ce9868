"""Search → `Plan`: the fastest settings that fit, or `NoPlanFits` with what is missing."""
