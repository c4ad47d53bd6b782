"""Write crds/ from the code."""

from __future__ import annotations

from pathlib import Path

import yaml

from prefixpool.api import crd


def main() -> None:
    folder = Path(__file__).parent.parent / "crds"
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump(crd.definition(), sort_keys=False, width=120, allow_unicode=True)
    (folder / crd.FILE).write_text(f"# Made from the code by `make crds`. Change the code, not this file.\n{text}")


if __name__ == "__main__":
    main()
