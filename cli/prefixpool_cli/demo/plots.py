"""Inline SVG plots: bars, cumulative curves, a scatter. Pure; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 560
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 14, 40


class Series(NamedTuple):
    """A named run of points; `colour` is a class of the style sheet, `c0` to `c5`."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """From data to pixels; `log` for a logarithmic one."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixels; values outside are held at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, four to nine of them."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            marks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [mark for mark in marks if self.low <= mark <= self.high]
        step = _round_step((self.high - self.low) / 5)
        return [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def bars(values: Sequence[tuple[str, str, float, float]], label: str) -> str:
    """Horizontal bars of fractions: (name, colour, value, ideal); the ideal is a line across its bar."""
    row = 38
    height = TOP + row * len(values) + BOTTOM
    x = Axis(0, 1, 150, WIDTH - RIGHT)
    out = [_vertical_grid(x, height, _percent)]
    for i, (name, colour, value, ideal) in enumerate(values):
        y = TOP + row * i
        out.append(f'<text x="{x.start - 8}" y="{y + 22}" text-anchor="end">{escape(name)}</text>')
        out.append(
            f'<rect class="fill {colour}" x="{x.start}" y="{y + 6}" width="{x.at(value) - x.start:.1f}" height="{row - 14}">'
            f"<title>{escape(name)}: {value:.3f} (ideal {ideal:.3f})</title></rect>"
        )
        out.append(f'<line class="ideal" x1="{x.at(ideal):.1f}" x2="{x.at(ideal):.1f}" y1="{y + 2}" y2="{y + row - 4}"/>')
        out.append(f'<text class="value" x="{x.start + 8}" y="{y + 22}">{value:.3f}</text>')
    out.append(_caption(label, height))
    return _svg(out, height)


def curves(series: Sequence[Series], label: str) -> str:
    """Cumulative distributions of seconds on a logarithmic axis; points are (seconds, fraction)."""
    seconds = [x for one in series for x, _ in one.points if x > 0] or [0.1, 1.0]
    low, high = min(seconds), max(seconds)
    x = Axis(low * 0.9, max(high * 1.1, low * 2), LEFT, WIDTH - RIGHT, log=True)
    y = Axis(0, 1, HEIGHT - BOTTOM, TOP)
    out = [_vertical_grid(x, HEIGHT, _duration), _horizontal_grid(y, _percent)]
    for one in series:
        path = " ".join(f"{x.at(s):.1f},{y.at(f):.1f}" for s, f in one.points)
        out.append(f'<polyline class="stroke {one.colour}" points="{path}"><title>{escape(one.name)}</title></polyline>')
    out.append(_caption(label, HEIGHT))
    return _svg(out, HEIGHT)


def scatter(series: Sequence[Series], band: float, label: str) -> str:
    """Predicted (x) against actual (y) tokens; the band around the diagonal is one block wide each way."""
    top = max([value for one in series for point in one.points for value in point] or [1.0]) * 1.05 or 1.0
    x = Axis(0, top, LEFT, WIDTH - RIGHT)
    y = Axis(0, top, HEIGHT - BOTTOM, TOP)
    corners = ((0.0, band), (top - band, top), (top, top), (top, top - band), (band, 0.0), (0.0, 0.0))
    out = [_vertical_grid(x, HEIGHT, _whole), _horizontal_grid(y, _whole)]
    out.append(f'<polygon class="band" points="{" ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in corners)}"/>')
    for one in series:
        dots = "".join(
            f'<circle class="dot {one.colour}" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3">'
            f"<title>{escape(one.name)}: predicted {a:.0f}, actual {b:.0f}</title></circle>"
            for a, b in one.points
        )
        out.append(dots)
    out.append(_caption(label, HEIGHT))
    return _svg(out, HEIGHT)


def legend(series: Sequence[Series]) -> str:
    """Names with their colours."""
    items = "".join(f'<span><i class="chip {one.colour}"></i>{escape(one.name)}</span>' for one in series)
    return f'<p class="legend">{items}</p>'


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, fraction of values up to it)."""
    ranked = sorted(values)
    return [(value, (i + 1) / len(ranked)) for i, value in enumerate(ranked)]


def _svg(parts: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _vertical_grid(axis: Axis, height: float, words: Words) -> str:
    bottom = height - BOTTOM
    return "".join(
        f'<line class="grid" x1="{axis.at(t):.1f}" x2="{axis.at(t):.1f}" y1="{TOP}" y2="{bottom:.0f}"/>'
        f'<text class="tick" x="{axis.at(t):.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{words(t)}</text>'
        for t in axis.ticks()
    )


def _horizontal_grid(axis: Axis, words: Words) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axis.at(t):.1f}" y2="{axis.at(t):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{axis.at(t) + 4:.1f}" text-anchor="end">{words(t)}</text>'
        for t in axis.ticks()
    )


def _caption(label: str, height: float) -> str:
    return f'<text class="caption" x="{WIDTH / 2:.0f}" y="{height - 4:.0f}" text-anchor="middle">{escape(label)}</text>'


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)


class Words:
    """How a tick is written."""

    def __init__(self, pattern: str, factor: float = 1.0) -> None:
        self._pattern = pattern
        self._factor = factor

    def __call__(self, value: float) -> str:
        return self._pattern.format(value * self._factor)


_percent = Words("{:.0f} %", 100)
_whole = Words("{:,.0f}")
_duration = Words("{:g} s")
