"""Counts the findings of a valgrind log that are ours: one of the three innermost frames is in this project's C files.

The interpreter and numpy have findings of their own, which are not looked at.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OURS = re.compile(r"\((_?rcache|abi_scenario)\.c:\d+\)")


def findings(log: str) -> tuple[int, list[str]]:
    """(how many findings there are in all, those of ours)."""
    log = re.sub(r"(?m)^==\d+== ?", "", log)
    blocks = [block for block in re.split(r"\n\s*\n", log) if re.search(r"(?m)^ +(at|by) 0x", block)]
    ours = []
    for block in blocks:
        frames = re.findall(r"(?m)^ +(?:at|by) 0x.*$", block)
        if any(OURS.search(frame) for frame in frames[:3]):
            ours.append(block)
    return len(blocks), ours


def main() -> int:
    n_all, ours = findings(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    print("\n\n".join(ours))
    print(f"valgrind: {len(ours)} findings of this project's ({n_all} in all, the interpreter's among them)")
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
