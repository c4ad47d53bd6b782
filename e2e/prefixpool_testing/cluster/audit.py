"""What the API server's audit log says was asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

POLICY: Final = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""
WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})


class ObjectRef(msgspec.Struct, frozen=True, rename="camel"):
    """What a request was about."""

    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    api_group: str = ""


class User(msgspec.Struct, frozen=True):
    username: str = ""


class Status(msgspec.Struct, frozen=True):
    code: int = 0


class Request(msgspec.Struct, frozen=True, rename="camel"):
    """One answered request."""

    verb: str
    user: User
    user_agent: str = ""
    object_ref: ObjectRef = ObjectRef()
    response_status: Status = Status()
    stage_timestamp: str = ""

    @property
    def writes(self) -> bool:
        return self.verb in WRITES


def requests(log: Path, since_bytes: int = 0) -> Iterator[Request]:
    """Those that were logged after so many bytes of the log."""
    with log.open("rb") as lines:
        lines.seek(since_bytes)
        for line in lines:
            if line.endswith(b"\n"):  # the last one may be half written
                yield msgspec.json.decode(line, type=Request)
