"""The Helm chart, rendered by Helm's own library in this process: no cluster, no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

Raw = dict[str, Any]

FOLDER: Final = Path(__file__).parents[2] / "charts" / "prefixpool"
RELEASE: Final = "prefixpool"
NAMESPACE: Final = "prefixpool-system"
CI: Final[Mapping[str, Raw]] = {
    file.stem.removesuffix("-values"): yaml.safe_load(file.read_text()) for file in sorted((FOLDER / "ci").glob("*.yaml"))
}


def files(values: Raw | None = None, *, release: str = RELEASE, namespace: str = NAMESPACE) -> Mapping[str, str]:
    """Text by template. Raises HelmError, HelmValuesError for values that the schema refuses."""
    with helm_python.Chart.load(FOLDER) as chart:
        return chart.render(values or {}, name=release, namespace=namespace)


def objects(values: Raw | None = None, *, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Raw]:
    """All that `helm install` would send, the test's pod included."""
    rendered = files(values, release=release, namespace=namespace)
    manifests = (text for name, text in rendered.items() if name.endswith(".yaml"))
    return [found for text in manifests for found in yaml.load_all(text, yaml.CSafeLoader) if found]


def complaints(values: Raw) -> list[str]:
    """Of `helm lint --strict`, those for information left out."""
    report = helm_python.lint(FOLDER, values, strict=True, namespace=NAMESPACE)
    return [*report["errors"], *(one["error"] for one in report["messages"] if one["severity"] > 1)]
