"""kubectl, of the cluster's own version, with one kubeconfig."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.cluster.toolchain import tool

RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}
"""Labels of a namespace that takes pods of the restricted profile only."""
_TIMEOUT_S: Final = 300.0  # `delete` waits for the garbage collector


class Kubectl:
    """With the rights of `kubeconfig`."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """What it prints. Raises ClusterError with its words when it fails; `check` False: those words are the result."""
        done = subprocess.run(
            [tool("kubectl"), *arguments],
            env=self.environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode and check:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout + (done.stderr if done.returncode else "")

    async def kubectl_async(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """`kubectl`, while the event loop runs on."""
        return await asyncio.to_thread(self.kubectl, *arguments, stdin=stdin, check=check)

    def until_established(self, crd: str) -> None:
        """Until the API server serves a CustomResourceDefinition. `kubectl wait` fails on null conditions."""
        for what in ("jsonpath={.status.acceptedNames.plural}", "condition=Established"):
            self.kubectl("wait", f"--for={what}", f"crd/{crd}", "--timeout=30s")

    def get(self, *arguments: str) -> Any:
        """`kubectl get … -o json`, parsed."""
        return msgspec.json.decode(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: Any) -> str:
        """Objects as they would stand in a manifest; server-side apply, as the manager `kubectl`."""
        items = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        return self.kubectl("apply", "--server-side", "-f", "-", stdin=items)

    def make_namespaces(self, *names: str, labels: Mapping[str, str] | None = None) -> None:
        """Or relabel them. A pod would be refused until the controller manager has made their ServiceAccount: waited for."""
        meta = ({"name": name, "labels": dict(labels or {})} for name in names)
        self.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": one} for one in meta))
        for name in names:
            self.kubectl("-n", name, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")

    def environment(self) -> dict[str, str]:
        """For a program that should reach this cluster."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
