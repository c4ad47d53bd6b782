"""How far a download is, in words."""

from __future__ import annotations

import pytest

from prefixpool.downloading import amount, step
from prefixpool.wire import Download

GIB = 1 << 30


def download(done: float, total: float) -> Download:
    return Download(model="m", done_bytes=int(done * GIB), total_bytes=int(total * GIB))


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (0.0, "0 %, 0 MiB of 8.0 GiB"),
        (3.3, "40 %, 3.2 GiB of 8.0 GiB"),
        (3.9, "40 %, 3.2 GiB of 8.0 GiB"),
        (8.0, "100 %, 8.0 GiB of 8.0 GiB"),
        (9.0, "100 %, 8.0 GiB of 8.0 GiB"),
    ],
)
def test_words_stay_the_same_during_a_step(done: float, words: str) -> None:
    assert amount(download(done, 8.0), 10) == words


def test_nothing_is_known_at_first() -> None:
    assert amount(download(0, 0), 10) == "size not known yet"
    assert step(download(0, 0), 10) == 0
