"""Docs that are made from code must be what the code says now; and no name of ours may shadow Python's own."""

from pathlib import Path

import pytest

from prefixpool_cli.reference import pages

PARTS = ("operator", "router", "node_agent", "core", "cli", "e2e", "crds", "charts")


@pytest.mark.parametrize("name", sorted(pages()))
def test_reference_pages_are_up_to_date(name: str, pytestconfig: pytest.Config) -> None:
    committed = pytestconfig.rootpath / "docs" / "reference" / name
    assert committed.read_text() == pages()[name], "run `make docs`"


def test_top_level_folders_are_no_packages(pytestconfig: pytest.Config) -> None:
    """`operator/__init__.py` would break Python itself (the standard library has a module of that name)."""
    wrong: list[Path] = []
    for part in PARTS:
        folder = pytestconfig.rootpath / part
        wrong += [path for path in (folder / "__init__.py", folder / "tests" / "__init__.py") if path.exists()]
    assert wrong == []
