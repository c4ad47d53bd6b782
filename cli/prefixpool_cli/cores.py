"""Which cores the threads of CPU engines are bound to. No core gets a second engine while another has none.

Two engines on one core take turns, and their threads spin while they wait. So each claims its cores, of whichever pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prefixpool_cli.claims import Claims, claimed

_TRIES: Final = 50  # another pool may take a core between the look and the claim
_PREFIX: Final = "core-"


class Binding(NamedTuple):
    """One engine's cores, in order. `claims`: what to release once it has ended; `shared`: others are bound to some."""

    cores: tuple[int, ...]
    claims: tuple[str, ...]
    shared: bool

    @property
    def words(self) -> str:
        """As the engine takes them."""
        return ",".join(map(str, self.cores))


def shares(engines: int, loads: Mapping[int, int], most: int) -> list[tuple[int, ...]]:
    """Cores of each of so many new engines: different ones, the least bound first. Pure.

    `loads`: engines by core so far; `most`: cores for one engine. Only when there are more engines than cores do they share.
    """
    ranked = sorted(loads, key=lambda core: (loads[core], core))
    if not ranked or engines <= 0:
        return [()] * engines
    if engines >= len(ranked):
        return [(core,) for core in _one_by_one(engines, loads)]
    fewest = loads[ranked[engines - 1]]  # so many engines on a core must be borne
    usable = [core for core in ranked if loads[core] <= fewest]
    each = max(1, min(most, len(usable) // engines))
    return [tuple(sorted(usable[engine * each : (engine + 1) * each])) for engine in range(engines)]


def _one_by_one(engines: int, loads: Mapping[int, int]) -> Iterator[int]:
    counts = Counter(loads)
    for _ in range(engines):
        core = min(loads, key=lambda core: (counts[core], core))
        counts[core] += 1
        yield core


def bind(claims: Claims, engines: int, available: Sequence[int], pool: int) -> list[Binding]:
    """Claims for so many new engines of a pool that is to have `pool` of them on the available cores."""
    most = max(1, len(available) // max(1, pool))
    for tries_left in reversed(range(_TRIES)):
        before = loads_of(claimed(), available)
        bindings = _claim(claims, shares(engines, before, most), before)
        ours = Counter(core for binding in bindings for core in binding.cores)
        after = loads_of(claimed(), list(ours))
        alone = all(after[core] <= before[core] + times for core, times in ours.items())
        if alone or not tries_left:  # so many start at once: better shared than never
            return bindings
        claims.release(*(name for binding in bindings for name in binding.claims))
    raise AssertionError("there is a last try")


def loads_of(taken: Iterable[str], available: Sequence[int]) -> dict[int, int]:
    """Engines by core, as all pools have claimed them."""
    counts = Counter(name.split("-")[1] for name in taken if name.startswith(_PREFIX))
    return {core: counts[str(core)] for core in available}


def _claim(claims: Claims, chosen: Sequence[tuple[int, ...]], before: Mapping[int, int]) -> list[Binding]:
    times = Counter(core for cores in chosen for core in cores)
    return [
        Binding(
            cores,
            tuple(_claim_core(claims, core) for core in cores),
            any(before[core] or times[core] > 1 for core in cores),
        )
        for cores in chosen
    ]


def _claim_core(claims: Claims, core: int) -> str:
    """As one more engine on it."""
    place = 0
    while not claims.take(name := f"{_PREFIX}{core}-{place}"):
        place += 1
    return name
