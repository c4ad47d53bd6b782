"""Listening on everything, on one address, and where there is no IPv6."""

from __future__ import annotations

import errno
import re
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from prefixpool.listening import available, bound, in_url, reachable

REAL = socket.getaddrinfo


def answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except ConnectionRefusedError:
        return False


def one(host: str, port: int, *, shared: bool = False) -> socket.socket:
    (sock,) = bound(host, port, shared=shared)
    return sock


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Every name stands for these."""

    def fake(_host: str, *arguments: Any, **options: Any) -> list[Any]:
        return [found for address in addresses for found in REAL(address, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", fake)


@pytest.mark.parametrize(
    ("host", "by_ipv4", "by_ipv6"),
    [("::", True, True), ("", True, True), ("0.0.0.0", True, False), ("127.0.0.1", True, False), ("::1", False, True)],
)
def test_pods_of_ipv6_first_clusters_were_not_reached_at_their_address(host: str, by_ipv4: bool, by_ipv6: bool) -> None:
    with one(host, 0) as sock:
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
    with one("::", 0) as sock:
        assert sock.family == socket.AF_INET


def test_a_name_with_several_addresses_was_heard_on_its_first_only(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "::1", "127.0.0.1", "127.0.0.1")
    with ExitStack() as closing:
        sockets = [closing.enter_context(sock) for sock in bound("localhost", 0)]
        for sock in sockets:
            sock.listen()
        (port,) = {sock.getsockname()[1] for sock in sockets}
        monkeypatch.undo()
        assert len(sockets) == 2
        assert answers("127.0.0.1", port)
        assert answers("::1", port)


def test_any_port_of_a_name_is_one_that_is_free_on_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel chose one that was free on the first."""
    resolving(monkeypatch, "127.0.0.1", "::1")
    refused = [True, True, False]

    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6 and refused.pop(0):
                raise OSError(errno.EADDRINUSE, "Address already in use")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Socket)
    sockets = bound("localhost", 0)
    assert refused == []
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        sock.close()


def test_an_address_that_this_machine_lacks_costs_a_name_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "2001:db8::1", "127.0.0.1")
    with one("pool.example", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    resolving(monkeypatch, "2001:db8::1", "2001:db8::2")
    with pytest.raises(OSError, match=r"pool\.example:0: Cannot assign requested address"):
        bound("pool.example", 0)


def test_one_taken_address_of_a_name_is_enough_to_refuse_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with one("::1", 0) as taken:
        taken.listen()
        resolving(monkeypatch, "127.0.0.1", "::1")
        with pytest.raises(OSError, match="Address already in use"):
            bound("localhost", taken.getsockname()[1])


def test_a_name_that_stands_for_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid:1"):
        bound("no.such.host.invalid", 1)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_no_name_can_be_ended_in_a_traceback(host: str) -> None:
    with pytest.raises(OSError, match=rf"{re.escape(host)}:1: Name or service not known"):
        bound(host, 1)


def test_a_port_that_is_taken_is_named() -> None:
    with one("::1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=rf"\[::1\]:{port}: Address already in use"):
            bound("::1", port)


def test_processes_may_share_a_port() -> None:
    with one("::", 0, shared=True) as first, one("::", first.getsockname()[1], shared=True) as second:
        assert first.getsockname() == second.getsockname()


@pytest.mark.parametrize(
    ("host", "url"),
    [("::", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_where_a_listener_is_reached_from_here(host: str, url: str) -> None:
    assert reachable(host) == url


def test_hosts_in_urls() -> None:
    assert [in_url(host) for host in ("fd00::1", "10.0.0.1", "pool.ns.svc")] == ["[fd00::1]", "10.0.0.1", "pool.ns.svc"]
