"""The command line: its commands, and how errors are reported.

The extra ``mamba`` brings what the commands need beyond the core; each imports that when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import RcacheError
from . import build_llama, devices, doctor, exec, include_dir, inspect, run
from .exits import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED

COMMANDS = (run, devices, inspect, build_llama, exec, include_dir, doctor)
"""In the order of ``rcache --help``."""

_EXTRA_MODULES = ("ggml", "gguf", "rich", "tokenizers")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own arguments) and returns its exit code."""
    words, program = exec.split(sys.argv[1:] if argv is None else list(argv))
    args = _parser().parse_args(words)
    args.program = program
    code = _reported(args)
    if program and code == 0:
        exec.run_program(program)  # outside _reported: its exceptions are its own
    return code


def _reported(args: argparse.Namespace) -> int:
    """Runs the command; what the user can mend is reported in one line."""
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] not in _EXTRA_MODULES:
            raise
        return _fail(f"{e.name} is not installed; the extra has it: pip install 'rcache-plugin[mamba]'")
    except (RcacheError, OSError) as e:
        return _fail(str(e))


def _fail(message: str) -> int:
    print(f"rcache: error: {'; '.join(message.splitlines())}", file=sys.stderr)
    return EXIT_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rcache", description="Recurrent-state cache for llama.cpp hosts.")
    parser.add_argument("--version", action="version", version=f"rcache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
