"""Claims on ports and cores: one owner each, whoever asks, and none behind a process that is gone."""

import errno
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec
import pytest

from prefixpool.api.engine import EngineKind
from prefixpool_cli import cores, ports
from prefixpool_cli.claims import Claims, claimed
from prefixpool_cli.errors import PoolError
from prefixpool_cli.pool_share import PoolShare
from prefixpool_cli.pool_spec import PoolSpec

NAME = "test-claim"
HOLDER = f"""
import sys
from prefixpool_cli.claims import Claims
claims = Claims()
print(claims.take({NAME!r}), flush=True)
sys.stdin.read()
"""


def test_a_claim_has_one_owner_until_it_is_given_back() -> None:
    with Claims() as first, Claims() as second:
        assert first.take(NAME)
        assert not second.take(NAME)
        assert not first.take(NAME)
        assert NAME in claimed()
        first.release(NAME, "never taken")
        assert second.take(NAME)
    assert NAME not in claimed()


def test_a_claim_of_a_killed_process_is_gone() -> None:
    with Popen([sys.executable, "-c", HOLDER], stdin=PIPE, stdout=PIPE, text=True) as holder, Claims() as claims:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert not claims.take(NAME)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert claims.take(NAME)


def test_children_do_not_inherit_claims() -> None:
    claims = Claims()
    assert claims.take(NAME)
    child = "import sys; print('here', flush=True); sys.stdin.read()"
    with Popen([sys.executable, "-c", child], stdin=PIPE, stdout=PIPE, text=True, close_fds=False) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "here\n", "the kernel wakes the parent before it has closed the child's files"
        claims.close()
        assert NAME not in claimed()


def test_claims_of_a_forgotten_owner_are_given_back() -> None:
    claims = Claims()
    assert claims.take(NAME)
    del claims
    assert NAME not in claimed()


def test_where_the_kernel_tells_nothing_nothing_is_known_to_be_claimed(tmp_path: Path) -> None:
    assert claimed(tmp_path / "none") == set()


class Forbidden(socket.socket):
    """In a sandbox without abstract names."""

    def bind(self, _: object) -> None:
        raise PermissionError(errno.EACCES, "permission denied")


def test_pool_did_not_start_in_a_sandbox_without_abstract_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as sandbox, Claims() as claims:
        sandbox.setattr("prefixpool_cli.claims.socket.socket", Forbidden)
        assert claims.take(NAME)
        assert not claims.take(NAME)
        claims.release(NAME)
        assert claims.take(NAME)
        assert [binding.cores for binding in cores.bind(claims, 2, [4, 5], 2)] == [(4,), (5,)]


# -- ports


