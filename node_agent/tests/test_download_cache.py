"""Downloads into a cache that replicas share, by huggingface_hub itself, from a Hub that is played here."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from prefixpool.wire import Download
from prefixpool_agent.download import fetching
from prefixpool_agent.download.cache import Cache
from prefixpool_agent.download.fetching import Fetching
from prefixpool_agent.download.files import DownloadError
from prefixpool_agent.download.hub import Hub
from prefixpool_agent.download.pace import STALLED, StuckError
from prefixpool_testing.fake_hub import COMMIT, FakeHub

MODEL = "org/model"
WEIGHTS = 300_000
BLOBS = f"models--{MODEL.replace('/', '--')}/blobs"


class EnoughError(Exception):
    """A test has seen what it wanted to see."""


class Replica:
    """What one replica's download says and finds."""

    def __init__(
        self,
        hub: FakeHub,
        root: Path,
        *,
        revision: str = "main",
        tries: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.said: list[Download] = []
        self.pauses: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self._tries = tries
        self.fetching = Fetching(
            MODEL,
            revision,
            hub=Hub(hub.url, MODEL, root),
            cache=Cache(root, MODEL),
            tell=self.said.append,
            pause=self._pause,
            clock=clock,
        )

    def run(self) -> Path:
        return self.fetching.run()

    def problem(self) -> str:
        """Of a download that does not come to its end."""
        with pytest.raises(EnoughError):
            self.run()
        return self.said[-1].problem

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.meanwhile()
        if len(self.pauses) >= self._tries:
            raise EnoughError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(WEIGHTS))
    (folder / "README.md").write_text("never asked for")
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    with FakeHub(model, MODEL) as hub:
        yield hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_two_replicas_fetch_each_file_once(hub: FakeHub, model: Path, root: Path) -> None:
    hub.hold(at_bytes=65_536)
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(Replica(hub, root).run) for _ in range(2)]
        until(lambda: "model.safetensors" in hub.downloads)
        hub.release()
        folders = {run.result(60) for run in runs}
    (folder,) = folders
    assert folder.name == COMMIT
    assert sorted(hub.downloads) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert list((root / BLOBS).glob("*.incomplete")) == []


def test_how_far_it_is_is_told_by_both_while_one_of_them_fetches(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_LOOK_S", 0.02)
    hub.hold(at_bytes=131_072)
    replicas = [Replica(hub, root) for _ in range(2)]
    total = sum(hub.files[name].stat().st_size for name in hub.files if name != "README.md")
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(one.run) for one in replicas]
        try:
            until(lambda: all(one.said and one.said[-1].total_bytes == total for one in replicas))
        finally:
            hub.release()
        for run in runs:
            run.result(60)
    assert all(one.said[-1].done_bytes == total for one in replicas)


