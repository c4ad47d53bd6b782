"""Listening on everything, on one address, and where there is no IPv6."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from prefixpool.listening import available, bound, in_url, reachable


def answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except ConnectionRefusedError:
        return False


@pytest.mark.parametrize(
    ("host", "by_ipv4", "by_ipv6"),
    [("::", True, True), ("0.0.0.0", True, False), ("127.0.0.1", True, False), ("::1", False, True)],
)
def test_pods_of_ipv6_first_clusters_were_not_reached_at_their_address(host: str, by_ipv4: bool, by_ipv6: bool) -> None:
    with bound(host, 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert (answers("127.0.0.1", port), answers("::1", port)) == (by_ipv4, by_ipv6)


def test_where_the_kernel_has_no_ipv6_everything_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    class Socket(socket.socket):
        def __init__(self, family: int = -1, *arguments: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *arguments)

    monkeypatch.setattr(socket, "socket", Socket)
    assert (available("::"), available("::1"), available("0.0.0.0")) == ("0.0.0.0", "::1", "0.0.0.0")
    with bound("::", 0) as sock:
        assert sock.family == socket.AF_INET


def test_a_port_that_is_taken_is_named() -> None:
    with bound("::1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=rf"\[::1\]:{port}: Address already in use"):
            bound("::1", port)


def test_processes_may_share_a_port() -> None:
    with bound("::", 0, shared=True) as first, bound("::", first.getsockname()[1], shared=True) as second:
        assert first.getsockname() == second.getsockname()


@pytest.mark.parametrize(
    ("host", "url"),
    [("::", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_where_a_listener_is_reached_from_here(host: str, url: str) -> None:
    assert reachable(host) == url


def test_hosts_in_urls() -> None:
    assert [in_url(host) for host in ("fd00::1", "10.0.0.1", "pool.ns.svc")] == ["[fd00::1]", "10.0.0.1", "pool.ns.svc"]
