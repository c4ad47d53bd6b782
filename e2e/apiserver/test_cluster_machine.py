"""What nodes and parts of `make e2e` that run side by side share of a machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from ipaddress import IPv4Address, IPv4Network
from itertools import combinations
from pathlib import Path
from threading import Thread

import pytest

from prefixpool_testing.cluster import cache, phases, wheels
from prefixpool_testing.cluster.network import SLOTS, Network, first_address, free_network, network_of

NETWORKS = [network_of(slot) for slot in range(SLOTS)]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_nodes_in_different_slots_share_no_address_and_no_name() -> None:
    for one, other in combinations(NETWORKS, 2):
        assert not IPv4Network(one.whole).overlaps(IPv4Network(other.whole))
        assert (one.link, one.cgroup) != (other.link, other.cgroup)


@pytest.mark.parametrize("network", NETWORKS)
def test_services_pods_and_the_cable_of_a_node_are_apart(network: Network) -> None:
    whole, services, pods = (IPv4Network(one) for one in (network.whole, network.services, network.pods))
    assert services.subnet_of(whole)
    assert pods.subnet_of(whole)
    assert not services.overlaps(pods)
    assert IPv4Address(first_address(network.services)) in services
    for address in map(IPv4Address, (network.machine_address, network.node_address)):
        assert address in whole
        assert address not in services
        assert address not in pods


def test_nodes_take_different_slots_and_wait_when_there_is_none() -> None:
    with ExitStack() as stack:
        assert [stack.enter_context(free_network()) for _ in range(SLOTS)] == NETWORKS
        found: list[Network] = []

        def wait() -> None:
            with free_network() as network:
                found.append(network)

        waiting = Thread(target=wait)
        waiting.start()
        waiting.join(0.1)
        assert not found
    waiting.join(10)
    assert found == NETWORKS[:1]


def test_an_archive_of_yesterday_is_not_removed_from_under_those_who_asked_for_it(tmp_path: Path) -> None:
    used, unused = tmp_path / "used", tmp_path / "unused"
    for folder in (used, unused):
        folder.mkdir()
        os.utime(folder, (0, time.time() - 2 * 86400))
    cache.forget_unused(used, 86400)
    assert used.exists()
    assert not unused.exists()


def test_any_change_of_pyproject_made_all_layers_of_the_images_anew() -> None:
    project = (wheels.ROOT / "pyproject.toml").read_text()
    assert wheels.pins(project.replace("timeout = 120", "timeout = 121")) == wheels.pins(project)
    for asked in ('"msgspec>=', '"pyzmq>='):
        assert wheels.pins(project.replace(asked, asked + "9,>=")) != wheels.pins(project)


def test_two_parts_that_removed_old_archives_at_once_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, removed = tmp_path / "used", tmp_path / "removed"
    used.mkdir()
    monkeypatch.setattr(Path, "glob", lambda *_: [removed])
    cache.forget_unused(used, 86400)
    assert used.exists()


def test_the_table_tells_when_parts_began_and_what_all_of_it_took(tmp_path: Path) -> None:
    told = {
        "pools": ["1060\t600\tpools: e2e/cluster"],
        "api": ["1000\t30\t  file", "1000\t300\tapi: e2e/apiserver"],
        "prepared": ["1000\t60\tprograms and images"],
    }
    for part, lines in told.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "phases.tsv").write_text("".join(f"{line}\n" for line in lines))
    shown = phases.table(tmp_path).splitlines()
    assert shown[-2:] == ["  1:00   10:00  pools: e2e/cluster", "         11:00  in all"]
    assert "          0:30    file" in shown
    assert shown.index("          0:30    file") + 1 == shown.index("  0:00    5:00  api: e2e/apiserver")


def test_the_table_shows_a_part_that_was_cut_short(tmp_path: Path) -> None:
    """It once ended in a traceback."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/phases.tsv").write_text("1000\t60\t  the node, with the product\n")
    assert phases.table(tmp_path).splitlines()[1:] == [
        "          1:00    the node, with the product",
        "          1:00  in all",
    ]


HOLDER = """
import os, signal
from pathlib import Path
import pytest
from prefixpool_testing.cluster.interruption import sigterm_as_ctrl_c

@pytest.fixture
def cable():
    Path("cable").touch()
    yield
    Path("cable").unlink()

def test(cable):
    sigterm_as_ctrl_c()
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigwait({signal.SIGTERM})
"""


def test_a_run_that_was_ended_by_sigterm_left_its_cable(tmp_path: Path) -> None:
    (tmp_path / "test_holder.py").write_text(HOLDER)
    program = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_holder.py")
    found = {**os.environ, "PYTHONPATH": str(Path(phases.__file__).parents[2])}
    done = subprocess.run(program, cwd=tmp_path, env=found, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert not (tmp_path / "cable").exists()
