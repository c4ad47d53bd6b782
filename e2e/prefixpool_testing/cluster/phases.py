"""What `make e2e` spends its time on: noted by whoever goes through a phase, shown at the end as a table.

Parts of it run side by side. The folder of what a part leaves is named by PREFIXPOOL_E2E; without it nothing is noted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

import pytest

OUT: Final = Path(__file__).parents[3] / "build/e2e"
_PART: Final = "PREFIXPOOL_E2E"
_FILE: Final = "phases.tsv"


class _Phase(NamedTuple):
    """One that ended; times of the clock, in seconds. A name with leading blanks is a part of the next without."""

    began_s: float
    took_s: float
    name: str

    @classmethod
    def of(cls, line: str) -> Self:
        began_s, took_s, name = line.split("\t")
        return cls(float(began_s), float(took_s), name)

    @property
    def detail(self) -> bool:
        return self.name.startswith(" ")


def out() -> Path:
    """Where the tests of this process leave what is to be looked at: the folder of their part, if they are one."""
    return Path(os.environ.get(_PART, OUT))


@contextmanager
def phase(name: str) -> Iterator[None]:
    """One that came to its end: a line of the table."""
    began_s = time.monotonic()
    yield
    note(name, time.monotonic() - began_s)


def note(name: str, took_s: float) -> None:
    """A line of the table, for what ends now. Leading blanks of the name say that it is a part of the next line without."""
    if _PART in os.environ:
        out().mkdir(parents=True, exist_ok=True)
        with (out() / _FILE).open("a") as file:
            file.write(f"{time.time() - took_s:.1f}\t{took_s:.1f}\t{name}\n")


def table(folder: Path = OUT) -> str:
    """When each phase began and what it took, in minutes and seconds; part by part. At the end: from first to last."""
    parts = [list(map(_Phase.of, file.read_text().splitlines())) for file in folder.glob(f"*/{_FILE}")]
    rows = [row for part in sorted(filter(None, parts), key=_began_s) for row in part]
    if not rows:
        return ""
    first_s = _began_s(rows)
    whole_s = max(row.began_s + row.took_s for row in rows) - first_s
    lines = [
        f"{' ' * 6 if row.detail else _minutes(row.began_s - first_s)}  {_minutes(row.took_s)}  {row.name}" for row in rows
    ]
    return "\n".join((" began    took", *lines, f"{' ' * 6}  {_minutes(whole_s)}  in all"))


def _began_s(rows: list[_Phase]) -> float:
    """Of a part that was cut short there may be details only."""
    return min(row.began_s for row in [row for row in rows if not row.detail] or rows)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"


class TestFiles:
    """A plugin of pytest, for the process that hears of all tests: a phase for the run, with a part for each file."""

    __test__ = False

    def __init__(self, folder: str, name: str) -> None:
        self._folder = folder
        self._name = name
        self._began_s = time.monotonic()
        self._took_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, _ = report.nodeid.partition("::")
        if report.when == "call" and file.startswith(self._folder):  # without what all tests share
            self._took_s[file] = self._took_s.get(file, 0.0) + report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        for file, took_s in sorted(self._took_s.items()):
            note(f"  {file}", took_s)
        note(self._name, time.monotonic() - self._began_s)


def noted(config: pytest.Config, folder: str) -> None:
    """Registers the plugin for a folder of tests, unless this process runs them for another one."""
    if not hasattr(config, "workerinput"):
        at_once = config.getoption("numprocesses", None)
        how = f"{at_once} at once" if at_once else "one after the other"
        config.pluginmanager.register(TestFiles(folder, f"{out().name}: {folder}, {how}"))
