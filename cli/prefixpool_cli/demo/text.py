"""Seeded prose for the workload: varied enough that two texts share no prefix by accident. Pure."""

from __future__ import annotations

from random import Random
from typing import Final

_WHO: Final = (
    "The night shift", "Our supplier", "The harbour office", "Each technician", "The review board", "A visiting auditor",
    "The northern depot", "Every contractor", "The records clerk", "Our insurer", "The pump crew", "A second inspector",
    "The ferry operator", "The planning group", "One of the trainees", "The laboratory", "The site manager", "Customs",
)  # fmt: skip
_DID: Final = (
    "reported", "replaced", "measured", "rejected", "repaired", "photographed", "catalogued", "postponed", "approved",
    "relabelled", "emptied", "sealed", "counted", "shipped", "returned", "recalibrated", "insured", "inspected",
)  # fmt: skip
_WHAT: Final = (
    "the copper valves", "seven crates of seed", "the old turbine", "both cooling lines", "a damaged hull plate",
    "the signal lamps", "three water meters", "the archive shelves", "the spare gearbox", "a batch of sensors",
    "the loading ramp", "twelve fire doors", "the diesel tanks", "the weather mast", "an unmarked parcel",
    "the brass fittings", "the eastern fence", "a pallet of ceramic filters", "the backup battery", "the tide gauge",
)  # fmt: skip
_WHEN: Final = (
    "before the first frost", "on Tuesday morning", "during the storm", "after two weeks of delay", "without notice",
    "at the request of the owner", "in the second quarter", "under the new rules", "against advice", "for the third time",
    "as the contract demands", "while the bridge was closed", "with help from the village", "near the end of the shift",
    "once the permit arrived", "despite a low budget",
)  # fmt: skip
_AND: Final = (
    "and nobody objected", "which cost {n} euros", "so the schedule slipped by {n} hours", "and {n} photographs were filed",
    "because form {n} was missing", "and the pressure fell to {n} millibar", "which the log records as entry {n}",
    "after {n} failed attempts", "and unit {n} stayed dark", "although rule {n} forbids it", "leaving {n} items unexplained",
    "and a deposit of {n} was paid",
)  # fmt: skip
_TOPICS: Final = (
    "cost", "delay", "pressure", "permit", "deposit", "supplier", "storm damage", "inspection", "missing form", "schedule",
    "insurance", "inventory", "repair", "shipment", "safety rule", "battery", "archive", "night shift",
)  # fmt: skip
_LEVELS: Final = ("INFO", "WARN", "ERROR", "DEBUG")
_PARTS: Final = ("scheduler", "intake", "billing", "cache", "ledger", "gateway", "indexer", "mailer", "watchdog", "storage")


def sentence(draw: Random) -> str:
    """About 16 words."""
    tail = draw.choice(_AND).format(n=draw.randrange(3, 9000))
    return f"{draw.choice(_WHO)} {draw.choice(_DID)} {draw.choice(_WHAT)} {draw.choice(_WHEN)}, {tail}."


def paragraph(draw: Random, sentences: int) -> str:
    """Sentences joined by spaces."""
    return " ".join(sentence(draw) for _ in range(sentences))


def document(draw: Random, title: str, paragraphs: int) -> str:
    """A titled report of numbered paragraphs, five sentences each."""
    body = "\n\n".join(f"{i}. {paragraph(draw, 5)}" for i in range(1, paragraphs + 1))
    return f"# {title} {draw.randrange(1000, 9999)}\n\n{body}"


def topic(draw: Random) -> str:
    """What a question is about."""
    return draw.choice(_TOPICS)


def log_lines(draw: Random, lines: int) -> str:
    """What a tool might print."""
    return "\n".join(
        f"{draw.choice(_LEVELS)} {draw.choice(_PARTS)}[{draw.randrange(100, 999)}]: {draw.choice(_DID)} {draw.choice(_WHAT)}"
        for _ in range(lines)
    )
