"""Exit codes of the command line, beside 0."""

from __future__ import annotations

EXIT_NOT_INTACT = 1
"""`rcache inspect`: the file is damaged, or that can't be told."""
EXIT_NOT_READY = 1
"""`rcache doctor`: `rcache run` would not work here."""
EXIT_ERROR = 2
"""An error that was reported in one line; argparse uses the same."""
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
