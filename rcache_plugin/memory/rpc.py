"""The connection of this process to a server of ggml's RPC backend: open, lost or none.

ggml's RPC client ends the process at the first call on a lost connection, and does not tell of one before. So its
socket is found among the open files of the process and peeked at; ggml itself is not asked.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import stat

from ..errors import InvalidArgument

ENDPOINT = re.compile(r"([^\s:\[\]]+):(\d{1,5})")
"""``host:port``"""


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port. Raises `InvalidArgument` when `endpoint` is not of the form ``host:port``."""
    match = ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match.group(2)) < 1 << 16:
        raise InvalidArgument(f"{endpoint!r} is not of the form host:port")
    return match.group(1), int(match.group(2))


def rpc_connection(endpoint: str) -> bool | None:
    """Whether the connection of this process to the RPC server at ``host:port`` is open (True) or lost (False); None
    without a connection, or where the system does not tell.

    A server that dies within a call, or a cable that is pulled, is not seen. A call takes some microseconds.
    """
    try:
        address = _resolve(*split_endpoint(endpoint))
    except OSError:
        return None
    known = _connections.get(address)
    state = None if known is None else _far_end(known, address)
    if state is None:
        _connections.pop(address, None)
        for descriptor in _open_descriptors():
            state = _far_end(descriptor, address)
            if state is not None:
                _connections[address] = descriptor
                break
    return state


def rpc_connectable(endpoint: str) -> bool:
    """Whether something at ``host:port`` accepts a connection."""
    try:
        with socket.create_connection(_resolve(*split_endpoint(endpoint)), timeout=5):
            return True
    except OSError:
        return False


_connections: dict[tuple[str, int], int] = {}
"""The file descriptor of the last known connection to each server. It is peeked at, never used or closed."""


@functools.lru_cache
def _resolve(host: str, port: int) -> tuple[str, int]:
    return socket.gethostbyname(host), port  # as ggml does; raises OSError


def _open_descriptors() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return [int(name) for name in os.listdir(folder)]
    return []


def _far_end(descriptor: int, address: tuple[str, int]) -> bool | None:
    """Whether the far end of a connection to `address` is still open; None when `descriptor` is no such one."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    except OSError:
        return None  # closed meanwhile
    try:
        if connection.getpeername() != address:
            return None
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True  # nothing to read, and nothing wrong
    except ConnectionResetError:
        return False
    except OSError:
        return None  # not connected
    finally:
        connection.detach()  # ggml owns it, and closes it
