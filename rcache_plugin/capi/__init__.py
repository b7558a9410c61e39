"""The C interface as Python sees it: the table that a host calls, and a client of such a table."""

from __future__ import annotations

from pathlib import Path

INCLUDE = Path(__file__).resolve().with_name("include")
"""Folder of the headers, for a compiler's ``-I``."""
