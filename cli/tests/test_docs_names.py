"""What the documents name must exist: tests, folders, make targets."""

import re
from pathlib import Path

import pytest

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "THREAT_MODEL.md")


def _named(root: Path, document: str, pattern: str) -> list[str]:
    return re.findall(pattern, (root / document).read_text())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_that_documents_name_exist(document: str, pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    missing = [
        name
        for name in _named(root, document, r"\b(test_[a-z0-9_]+)(?:\.py|_\*|\*)")
        if not any(root.glob(f"[a-z]*/**/{name}*.py"))
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_that_documents_name_exist(document: str, pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    targets = set(re.findall(r"^([a-z0-9-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = set(_named(root, document, r"(?:^    |`|\n)make ([a-z0-9-]+)"))
    assert named <= targets
