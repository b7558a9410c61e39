"""What the tests of memory share."""

from __future__ import annotations

import pytest
from buffer_kit import SpyLib


@pytest.fixture
def lib() -> SpyLib:
    found = SpyLib.find()
    assert isinstance(found, SpyLib)
    found.log = []
    return found