def test_two_pools_that_started_at_once_chose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both looked before either listened."""
    monkeypatch.setattr(ports, "Random", Unshuffled)
    with Claims() as first, Claims() as second:
        chosen = [*ports.claim_ports(first, 3), *ports.claim_ports(second, 3)]
    assert len(set(chosen)) == 6


class Unshuffled:
    def shuffle(self, ports: list[int]) -> None:
        """Two pools with the same luck."""


def test_a_router_could_not_start_again_because_an_outgoing_connection_had_its_port() -> None:
    with ports.claimed_ports(20) as chosen:
        assert len(set(chosen)) == 20
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert all(port < first_ephemeral for port in chosen)


def test_a_strangers_port_is_not_given_and_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.claimed_ports(1) as (port,):
        pass
    monkeypatch.setattr(ports, "_port_range", lambda: [port])
    with Claims() as claims:
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", port))
            stranger.listen()
            with pytest.raises(PoolError, match="only 0 of 1 ports are free"):
                ports.claim_ports(claims, 1)
        assert ports.claim_ports(claims, 1) == [port]
        assert not ports.claim_port(claims, port)


# -- cores


@pytest.mark.parametrize(
    ("engines", "loads", "most", "chosen"),
    [
        (2, {0: 0, 1: 0}, 1, [(0,), (1,)]),
        (2, {0: 0, 1: 0, 2: 0, 3: 0, 4: 0}, 2, [(0, 1), (2, 3)]),
        (1, {0: 0, 1: 0}, 2, [(0, 1)]),
        (3, {4: 0, 7: 0}, 1, [(4,), (7,), (4,)]),
        (1, {}, 1, [()]),
        (0, {0: 0}, 1, []),
        # beside other pools
        (1, {0: 1, 1: 0}, 2, [(1,)]),
        (1, {0: 1, 1: 0, 2: 1, 3: 0}, 1, [(1,)]),  # one more engine of a pool that gave its others one each
        (2, {0: 1, 1: 1, 2: 0, 3: 0}, 2, [(2,), (3,)]),
        (1, {0: 1, 1: 1}, 2, [(0, 1)]),
        (2, {0: 2, 1: 1}, 1, [(1,), (0,)]),
        (3, {0: 5, 1: 0}, 1, [(1,), (1,), (1,)]),
        (3, {0: 1, 1: 1, 2: 1, 3: 0}, 1, [(3,), (0,), (1,)]),
    ],
)
def test_cores_are_shared_fairly_and_the_least_bound_go_first(
    engines: int, loads: dict[int, int], most: int, chosen: list[tuple[int, ...]]
) -> None:
    assert cores.shares(engines, loads, most) == chosen


CORES = (9001, 9002, 9003, 9004)  # no machine's, so that no pool's either


def test_engines_of_two_pools_were_bound_to_the_same_cores() -> None:
    with Claims() as first, Claims() as second, Claims() as third:
        ours = cores.bind(first, 2, CORES, 2)
        assert [binding.cores for binding in ours] == [CORES[:2], CORES[2:]]
        first.release(*ours[1].claims)
        theirs = cores.bind(second, 2, CORES, 2)
        assert [binding.cores for binding in theirs] == [(9003,), (9004,)]
        assert not any(binding.shared for binding in (*ours, *theirs))
        (one,) = cores.bind(third, 1, CORES, 1)
        assert one.shared
        assert cores.loads_of(claimed(), CORES) == dict.fromkeys(CORES, 2)
    assert cores.loads_of(claimed(), CORES) == dict.fromkeys(CORES, 0)


def test_more_engines_than_cores_share_them_and_say_so() -> None:
    with Claims() as claims:
        bindings = cores.bind(claims, 3, CORES[:2], 3)
        assert [(binding.words, binding.shared) for binding in bindings] == [("9001", True), ("9002", False), ("9001", True)]


def test_a_core_that_another_pool_took_in_between_is_not_bound_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with Claims() as slow, Claims() as fast:
        looks = iter([set, lambda: fast.take("core-9001-7") and claimed()])
        monkeypatch.setattr(cores, "claimed", lambda: next(looks, claimed)())
        (binding,) = cores.bind(slow, 1, CORES[:2], 2)
        assert binding.cores == (9002,)
        assert not binding.shared


# -- a pool's share

VLLM = PoolSpec(model="m", engine=EngineKind.VLLM, replicas=2)


@pytest.fixture
def share() -> Iterator[Callable[[PoolSpec], PoolShare]]:
    made: list[PoolShare] = []

    def make(spec: PoolSpec) -> PoolShare:
        made.append(PoolShare(spec))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_second_pool_gets_what_the_first_has_left(share: Callable[[PoolSpec], PoolShare]) -> None:
    first, second = share(VLLM), share(msgspec.structs.replace(VLLM, replicas=1))
    assert first.bind_cores(["a-0", "a-1"], CORES[:3]) == []
    assert second.bind_cores(["b-0"], CORES[:3]) == []
    assert (first.cores("a-0"), first.cores("a-1"), second.cores("b-0")) == ("9001", "9002", "9003")
    first.release("a-0")
    assert second.bind_cores(["b-1"], CORES[:3]) == []
    assert second.cores("b-1") == "9001"
    assert second.bind_cores(["b-2"], CORES[:3]) == ["b-2"], "that one has to share, and says so"


def test_sims_are_bound_to_no_cores(share: Callable[[PoolSpec], PoolShare]) -> None:
    sims = share(msgspec.structs.replace(VLLM, engine=EngineKind.SIM))
    assert sims.bind_cores(["a-0"], CORES) == []
    assert sims.cores("a-0") == ""


def test_ports_that_were_asked_for_are_claimed_before_engines_load(share: Callable[[PoolSpec], PoolShare]) -> None:
    with ports.claimed_ports(2) as (port, other):
        pass
    spec = msgspec.structs.replace(VLLM, port=port, admin_port=other, routers=2)
    first = share(spec)
    clients = first.router_ports()
    assert clients[0] == (port, other)
    assert len({each for pair in clients for each in pair}) == 4
    with pytest.raises(PoolError, match=f"another pool has claimed port {port}") as caught:
        share(spec).router_ports()
    assert "--port" in caught.value.hint
    with pytest.raises(PoolError, match=f"another pool has claimed port {other}"):
        share(msgspec.structs.replace(spec, port=0)).router_ports()


def test_ports_of_a_replica_that_left_are_given_back(share: Callable[[PoolSpec], PoolShare]) -> None:
    ours = share(VLLM)
    given = ours.ports("a-0")
    with Claims() as others:
        assert not ports.claim_port(others, given.engine)
        ours.release("a-0")
        assert ports.claim_port(others, given.engine)
        assert ports.claim_port(others, given.agent)
