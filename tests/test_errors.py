"""Proves that statuses mirror the C header, and that each status has its exception and each exception its status."""

from __future__ import annotations

import re

import pytest

from rcache_plugin import errors
from rcache_plugin.capi import INCLUDE
from rcache_plugin.errors import RcacheError, SeqIdError, Status, check, status_of

HEADER = INCLUDE / "rcache_decl.h"


def statuses_of_the_header() -> dict[str, int]:
    (body,) = re.findall(r"enum rcache_status\s*{(.*?)};", HEADER.read_text(encoding="utf-8"), re.DOTALL)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    return {name: int(value) for name, value in re.findall(r"RCACHE_STATUS_(\w+)\s*=\s*(-?\d+)", body)}


def error_types() -> list[type[RcacheError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RcacheError)]
    assert len(found) >= 13
    return found


def test_statuses_equal_those_of_the_header() -> None:
    header = statuses_of_the_header()
    assert len(header) == 12
    assert {status.name: int(status) for status in Status} == header


def test_success_is_0_refusals_are_positive_errors_negative() -> None:
    assert Status.OK == 0
    assert {status for status in Status if status > 0} == {Status.NO_SLOT, Status.REFUSED}


@pytest.mark.parametrize("status", [status for status in Status if status < 0], ids=lambda status: status.name)
def test_a_negative_status_becomes_its_exception_and_back(status: Status) -> None:
    with pytest.raises(RcacheError, match="while finding a slot") as caught:
        check(status, "while finding a slot")
    assert status_of(caught.value) == status
    assert (type(caught.value) is RcacheError) == (status == Status.EXCEPTION)


@pytest.mark.parametrize("status", [status for status in Status if status >= 0], ids=lambda status: status.name)
def test_other_statuses_are_answers(status: Status) -> None:
    assert check(int(status), "anything") is status


def test_a_negative_status_that_nobody_knows_is_an_error_too() -> None:
    with pytest.raises(RcacheError, match="what it was"):
        check(-77, "what it was")


@pytest.mark.parametrize("kind", error_types(), ids=lambda kind: kind.__name__)
def test_every_exception_has_a_negative_status(kind: type[RcacheError]) -> None:
    assert kind.status in Status
    assert kind.status < 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SeqIdError(5, 4), Status.INVALID),
        (errors.StalePlan("x"), Status.INVALID),
        (errors.ClosedError("x"), Status.CLOSED),
        (errors.AbiMismatch("x"), Status.ABI),
        (errors.AllocationError("x"), Status.ALLOC),
        (errors.GgmlNotFound("x"), Status.BACKEND),
        (errors.CorruptTable("x"), Status.CORRUPT),
        (errors.StateError("x"), Status.IO),
        (errors.Unsupported("x"), Status.UNSUPPORTED),
        (ValueError("x"), Status.INVALID),
        (MemoryError(), Status.ALLOC),
        (ZeroDivisionError(), Status.EXCEPTION),
        (KeyboardInterrupt(), Status.EXCEPTION),
    ],
)
def test_status_of_an_exception(error: BaseException, status: Status) -> None:
    assert status_of(error) is status


def test_exceptions_can_be_caught_by_their_builtin_kind() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.AllocationError, MemoryError)
    assert issubclass(errors.GgmlNotFound, ImportError)
    assert issubclass(errors.Unsupported, NotImplementedError)
    assert not issubclass(errors.CorruptTable, ValueError)
    assert not issubclass(errors.StalePlan, ValueError)


def test_seq_id_error_has_the_id_and_the_limit() -> None:
    error = SeqIdError(12, 8, "seq_id_dst")
    assert (error.seq_id, error.n_seq_max) == (12, 8)
    for part in ("seq_id_dst", "12", "n_seq_max=8", "0 to 7"):
        assert part in str(error)
