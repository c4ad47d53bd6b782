"""Names as Kubernetes takes them, checked where a person gives them: an API server's refusal would come late, in a log."""

from __future__ import annotations

import re
from typing import Final

from prefixpool.errors import SettingsError

LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # of RFC 1123: namespaces; Services only where 1.34's gate for it is on
LABEL_MOST: Final = 63
SUBDOMAIN: Final = rf"{LABEL}(\.{LABEL})*"  # of RFC 1123: whatever is no part of a host name
SUBDOMAIN_MOST: Final = 253

_LABEL: Final = re.compile(LABEL)
_SUBDOMAIN: Final = re.compile(SUBDOMAIN)
_ENDS: Final = "with a letter or digit at both ends"


def check_label(setting: str, name: str) -> None:
    """Of a namespace or Service. Raises SettingsError."""
    if len(name) > LABEL_MOST or not _LABEL.fullmatch(name):
        raise SettingsError(
            f"{setting} {name!r}: expected lower-case letters, digits and '-', {_ENDS}, at most {LABEL_MOST}"
        )


def check_subdomain(setting: str, name: str) -> None:
    """Of most other objects. Raises SettingsError."""
    if len(name) > SUBDOMAIN_MOST or not _SUBDOMAIN.fullmatch(name):
        raise SettingsError(
            f"{setting} {name!r}: expected lower-case letters, digits, '-' and '.', {_ENDS}, at most {SUBDOMAIN_MOST}"
        )
