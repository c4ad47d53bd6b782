"""What a loading engine is doing, read from its log: so that a minute of loading is not a silent one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple


class Progress(NamedTuple):
    """`fraction`: 0 to 1, by stage, not by time; it never falls while a start goes on."""

    text: str
    fraction: float

    @property
    def ready(self) -> bool:
        return self.fraction >= 1.0


STARTING: Final = Progress("starting", 0.0)
_WEIGHTS_FROM: Final = 0.35
_WEIGHTS_TO: Final = 0.6

# vLLM 0.32, in the order in which a start writes them; not every start writes all (no graphs on CPU or with eager).
_SIGNS: Final = (
    ("non-default args", Progress("reading the model's configuration", 0.1)),
    ("Initializing a V1 LLM engine", Progress("starting the engine", 0.2)),
    ("Starting to load model", Progress("loading weights", _WEIGHTS_FROM)),
    ("Loading weights took", Progress("weights loaded", _WEIGHTS_TO)),
    ("Starting torch.compile", Progress("compiling", 0.65)),
    ("Warming up model", Progress("warming up", 0.7)),
    ("Available KV cache memory", Progress("profiling memory", 0.75)),
    ("KV cache size", Progress("allocating the KV cache", 0.8)),
    ("Capturing CUDA graphs", Progress("capturing graphs", 0.85)),
    ("init engine (profile", Progress("engine initialised", 0.9)),
    ("Starting vLLM server", Progress("starting the API server", 0.95)),
    ("Application startup complete", Progress("ready", 1.0)),
)
_SHARDS: Final = re.compile(r"checkpoint shards:\s+(\d+)% Completed")


def progress_of_line(line: str) -> Progress | None:
    """None: the line says nothing about progress."""
    shards = _SHARDS.search(line)
    if shards:
        percent = min(int(shards[1]), 100)
        return Progress(f"loading weights {percent} %", _WEIGHTS_FROM + (_WEIGHTS_TO - _WEIGHTS_FROM) * percent / 100)
    return next((progress for sign, progress in _SIGNS if sign in line), None)


def progress(lines: Iterable[str], before: Progress = STARTING) -> Progress:
    """The furthest stage that these lines and earlier ones speak of. Begin with STARTING at each engine start."""
    found = (progress_of_line(line) for line in lines)
    return max((before, *(stage for stage in found if stage is not None)), key=lambda stage: stage.fraction)
