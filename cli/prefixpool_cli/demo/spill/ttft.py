"""Time to first token of single prompts by where their prefix is: nowhere, on the device, in host memory, on disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Final, NamedTuple

import msgspec

from prefixpool_cli.demo.report import Goal, goal
from prefixpool_cli.demo.spill.figures import TierTokens

HOST_OF_DEVICE: Final = 1.8
DISK_OF_DEVICE: Final = 4.0
DISK_OF_COLD: Final = 0.15  # of the longest prompt


class Way(StrEnum):
    """Where the prefix of a prompt is when it is sent."""

    COLD = "cold"
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Probe(NamedTuple):
    """One answer of one token. `seconds`: until a client of the router had it; `tokens`: where the prefix came from."""

    prompt_tokens: int
    way: Way
    seconds: float
    tokens: TierTokens

    @property
    def is_stray(self) -> bool:
        """The prefix, all but the last token, came from elsewhere."""
        wanted = {} if self.way is Way.COLD else {str(self.way): self.prompt_tokens - 1}
        return self.tokens != TierTokens(**wanted)


class TierTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Medians, in seconds; 0: none was seen. `strays` are in none of them: their prefix came from elsewhere."""

    cold_s: float
    device_s: float
    host_s: float
    disk_s: float
    probes: int
    strays: int


def tier_times(probes: Sequence[Probe]) -> dict[str, TierTimes]:
    """By prompt tokens, as the report file has them."""
    lengths = sorted({probe.prompt_tokens for probe in probes})
    return {str(length): _times([probe for probe in probes if probe.prompt_tokens == length]) for length in lengths}


def _times(probes: Sequence[Probe]) -> TierTimes:
    sound = [probe for probe in probes if not probe.is_stray]
    medians = {way: median([p.seconds for p in sound if p.way is way] or [0.0]) for way in Way}
    return TierTimes(
        cold_s=medians[Way.COLD],
        device_s=medians[Way.DEVICE],
        host_s=medians[Way.HOST],
        disk_s=medians[Way.DISK],
        probes=len(probes),
        strays=len(probes) - len(sound),
    )


def ttft_goals(times: Mapping[str, TierTimes]) -> list[Goal]:
    """None without probes. Disk against cold is judged at the longest prompt only: short ones are soon computed."""
    seen = []
    for length, each in times.items():
        seen.append(_ratio(f"{length} tokens: host restore / device hit", each.host_s, each.device_s, HOST_OF_DEVICE))
        seen.append(_ratio(f"{length} tokens: disk restore / device hit", each.disk_s, each.device_s, DISK_OF_DEVICE))
    if times:
        length, longest = max(times.items(), key=lambda item: int(item[0]))
        seen.append(_ratio(f"{length} tokens: disk restore / cold", longest.disk_s, longest.cold_s, DISK_OF_COLD))
        probes, strays = sum(each.probes for each in times.values()), sum(each.strays for each in times.values())
        words = f"{strays} of {probes} did not"
        seen.append(goal("timed prefixes came whole from where they should", words, strays == 0))
    return seen


def _ratio(words: str, this_s: float, that_s: float, most: float) -> Goal:
    ratio = this_s / that_s if that_s else 0.0
    return goal(
        f"{words}: at most {most:g}", f"{ratio:.3f} ({_ms(this_s)}, {_ms(that_s)})", 0 < ratio <= most, timing=ratio > 0
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
