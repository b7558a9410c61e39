"""``rcache doctor``: what is here, what is missing, and the command that mends it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..exits import EXIT_NOT_READY

if TYPE_CHECKING:
    from .report import Part, Report


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("doctor", help="tell what is here and what is missing", description=_doctor.__doc__)
    parser.set_defaults(command=_doctor)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _doctor(args: argparse.Namespace) -> int:
    """Tell what is here, what is missing and the command that mends it; exit code 0 if `rcache run` works here, else
    1."""
    report = examine()
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        from .show import show

        show(report)
    return 0 if report.ready else EXIT_NOT_READY


def examine() -> Report:
    """Looks at all parts. What may crash is loaded in child processes, nothing in this one."""
    from .ggml import ggml_part
    from .llama import llama_part
    from .machine import cache_part, package_part, processor_part, python_part
    from .main_job import compiled_part, model_part, run_part
    from .packages import packages_part
    from .report import Report

    parts: dict[str, Part] = {}
    looks: dict[str, Callable[[], Part]] = {
        "python": python_part,
        "package": package_part,
        "packages": packages_part,
        "compiled": lambda: compiled_part(parts),
        "processor": processor_part,
        "ggml": lambda: ggml_part(parts),
        "model": lambda: model_part(parts),
        "run": lambda: run_part(parts),
        "llama": lambda: llama_part(parts),
        "cache": cache_part,
    }
    for name, look in looks.items():
        parts[name] = _guarded(look)
    return Report(parts)


def _guarded(look: Callable[[], Part]) -> Part:
    """A part that cannot be looked at must not hide the others."""
    from .report import Part

    try:
        return look()
    except Exception as e:
        part = Part("unknown", [f"{type(e).__name__}: {e}"])
        part.problem(f"looking at it failed: {type(e).__name__}: {e}", None)
        return part
