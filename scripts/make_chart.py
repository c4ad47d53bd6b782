"""Write what the chart takes from elsewhere: the CRD from crds/, and README's table from the comments of values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

ROOT: Final = Path(__file__).parent.parent
CHART: Final = ROOT / "charts" / "prefixpool"
CRDS: Final = CHART / "files" / "crds"

_KEY: Final = re.compile(r"( *)([A-Za-z]+):")
_COMMENT: Final = re.compile(r" *# (-- )?(.+)")
_TABLE: Final = re.compile(r"(?<=<!-- values -->\n).*?(?=<!-- /values -->)", re.DOTALL)


class Value(NamedTuple):
    """One row: a value that is described."""

    path: tuple[str, ...]
    default: Any
    description: str


def described(text: str) -> Iterator[Value]:
    """Keys of values.yaml right below a comment that begins with "--"."""
    tree, path, words = yaml.safe_load(text), (), []
    for line in text.splitlines():
        if found := _COMMENT.fullmatch(line):
            words = [found[2]] if found[1] else [*words, found[2]] if words else []
        elif found := _KEY.match(line):
            path = (*path[: len(found[1]) // 2], found[2])
            if words:
                yield Value(path, _at(tree, path), " ".join(words))
            words = []
        else:
            words = []


def readme(text: str, values: str) -> str:
    """README.md with a table of today's values."""
    rows = [f"| `{'.'.join(one.path)}` | `{json.dumps(one.default)}` | {one.description} |" for one in described(values)]
    return _TABLE.sub("\n".join(["", "| value | default | what |", "|---|---|---|", *rows, "", ""]), text)


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def main() -> None:
    CRDS.mkdir(exist_ok=True)
    for crd in (ROOT / "crds").glob("*.yaml"):
        (CRDS / crd.name).write_bytes(crd.read_bytes())
    page = CHART / "README.md"
    page.write_text(readme(page.read_text(), (CHART / "values.yaml").read_text()))


if __name__ == "__main__":
    main()
