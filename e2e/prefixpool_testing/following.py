"""A membership source, read as the fleet reads it, for tests that want to know what it said."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from prefixpool_router.membership import Member, MembershipSource
from prefixpool_testing.eventually import PATIENCE_S, eventually


class Follower:
    """`sets`: all that came."""

    def __init__(self, source: MembershipSource) -> None:
        self.source = source
        self.sets: list[tuple[Member, ...]] = []

    @property
    def members(self) -> dict[str, Member]:
        """The last set by name."""
        return {member.name: member for member in self.sets[-1]} if self.sets else {}

    async def until(self, check: Callable[[], bool], *, what: str, within_s: float = PATIENCE_S) -> None:
        async def checked() -> bool:
            return check()

        now = f"{what}; known: {list(self.members)}, problem: {self.source.problem!r}"
        await eventually(checked, within_s=within_s, what=now)

    async def knows(self, *names: str, within_s: float = PATIENCE_S) -> None:
        """Until these and no others are members."""
        await self.until(
            lambda: bool(self.sets) and list(self.members) == list(names), what=f"members {names}", within_s=within_s
        )

    async def problem(self, words: str) -> None:
        """Until the source says so; "" is that all is well."""
        await self.until(
            lambda: words in self.source.problem if words else not self.source.problem, what=f"the problem {words!r}"
        )

    async def run(self) -> None:
        async with contextlib.aclosing(self.source.updates()) as sets:
            async for members in sets:
                self.sets.append(members)


@contextlib.asynccontextmanager
async def following(source: MembershipSource) -> AsyncIterator[Follower]:
    follower = Follower(source)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
