"""``rcache exec``: a program that uses llama_cpp, run on this package's cache."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "exec",
        help="run a llama-cpp-python program on this cache",
        usage="%(prog)s SCRIPT|-m MODULE [ARGUMENT ...]",
        description=_exec.__doc__,
    )
    parser.set_defaults(command=_exec, parser=parser)


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words for our parser, and the program: all that follows ``exec``, whose options are not ours."""
    if words[:1] == ["exec"] and words[1:] and words[1] not in ("-h", "--help"):
        return words[:1], words[1:]
    return words, []


def _exec(args: argparse.Namespace) -> int:
    """Run a Python script or module; its llama_cpp keeps recurrent states in this package's cache."""
    if args.program in ([], ["-m"]):
        args.parser.error("a script, or -m MODULE, is missing")
    from ..hosts.llama import install

    if args.program[0] != "-m":
        os.stat(args.program[0])  # a missing script is reported before anything is built
    install()
    return 0


def run_program(words: list[str]) -> None:
    """Runs ``SCRIPT ...`` or ``-m MODULE ...`` as python itself would."""
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent.resolve()))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
