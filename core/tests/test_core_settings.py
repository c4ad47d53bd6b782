"""Settings from flags and environment: what is refused at the start, by name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from prefixpool.errors import SettingsError
from prefixpool.settings import parse


class Level(StrEnum):
    LOW = "low"
    HIGH = "high"


class Times(msgspec.Struct, frozen=True, kw_only=True):
    timeout_s: Annotated[float, Meta(description="bounded below", gt=0)] = 1.0
    step_s: Annotated[float, Meta(description="not bounded")] = 1.0
    level: Annotated[Level, Meta(description="one of a few")] = Level.LOW
    name: Annotated[str, Meta(description="a text")] = ""


def read(flags: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Times:
    return parse(Times, flags, environment or {}, prefix="T", parser=argparse.ArgumentParser())


@pytest.mark.parametrize("words", ["inf", "1e300", "1e999", "1000001", "nan"])
@pytest.mark.parametrize("field", ["timeout_s", "step_s"])
def test_times_without_end_were_accepted_and_broke_every_connection(field: str, words: str) -> None:
    flag, variable = f"--{field.replace('_', '-')}", f"T_{field.upper()}"
    with pytest.raises(SettingsError, match=f"{flag}='{words}': "):
        read([flag, words])
    with pytest.raises(SettingsError, match=f"{variable}='{words}': "):
        read(environment={variable: words})


def test_days_are_no_time_without_end() -> None:
    assert read(["--timeout-s", "1000000"]).timeout_s == 1_000_000


def test_help_showed_words_that_were_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["--help"])
    assert "--level low|high" in capsys.readouterr().out
    with pytest.raises(SettingsError, match=r"--level='HIGH': .*; accepted: low, high"):
        read(["--level", "HIGH"])


@pytest.mark.parametrize("field", ["timeout_s", "level", "name"])
def test_a_value_that_is_no_text_ended_in_a_traceback(field: str) -> None:
    raw = b"\xff\xfe".decode("utf-8", "surrogateescape")  # as Python reads flags and environment
    with pytest.raises(SettingsError, match=rf"T_{field.upper()}='.*': not a text in UTF-8"):
        read(environment={f"T_{field.upper()}": raw})
