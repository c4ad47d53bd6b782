"""How far a download is, as a file of the run directory: written by it, read by the agent."""

from __future__ import annotations

from pathlib import Path

import msgspec

from prefixpool import names
from prefixpool.wire import Download


class DownloadState(msgspec.Struct, frozen=True, kw_only=True):
    """`folder`: where all files are; "" while they are not."""

    download: Download
    folder: str = ""


def read(run_dir: Path) -> DownloadState | None:
    """None: nothing is downloaded here, or what is there is not ours."""
    try:
        return msgspec.json.decode((run_dir / names.RUN_DOWNLOAD).read_bytes(), type=DownloadState)
    except (OSError, msgspec.DecodeError):
        return None


def write(run_dir: Path, state: DownloadState) -> None:
    """At once or not at all. Raises OSError."""
    fresh = run_dir / f"{names.RUN_DOWNLOAD}.new"
    fresh.write_bytes(msgspec.json.encode(state))
    fresh.replace(run_dir / names.RUN_DOWNLOAD)


def model_folder(run_dir: Path, model: str) -> Path:
    """Where a model's files are: where it was downloaded to, or what it is called."""
    state = read(run_dir)
    return Path(state.folder if state is not None and state.folder and state.download.model == model else model)