def test_a_download_without_bytes_was_waited_for_without_a_word(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_LOOK_S", 0.01)
    hub.hold(at_bytes=65_536)
    minutes = iter(range(1, 1000))

    def clock() -> float:
        """Time flies once the weights do not come."""
        return 60.0 * next(minutes) if "model.safetensors" in hub.downloads else 0.0

    replica = Replica(hub, root, clock=clock)
    with ThreadPoolExecutor() as pool:
        run = pool.submit(replica.run)
        with pytest.raises(StuckError):
            run.result(60)
        hub.release()
    problems = [one.problem for one in replica.said]
    assert problems[0] == ""
    assert problems[-1] == STALLED
    assert replica.pauses == [], "no error of the Hub's library"


def test_a_restart_at_a_commit_asks_nobody(hub: FakeHub, root: Path) -> None:
    first = Replica(hub, root, revision=COMMIT).run()
    asked = len(hub.asked)
    assert Replica(hub, root, revision=COMMIT).run() == first
    assert len(hub.asked) == asked


def test_a_restart_of_a_branch_needs_no_hub(hub: FakeHub, root: Path) -> None:
    first = Replica(hub, root).run()
    hub.close()
    assert Replica(hub, root).run() == first


def test_a_cache_that_others_fill_needs_no_hub_where_it_is_said_so(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in Replica(hub, root).problem()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = Replica(hub, root).run()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert Replica(hub, root).run() == folder, "what we downloaded"
    shutil.rmtree(root / "models--org--model/prefixpool")
    assert Replica(hub, root, revision=COMMIT).run() == folder, "what anybody did"
    assert len(hub.asked) == asked


def test_a_cache_that_is_complete_may_be_read_only(hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(30, "Read-only file system")

    folder = Replica(hub, root).run()
    monkeypatch.setattr(Cache, "remember", closed)
    monkeypatch.setattr(Cache, "remembered", lambda *_: None)
    assert Replica(hub, root).run() == folder


def test_a_file_that_is_gone_is_fetched_again(hub: FakeHub, root: Path) -> None:
    folder = Replica(hub, root, revision=COMMIT).run()
    (folder / "model.safetensors").resolve().unlink()
    hub.downloads.clear()
    assert Replica(hub, root, revision=COMMIT).run() == folder
    assert hub.downloads == ["model.safetensors"]


def test_what_is_whole_is_not_fetched_again_after_a_kill(hub: FakeHub, root: Path) -> None:
    """A killed download leaves the files that were whole, and a part of one that nobody will go on with."""
    Replica(hub, root).run()
    blob = root / BLOBS / hub.digests["model.safetensors"]
    blob.unlink()
    left = blob.with_name(f"{blob.name}.12345678.incomplete")
    left.write_bytes(b"x" * 1000)
    hub.downloads.clear()
    Replica(hub, root).run()
    assert hub.downloads == ["model.safetensors"]
    assert not left.exists()


@pytest.mark.parametrize(("held", "age_s", "stays"), [(False, 3600, False), (True, 3600, True), (False, 0, True)])
def test_what_another_one_may_be_writing_stays(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch, held: bool, age_s: float, stays: bool
) -> None:
    digest = hub.digests["model.safetensors"]
    left = root / BLOBS / f"{digest}.12345678.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    os.utime(left, times=(time.time() - age_s,) * 2)
    lock = FileLock(root / ".locks" / "models--org--model" / f"{digest}.lock")
    if held:
        lock.acquire()
    cache = Cache(root, MODEL)
    cache.remove_abandoned(Hub(hub.url, MODEL, root).listing("main").files)
    lock.release()
    assert left.exists() is stays


def test_a_token_opens_what_is_closed_and_its_absence_is_told(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    assert "spec.model.tokenSecret" in Replica(hub, root).problem()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert Replica(hub, root).run().is_dir()


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "needs a token"), (404, "check spec.model.source"), (503, "answers HTTP 503")],
)
def test_what_the_hub_refuses_is_told_and_tried_again(hub: FakeHub, root: Path, status: int, words: str) -> None:
    hub.refuse(status)
    replica = Replica(hub, root, tries=6)
    assert words in replica.problem()
    assert replica.pauses == [2, 4, 8, 16, 30, 30]


def test_it_goes_on_once_the_hub_is_back(hub: FakeHub, root: Path) -> None:
    hub.refuse(503)
    replica = Replica(hub, root, tries=2)
    replica.meanwhile = lambda: hub.refuse(0)
    assert replica.run().is_dir()
    assert replica.said[-1].problem == ""


def test_no_hub_at_all_is_told(hub: FakeHub, root: Path) -> None:
    hub.close()
    assert "is it open to pods" in Replica(hub, root).problem()


def test_a_disk_without_room_is_told_before_it_is_filled(hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "free_bytes", lambda _: 1000)
    assert "0 MiB free" in Replica(hub, root).problem()
    assert hub.downloads == []


def test_a_disk_that_fills_up_meanwhile_is_told(hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert "no space is left in" in Replica(hub, root).problem()


def test_a_cache_that_may_not_be_written_is_told(hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", closed)
    assert "must belong to the pod's user or group" in Replica(hub, root).problem()


def test_a_repository_without_weights_is_told(hub: FakeHub, root: Path) -> None:
    del hub.files["model.safetensors"]
    assert "has no weights that the engine reads" in Replica(hub, root).problem()


def until(true: Callable[[], bool], within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)  # noqa: TID251 - threads, no event loop


def test_signed_addresses_of_files_stood_in_logs_and_in_the_pools_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> str:
        raise RuntimeError(
            "HTTP status 403 for url (https://store.example/xorbs/1a?Signature=s3cret&Expires=9) after 5 tries"
        )

    monkeypatch.setattr("prefixpool_agent.download.hub.hf_hub_download", refuses)
    with pytest.raises(DownloadError) as told:
        Hub("https://hub.example", MODEL, tmp_path).fetch(COMMIT, "model.safetensors")
    assert "HTTP status 403 for url (https://store.example/xorbs/1a) after 5 tries" in str(told.value)
    assert "s3cret" not in str(told.value)
