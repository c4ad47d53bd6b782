"""Kubernetes quantities: `64Gi`, `1.5T`, `500m`, 4."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Final

_BYTES: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?$"
_ANY: Final = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?$"
_UNITS: Final = {
    **{unit + "i": 1024**power for power, unit in enumerate("KMGTPE", start=1)},
    **{unit: 1000**power for power, unit in enumerate("kMGTPE", start=1)},
}
_MOST: Final = 2**63 - 1  # what the API server's own quantities hold
LENGTH_MOST: Final = 32


class Bytes(int):
    """A number of bytes, at least 1, written as a quantity."""

    pattern = _BYTES

    @classmethod
    def parse(cls, raw: Any) -> Bytes:
        """Fractions of a byte are rounded up. ValueError says what a quantity looks like."""
        text = _text(raw, _BYTES, "write e.g. 64Gi")
        number = re.match(r"[0-9.]+", text)
        assert number
        unit = text[number.end() :]
        size = -(-Fraction(number.group()) * _UNITS.get(unit, 1) // 1)
        if not 0 < size <= _MOST:
            raise ValueError(f'"{text}" is no usable number of bytes; write e.g. 64Gi')
        return cls(size)


class Amount(str):
    """Any quantity, kept as it is written: what pods request goes through unread."""

    __slots__ = ()
    pattern = _ANY

    @classmethod
    def parse(cls, raw: Any) -> Amount:
        return cls(_text(raw, _ANY, "write e.g. 64Gi, 2 or 500m"))


def _text(raw: Any, pattern: str, example: str) -> str:
    text = str(raw) if isinstance(raw, str | int) and not isinstance(raw, bool) else ""
    if len(text) > LENGTH_MOST or not re.fullmatch(pattern, text):
        raise ValueError(f'"{raw}" is not a quantity; {example}')
    return text
