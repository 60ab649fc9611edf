"""Takes a server of TensorFlow off all network interfaces but one.

TensorFlow's gRPC servers (a worker of a cluster, a tf.data service) listen on every interface, and have no option for
it. They ask for no password either: whoever reaches the port can run TensorFlow operations in the process. So, when
such a server is up, its listening socket is replaced by one of the same port on one address. gRPC waits for connections
with epoll, which watches open files and not their numbers, so the new socket is put where epoll watched the old one,
with gRPC's own mark.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
from contextlib import suppress
from pathlib import Path

EPOLL_CTL_ADD = 1
LOOPBACK = "127.0.0.1"
BACKLOG = 128
_WATCHED = re.compile(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)", re.MULTILINE)


class _Event(ctypes.Structure):
    """`struct epoll_event`, which has no gap on x86-64."""

    if os.uname().machine == "x86_64":
        _pack_ = 1
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]


def address_of(host: str) -> str:
    """Returns the address to listen on for a host by the name that its clients use.

    An address, or the name localhost, is meant as it stands: nothing else listens. Another name is for other hosts, and
    may resolve to an address that is not this machine's own. Then it is "", which means all interfaces.

    Example:
        >>> address_of("localhost"), address_of("10.0.0.7"), address_of("data-0")
        ('127.0.0.1', '10.0.0.7', '')
    """
    if host == "localhost":
        return LOOPBACK
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ""
    return "" if address.is_unspecified else str(address)


def bound_socket(address: str, port: int) -> socket.socket:
    """Returns a socket that has a port on one address of this machine, or on all if it is "", and does not listen.

    Raises:
        OSError: The port is in use, or the address is not this machine's.
    """
    bound = socket.socket(_family(address))
    try:
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def listening_socket(address: str, port: int, *, shares_port: bool = False) -> socket.socket:
    """Returns a socket that listens on one address of this machine, or on all interfaces if it is "".

    With `shares_port`, another socket of this user, which allows it too, may have the port.

    Raises:
        OSError: The port is in use, or the address is not this machine's.
    """
    return socket.create_server((address, port), family=_family(address), backlog=BACKLOG, reuse_port=shares_port)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen_only_on(address: str, port: int) -> bool:
    """Lets a gRPC server of this process, which is up, listen on one address only. An empty address changes nothing.

    Connections that are already made stay. One that is just being made is refused, and gRPC makes it again.

    Returns: Whether it listens there only. It cannot be changed without epoll (not Linux).
    Raises:
        OSError: The address is not this machine's.
    """
    if not address:
        return False
    watched = _watched()
    listening = [number for number in watched if _is_on_all(number, port)]
    for number in listening:
        with socket.socket(fileno=os.dup(number)) as old:
            old.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with listening_socket(address, port, shares_port=True) as own:
            own.setblocking(False)
            os.dup2(own.fileno(), number, inheritable=False)  # closes the old socket
        for epoll, events, data in watched[number]:
            event = _Event(events, data)
            if ctypes.CDLL(None, use_errno=True).epoll_ctl(epoll, EPOLL_CTL_ADD, number, ctypes.byref(event)) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return bool(listening)


def _watched() -> dict[int, list[tuple[int, int, int]]]:
    """Returns for each file that this process watches with epoll: the epoll file, the events and gRPC's mark."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    directory = Path("/proc/self/fdinfo")
    for epoll in directory.iterdir() if directory.is_dir() else ():
        with suppress(OSError):  # closed meanwhile
            for number, events, data in _WATCHED.findall(epoll.read_text()):
                found.setdefault(int(number), []).append((int(epoll.name), int(events, 16), int(data, 16)))
    return found


def _is_on_all(number: int, port: int) -> bool:
    """Whether a file is a socket that listens at a port of all interfaces."""
    try:
        with socket.socket(fileno=os.dup(number)) as found:
            name = found.getsockname()
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:  # no socket
        return False
    return bool(listens) and name[:2] in (("::", port), ("0.0.0.0", port))
