"""Names that no API server would take are refused where they are given."""

from __future__ import annotations

import pytest

from prefixpool.errors import SettingsError
from prefixpool.kubernetes_names import check_label, check_subdomain


@pytest.mark.parametrize("name", ["a", "0", "team-a", "x" * 63])
def test_names_of_namespaces(name: str) -> None:
    check_label("--namespaces", name)


@pytest.mark.parametrize("name", ["", "Team", "a b", "-a", "a-", "a.b", "a_b", "a/b", "a\n", "\u00e4", "x" * 64])
def test_impossible_names_of_namespaces(name: str) -> None:
    with pytest.raises(SettingsError, match=r"--namespaces .*expected lower-case letters, digits and '-'"):
        check_label("--namespaces", name)


@pytest.mark.parametrize("name", ["a", "a.b-c.0", "x" * 253])
def test_names_of_objects(name: str) -> None:
    check_subdomain("--lease-name", name)


@pytest.mark.parametrize("name", ["", "Lease", "a..b", ".a", "a.", "a.-b", "a/b", "a\n", "x" * 254])
def test_impossible_names_of_objects(name: str) -> None:
    with pytest.raises(SettingsError, match=r"--lease-name .*expected lower-case letters, digits, '-' and '.'"):
        check_subdomain("--lease-name", name)
