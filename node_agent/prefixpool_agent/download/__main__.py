"""Downloads, then becomes the engine: `python -m prefixpool_agent.download --model M … -- engine's argv`."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import constants
from huggingface_hub.utils.tqdm import disable_progress_bars

from prefixpool.downloading import amount
from prefixpool.wire import Download
from prefixpool_agent.download import state
from prefixpool_agent.download.cache import Cache
from prefixpool_agent.download.fetching import Fetching
from prefixpool_agent.download.hub import Hub
from prefixpool_agent.download.pace import STALLED, StuckError
from prefixpool_agent.download.state import DownloadState

_STEPS: Final = 20  # lines in the log from nothing to all


class Teller:
    """Into the run directory each time, and into the log where something new is to be said."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._said = ""

    def tell(self, download: Download) -> None:
        """Raises OSError."""
        state.write(self._run_dir, DownloadState(download=download))
        line = words(download)
        if line != self._said:
            self._said = line
            print(line, flush=True)  # noqa: T201  the engine's log, in the engine's place


def words(download: Download) -> str:
    """The same for a while, so that a log says it once."""
    if download.problem:
        return f"downloading {download.model} does not go on: {download.problem}; it is tried again"
    return f"downloading {download.model}: {amount(download, _STEPS)}"


def engine_argv(argv: Sequence[str], folder: Path) -> list[str]:
    """With the folder as its model."""
    at = argv.index("--model") + 1
    return [*argv[:at], str(folder), *argv[at + 1 :]]


def again_argv(order: argparse.Namespace, engine: Sequence[str], since_s: float) -> list[str]:
    """This program in a fresh process, as it was started; `since_s`: of the system's monotonic clock, which goes on."""
    given = ("--model", order.model, "--revision", order.revision, "--run-dir", order.run_dir)
    offline = ("--then-offline",) if order.then_offline else ()
    since = ("--since", repr(since_s))
    return [sys.executable, "-m", "prefixpool_agent.download", *given, *offline, *since, "--", *engine]


def main(argv: Sequence[str] | None = None) -> None:
    """Does not return: becomes the engine."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--")
    parser = argparse.ArgumentParser(prog="python -m prefixpool_agent.download", description=__doc__, allow_abbrev=False)
    for name in ("--model", "--revision", "--run-dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--then-offline", action="store_true", help="the engine fetches nothing else")
    parser.add_argument("--since", type=float, help="when bytes came last: one before this one was stuck")
    order = parser.parse_args(given[:at])
    disable_progress_bars()  # they are of single files, and no lines
    run_dir, cache = Path(order.run_dir), Cache(Path(constants.HF_HUB_CACHE), order.model)
    teller = Teller(run_dir)
    hub = Hub(constants.ENDPOINT, order.model, cache.root)
    teller.tell(Download(model=order.model, problem="" if order.since is None else STALLED))
    pause = threading.Event().wait
    try:
        folder = Fetching(
            order.model, order.revision, hub=hub, cache=cache, tell=teller.tell, pause=pause, since_s=order.since
        ).run()
    except StuckError as stuck:
        os.execv(sys.executable, again_argv(order, given[at + 1 :], stuck.since_s))
    state.write(run_dir, DownloadState(download=Download(model=order.model), folder=str(folder)))
    engine = engine_argv(given[at + 1 :], folder)
    if order.then_offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whoever set it to 0 knows of something else to fetch
    os.execv(engine[0], engine)


if __name__ == "__main__":
    main()
