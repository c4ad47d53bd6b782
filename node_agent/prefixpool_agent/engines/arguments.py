"""Engine arguments of the user's: those that would undo ours are refused, with the reason. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prefixpool.errors import SettingsError


class Rules(NamedTuple):
    """What is refused. Long options by full name; one-dash options by how they begin, as argparse reads them."""

    long: Mapping[str, str]  # "--port" -> reason
    short: Mapping[str, str]  # "-tp" -> reason


def split(text: str) -> tuple[str, ...]:
    """Words of a shell-quoted string. Raises SettingsError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise SettingsError(f"--engine-args={text!r}: {error}; quote as in a shell") from error


def check(arguments: Sequence[str], rules: Rules) -> None:
    """Raises SettingsError that names the argument and says why it is refused and what to use instead."""
    for argument in arguments:
        reason = _reason(argument, rules)
        if reason is not None:
            raise SettingsError(f"engine argument {argument.partition('=')[0]} is refused: {reason}")


def _reason(argument: str, rules: Rules) -> str | None:
    if argument == "--":
        return "what follows it would not be read as options"
    if argument.startswith("--"):
        return _long_reason(argument, rules.long)
    if re.match(r"-[A-Za-z]", argument):
        return next((reason for start, reason in rules.short.items() if argument.startswith(start)), None)
    return None


def _long_reason(argument: str, refused: Mapping[str, str]) -> str | None:
    name = re.split(r"[=.+]", argument, maxsplit=1)[0].replace("_", "-")  # --kv-events-config.endpoint=... sets a part of it
    for option, reason in refused.items():
        if name == option or name == "--no-" + option[2:]:
            return reason
        if option.startswith(name):
            return f"it can be read as short for {option}; write option names in full"
    return None
