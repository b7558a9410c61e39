"""``python -m rcache_plugin``: the command line, as `rcache` starts it."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
