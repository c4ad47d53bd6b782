"""A sim engine with one strange habit: `python -m prefixpool_testing.strange_sim HABIT <flags of prefixpool-sim>`.

What engines and connectors in the field were seen to do to their KV events (peers.md 3.A), done to ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

from prefixpool_agent.sim import main, pool, scheduler
from prefixpool_agent.sim.events import EventPublisher
from prefixpool_agent.sim.pool import MEDIUM_HOST, Event

LAST_BATCHES: Final = 3  # that a publisher sends before it dies


def byte_hashes() -> None:
    """Events carry whole SHA-256 digests, as vLLM's do where hashes are not cut to integers."""
    for module in (pool, scheduler):
        vars(module)["external"] = bytes


def placeholders() -> None:
    """Events of the host tier name hashes only, as vLLM's do without `self_describing_kv_events`."""
    publish = EventPublisher.publish

    def stripped(event: Event) -> Event:
        if event.get("medium") != MEDIUM_HOST or event["type"] != "BlockStored":
            return event
        return {**event, "token_ids": [], "block_size": 0, "parent_block_hash": None}

    def publish_stripped(self: EventPublisher, events: Sequence[Event]) -> None:
        publish(self, [stripped(event) for event in events])

    EventPublisher.publish = publish_stripped  # type: ignore[method-assign]  # patched on purpose


def no_endpoint() -> None:
    """No events at all, and no socket to ask for them, as if a flag had been forgotten."""
    EventPublisher.enabled = False  # type: ignore[assignment,method-assign]  # patched on purpose


def dying_publisher() -> None:
    """The publisher's thread dies after a few batches; the engine serves on."""
    publish, sent = EventPublisher.publish, 0

    def publish_some(self: EventPublisher, events: Sequence[Event]) -> None:
        nonlocal sent
        sent += bool(events)
        if sent <= LAST_BATCHES:
            publish(self, events)

    EventPublisher.publish = publish_some  # type: ignore[method-assign]  # patched on purpose


HABITS: Final[dict[str, Callable[[], None]]] = {
    "byte_hashes": byte_hashes,
    "placeholders": placeholders,
    "no_endpoint": no_endpoint,
    "dying_publisher": dying_publisher,
}

if __name__ == "__main__":
    HABITS[sys.argv.pop(1)]()
    main.main()
