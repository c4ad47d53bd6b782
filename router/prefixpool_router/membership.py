"""Who belongs to the pool: a static list, a file that is read again on change, or Kubernetes (kubernetes_members.py).

A source yields whole sets, never differences: whatever was missed while it could not look is made good by the next set.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

import msgspec

from prefixpool import names
from prefixpool.errors import SettingsError
from prefixpool.lasting_file import read_lasting

_log = logging.getLogger(__name__)
_NAME: Final = re.compile(names.REPLICA_NAME)


class MemberState(StrEnum):
    """What the source says of a replica; the agent and connections may say less of it, never more."""

    READY = "ready"
    NOT_READY = "not_ready"
    TERMINATING = "terminating"


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica. URLs are origins: scheme, host, port."""

    name: str
    engine: str
    agent: str | None = None
    state: MemberState = MemberState.READY


class MembershipSource(Protocol):
    """Where members come from."""

    @property
    def problem(self) -> str:
        """Why the last look failed, in words; empty when it did not. The last good set stays in force meanwhile."""
        ...

    def updates(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """Whole sets, the first as soon as it is known. Ends only when closed."""
        ...


class StaticMembers:
    """Members given once, by flags."""

    problem = ""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = check_members(members)

    async def updates(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """The one set."""
        yield self._members
        await asyncio.get_running_loop().create_future()  # it never changes: the reader cancels


class FileMembers:
    """Members from a JSON file, looked at every `interval_s`. A file that cannot be read leaves the last set in force."""

    def __init__(self, path: Path, interval_s: float) -> None:
        self._path = path
        self._interval_s = interval_s
        self.problem = f"{path}: not read yet"

    async def updates(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """A set each time the content of the file changed and is valid."""
        last: tuple[Member, ...] | None = None
        while True:
            members = self._read()
            if members is not None and members != last:
                last = members
                yield members
            await asyncio.sleep(self._interval_s)

    def _read(self) -> tuple[Member, ...] | None:
        # The whole content each time, not its modification time: config maps swap links and clocks jump. It is small.
        try:
            members = check_members(parse_members(read_lasting(self._path)))
        except OSError as error:
            self._failed(f"{self._path}: {error.strerror}")
            return None
        except SettingsError as error:
            self._failed(f"{self._path}: {error}")
            return None
        self.problem = ""
        return members

    def _failed(self, problem: str) -> None:
        if problem != self.problem:  # once, not twice a second
            _log.error("member file not usable, keeping the last set", extra={"problem": problem})
        self.problem = problem


def parse_members(content: bytes) -> list[Member]:
    """Members as JSON. Raises SettingsError."""
    try:
        return msgspec.json.decode(content, type=list[Member])
    except msgspec.DecodeError as error:
        raise SettingsError(f"members: {error}") from error


def check_members(members: Sequence[Member]) -> tuple[Member, ...]:
    """The same members with clean origins. Raises SettingsError that names the member."""
    seen: set[str] = set()
    for member in members:
        if not _NAME.fullmatch(member.name):
            raise SettingsError(f"replica name {member.name!r}: letters, digits, '.', '_' and '-' only, at most 253")
        if member.name in seen:
            raise SettingsError(f"replica {member.name} is listed twice")
        seen.add(member.name)
    return tuple(
        msgspec.structs.replace(
            member,
            engine=_origin(member.name, "engine", member.engine),
            agent=_origin(member.name, "agent", member.agent) if member.agent else None,
        )
        for member in members
    )


def members_from_flags(values: Sequence[str]) -> tuple[Member, ...]:
    """Members from `NAME=ENGINE_URL[,AGENT_URL]`, also when split at the commas already. Raises SettingsError."""
    members: list[Member] = []
    for value in (part for whole in values for part in whole.split(",")):
        if re.match(r"https?://", value):  # no name in front: the agent of the one before
            if not members or members[-1].agent:
                raise SettingsError(f"--replica {value!r}: expected NAME=ENGINE_URL[,AGENT_URL]")
            members[-1] = msgspec.structs.replace(members[-1], agent=value)
            continue
        name, equals, url = value.partition("=")
        if not equals:
            raise SettingsError(f"--replica {value!r}: expected NAME=ENGINE_URL[,AGENT_URL]")
        members.append(Member(name=name, engine=url))
    return check_members(members)


def _origin(name: str, what: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.port != 0 and _is_host(parts.hostname or "")
    except ValueError:
        valid = False
        parts = urlsplit("")
    if not valid or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise SettingsError(f"replica {name}: {what} URL {url!r}: expected http://HOST:PORT without a path")
    return f"{parts.scheme}://{parts.netloc}"


def _is_host(name: str) -> bool:
    """Whether it can be looked up. Raises UnicodeError, a ValueError, for labels that are empty or too long (`a..b`)."""
    return bool(name.encode("idna")) and name.isprintable() and " " not in name
