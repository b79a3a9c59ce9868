"""`python -m vramfit`: the same as the `vramfit` command."""

from vramfit.cli.main import main

main()
