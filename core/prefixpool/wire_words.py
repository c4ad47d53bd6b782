"""Enums of wire messages, each with what a reader takes a value for that only a newer version knows."""

from __future__ import annotations

import re
from enum import IntEnum, StrEnum
from typing import Final

_WORD: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")


def is_word(value: object) -> bool:
    """Whether a newer version may have it for a name."""
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


class Tier(IntEnum):
    """Where a replica's blocks are. Smaller is nearer. ABSENT never travels as a published tier. Others may come later."""

    ABSENT = 0
    DEVICE = 1
    HOST = 2
    DISK = 3


class Mode(StrEnum):
    """How much routers know of a replica's cache (design: 4.7). One not known here: APPROXIMATE."""

    PRECISE = "precise"  # an agent with events
    APPROXIMATE = "approximate"  # what was sent there, with a TTL
    NONE = "none"  # load only

    @classmethod
    def _missing_(cls, value: object) -> Mode | None:
        return cls.APPROXIMATE if is_word(value) else None


class State(StrEnum):
    """Life of one engine, as its agent sees it. One not known here: FENCED."""

    STARTING = "starting"
    READY = "ready"
    FENCED = "fenced"  # draining: finishes what runs, takes nothing new
    STOPPED = "stopped"
    FAILED = "failed"  # given up; the reason says why

    @classmethod
    def _missing_(cls, value: object) -> State | None:
        return cls.FENCED if is_word(value) else None


class DiskCause(StrEnum):
    """Why a disk tier fails. Names of a metric's label. One not known here: BROKEN."""

    HANGS = "hangs"  # no answer at all
    LATE = "late"  # beyond the deadline of reads or writes
    FULL = "full"  # the file system's
    READ_ONLY = "read_only"
    DENIED = "denied"
    DAMAGED = "damaged"  # files are not what was written
    BROKEN = "broken"  # any other error of the system

    @classmethod
    def _missing_(cls, value: object) -> DiskCause | None:
        return cls.BROKEN if is_word(value) else None


class DrainPhase(StrEnum):
    """Steps of a drain, in order (design: 6). One not known here: WAITING."""

    NONE = "none"
    FENCING = "fencing"
    WAITING = "waiting"  # for in-flight 0 or the deadline
    STOPPING = "stopping"
    CLEANING = "cleaning"
    DONE = "done"

    @classmethod
    def _missing_(cls, value: object) -> DrainPhase | None:
        return cls.WAITING if is_word(value) else None
