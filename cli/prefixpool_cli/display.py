"""Live progress on a terminal; plain lines, one for each change, where there is none (CI logs, pipes)."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from prefixpool_cli.console import printable, shown
from prefixpool_cli.pool_watch import Stage


class PoolDisplay:
    """One line for each part of a pool while it starts. Call it with stages."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}
        self._progress = progress_bars(console)

    def __enter__(self) -> PoolDisplay:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def __call__(self, stage: Stage) -> None:
        if not self._console.is_terminal:
            if self._said.get(stage.part) != stage.words:
                self._said[stage.part] = stage.words
                line = f"{stage.part}: {stage.words} ({stage.elapsed_s:.0f} s)"
                self._console.print(shown(line), highlight=False)
            return
        task = self._tasks.get(stage.part)
        if task is None:
            task = self._tasks[stage.part] = self._progress.add_task(stage.part, total=1.0, words="")
        self._progress.update(task, completed=stage.fraction, words=printable(stage.words))
        if stage.ready:
            self._progress.stop_task(task)


class ArmDisplay:
    """One bar for each arm of the demo."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = progress_bars(console)
        self._tasks: dict[str, TaskID] = {}
        self._total: dict[str, int] = {}
        self._done: dict[str, int] = {}

    def __enter__(self) -> ArmDisplay:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def begin(self, name: str, total: int) -> None:
        """A new bar."""
        self._total[name] = total
        self._done[name] = 0
        self._tasks[name] = self._progress.add_task(name, total=total, words="")

    def advance(self, name: str, words: str) -> None:
        """One request more."""
        self._done[name] += 1
        done, total = self._done[name], self._total[name]
        self._progress.update(self._tasks[name], completed=done, words=f"{done}/{total}  {words}")
        if done == total:
            self._progress.stop_task(self._tasks[name])
        if not self._console.is_terminal and (done == total or done % max(1, total // 5) == 0):
            self._console.print(f"{name}: {done}/{total}  {words}", highlight=False)

    def note(self, name: str, words: str) -> None:
        """Words beside a bar, or a line of their own."""
        if self._console.is_terminal:
            self._progress.update(self._tasks[name], words=printable(words))
        else:
            self._console.print(shown(f"{name}: {words}"), highlight=False)


def progress_bars(console: Console) -> Progress:
    """Name, bar, time, words."""
    return Progress(
        TextColumn("{task.description:>20}", markup=False),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        console=console,
    )
