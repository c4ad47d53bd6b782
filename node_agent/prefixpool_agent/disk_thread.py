"""Calls that ask a disk which may hang: each has a thread that nobody need wait for, not even the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def asked(call: Callable[[], T]) -> asyncio.Future[T]:
    """What the call returns or raises. It goes on whoever waits; an answer that nobody takes is no error."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    def settle(result: T | None, error: Exception | None) -> None:
        if answer.done():
            return  # cancelled
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]  # T may be None

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:  # noqa: BLE001  it is raised where the answer is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(settle, result, error)

    # The loop's own threads are waited for when it ends, and so is every thread that is no daemon.
    threading.Thread(target=work, daemon=True, name="prefixpool-disk").start()
    return answer
