"""huggingface_hub's cache on disk, as far as we look into it: `models--org--name/{blobs,snapshots}`, `.locks`.

Its locks are flock(2). Where they hold (local disks, CephFS, NFS 4, NFS 3 with its lock manager) each file is downloaded
once. Where they silently do not (NFS mounted with `nolock` or `local_lock`), it may be downloaded once for each replica; it
is never damaged, because every download has a file of its own, which is renamed when it is whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from typing import Final
from urllib.parse import quote

import msgspec
from filelock import FileLock, Timeout

from prefixpool_agent.download.files import File, Listing

_INCOMPLETE: Final = ".incomplete"
_ABANDONED_S: Final = 60.0  # unwritten for so long, and nobody holds its lock: whoever wrote it was killed


class Cache:
    """Of one repository. `root`: huggingface_hub's HF_HUB_CACHE. Raises OSError."""

    def __init__(self, root: Path, model: str) -> None:
        name = f"models--{model.replace('/', '--')}"
        self.root = root
        self._folder = root / name
        self._blobs = self._folder / "blobs"
        self._locks = root / ".locks" / name

    def snapshot(self, listing: Listing) -> Path:
        """The folder of a commit's files."""
        return self._folder / "snapshots" / listing.commit

    def complete(self, listing: Listing) -> bool:
        folder = self.snapshot(listing)
        return bool(listing.files) and all(_size(folder / file.name) == file.size_bytes for file in listing.files)

    def on_disk(self) -> dict[str, int]:
        """Bytes by blob. Of one that is being written, those that have blocks: it may be written from several places."""
        found: dict[str, int] = {}
        if not self._blobs.is_dir():
            return found
        for path in self._blobs.iterdir():
            with suppress(FileNotFoundError):  # whole meanwhile, under its own name
                stat, whole = path.stat(), not path.name.endswith(_INCOMPLETE)
                size = stat.st_size if whole else min(stat.st_size, stat.st_blocks * 512)
                blob = path.name.partition(".")[0]
                found[blob] = max(found.get(blob, 0), size)
        return found

    def free_bytes(self) -> int:
        self.root.mkdir(parents=True, exist_ok=True)
        return disk_usage(self.root).free

    def remember(self, revision: str, listing: Listing) -> None:
        """So that the next start needs no Hub."""
        path = self._remembered(revision)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{time.time_ns()}")
        fresh.write_bytes(msgspec.json.encode(listing))
        fresh.replace(path)

    def remembered(self, revision: str) -> Listing | None:
        """What a revision was, if all of it is here."""
        with suppress(OSError, msgspec.DecodeError):
            listing = msgspec.json.decode(self._remembered(revision).read_bytes(), type=Listing)
            return listing if self.complete(listing) else None
        return None

    def _remembered(self, revision: str) -> Path:
        return self._folder / "prefixpool" / f"{quote(revision, safe='')}.json"

    def remove_abandoned(self, files: Iterable[File]) -> None:
        """What killed downloads left: huggingface_hub neither goes on with it nor removes it."""
        for file in files:
            leftovers = list(self._blobs.glob(f"{file.blob}*{_INCOMPLETE}"))
            if leftovers and (_size(self._blobs / file.blob) == file.size_bytes or self._abandoned(file, leftovers)):
                for path in leftovers:
                    path.unlink(missing_ok=True)

    def _abandoned(self, file: File, leftovers: list[Path]) -> bool:
        """Age counts as well, for file systems whose locks do not hold."""
        lock = FileLock(self._locks / f"{file.blob}.lock", mode=0o664)
        try:
            with lock.acquire(timeout=0):
                return all(time.time() - path.stat().st_mtime > _ABANDONED_S for path in leftovers)
        except (Timeout, NotImplementedError, OSError):
            return False


def _size(path: Path) -> int:
    """-1: there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
