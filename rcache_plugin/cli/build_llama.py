"""``rcache build-llama``: compiles the adapter for llama-cpp-python."""

from __future__ import annotations

import argparse
import sys
import time

from .exits import EXIT_ERROR


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("build-llama", help="build the llama-cpp-python adapter", description=_build.__doc__)
    parser.set_defaults(command=_build)
    parser.add_argument("--force", action="store_true", help="compile anew")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what was found, show the compiler's output")


def _build(args: argparse.Namespace) -> int:
    """Compile the adapter between this package and the installed llama-cpp-python, unless that is done already."""
    from ..hosts.llama.adapter.build import ABOUT, Compiler, build
    from ..hosts.llama.adapter.errors import CompileFailed, LlamaBuildError
    from ..hosts.llama.adapter.folders import cache_dir
    from ..hosts.llama.adapter.found import DISTRIBUTION, find_install

    started = time.monotonic()
    try:
        install = find_install()
        print(f"{DISTRIBUTION} {install.version} in {install.folder}")
        if args.verbose:
            print(f"library: {install.libllama}\ncompiler: {Compiler.find()}\ncache folder: {cache_dir()}")
        path = build(install, force=args.force)
        if args.verbose:
            print((path.parent / ABOUT).read_text().strip())
        print(f"{path} ({time.monotonic() - started:.1f} s)")
        return 0
    except CompileFailed as e:
        output = f"\n--- all of the compiler's output\n{e.output}" if args.verbose else ""
        print(f"rcache: error: {e}{output}", file=sys.stderr)
    except LlamaBuildError as e:
        print(f"rcache: error: {e}", file=sys.stderr)  # in several lines, unlike other errors
    return EXIT_ERROR
