"""Write docs/reference/ from the code."""

from __future__ import annotations

from pathlib import Path

from prefixpool_cli.reference import pages


def main() -> None:
    folder = Path(__file__).parent.parent / "docs" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
