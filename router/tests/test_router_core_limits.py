"""What a router process may take on: open files, and a share of what all workers may together."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from prefixpool_router.processes import raise_file_limit
from prefixpool_router.settings import RouterSettings
from prefixpool_router.workers import of_one_worker

FILES = resource.RLIMIT_NOFILE


@pytest.fixture
def lowered() -> Iterator[int]:
    """The soft limit is; the hard one is told."""
    soft, hard = resource.getrlimit(FILES)
    resource.setrlimit(FILES, (min(1024, hard), hard))
    yield hard
    resource.setrlimit(FILES, (soft, hard))


def test_as_many_files_as_allowed_may_be_open(lowered: int) -> None:
    raise_file_limit()
    assert resource.getrlimit(FILES) == (lowered, lowered)


@pytest.mark.parametrize(("limit", "told"), [(4096, True), (20_000, False), (resource.RLIM_INFINITY, False)])
def test_a_low_limit_of_open_files_is_told(
    limit: int, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, _limits: None)
    raise_file_limit()
    assert ("few files may be open" in caplog.text) is told


def test_a_limit_that_may_not_be_raised_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(_which: int, _limits: tuple[int, int]) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(resource, "setrlimit", forbidden)
    raise_file_limit()
    assert "could not be raised" in caplog.text


@pytest.mark.parametrize(("limit", "workers", "each"), [(0, 4, 0), (100, 1, 100), (100, 3, 33), (2, 4, 1)])
def test_workers_share_what_all_may_serve_at_once(limit: int, workers: int, each: int) -> None:
    assert of_one_worker(RouterSettings(max_inflight=limit, workers=workers)).max_inflight == each
