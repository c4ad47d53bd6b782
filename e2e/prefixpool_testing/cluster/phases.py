"""What `make e2e` spends its time on: noted by whoever goes through a phase, shown at the end as a table.

The file to note it in is named by PREFIXPOOL_PHASES; without it nothing is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

_FILE: Final = "PREFIXPOOL_PHASES"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """One that came to its end: a line of the table."""
    began_s = time.monotonic()
    yield
    note(name, time.monotonic() - began_s)


def note(name: str, took_s: float) -> None:
    """A line of the table. Leading blanks of the name say that it is a part of the next line without."""
    if place := os.environ.get(_FILE):
        with Path(place).open("a") as file:
            file.write(f"{took_s:.1f}\t{name}\n")


def table() -> str:
    """Minutes and seconds by phase, in the order in which they ended."""
    place = os.environ.get(_FILE)
    if not place or not Path(place).exists():
        return ""
    rows = [line.partition("\t") for line in Path(place).read_text().splitlines()]
    whole_s = sum(float(took) for took, _, name in rows if not name.startswith(" "))
    return "\n".join(f"{_minutes(float(took))}  {name}" for took, _, name in [*rows, (f"{whole_s}", "", "in all")])


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
        name = f"{folder}, {at_once} at once" if at_once else f"{folder}, one after the other"
        config.pluginmanager.register(TestFiles(folder, name))
