"""The saved map: whole or not at all, and never trusted blindly."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixpool.wire import Costs
from prefixpool_agent import saved_map
from prefixpool_agent.saved_map import VERSION, SavedMap

SAVED = SavedMap(version=VERSION, costs=Costs(prefill_s_per_token=1e-4), residency=b"facts")


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "map"
    saved_map.write(path, SAVED)
    assert saved_map.read(path) == SAVED
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80"])
def test_broken_file_is_no_map(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "map").write_bytes(content)
    assert saved_map.read(tmp_path / "map") is None


def test_missing_file_is_no_map(tmp_path: Path) -> None:
    assert saved_map.read(tmp_path / "map") is None


def test_other_version_is_no_map(tmp_path: Path) -> None:
    saved_map.write(tmp_path / "map", SavedMap(version=VERSION + 1, costs=Costs(), residency=b""))
    assert saved_map.read(tmp_path / "map") is None
