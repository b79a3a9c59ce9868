"""The command line: one file a verb, and the one place where errors become exit codes."""
