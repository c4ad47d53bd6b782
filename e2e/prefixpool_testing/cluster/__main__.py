"""`scripts/cluster`: the test cluster by hand."""

from __future__ import annotations

import argparse
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prefixpool_testing.cluster import images, phases, toolchain, wheels
from prefixpool_testing.cluster.api_server import ApiServer, api_server
from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.cluster.node import fetch, node
from prefixpool_testing.cluster.product import install


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/cluster", description="A real Kubernetes on this machine, until Ctrl-C.")
    commands = parser.add_subparsers(dest="command", required=True)
    tools = commands.add_parser("tools", help="build Kubernetes' programs into the cache")
    tools.add_argument("groups", nargs="*", choices=[[], *toolchain.GROUPS], help="these (default: all)")
    commands.add_parser("images", help="build the images into the cache")
    commands.add_parser("prepare", help="both")
    commands.add_parser("phases", help="what the last `make e2e` took, as a table")
    commands.add_parser("wheels", help="the build context of images/Dockerfile").add_argument("folder", type=Path)
    commands.add_parser("api", help="the API server alone")
    commands.add_parser("node", help="a whole node, with operators of this checkout")
    chosen = parser.parse_args()
    try:
        _run(chosen)
    except ClusterError as error:
        sys.exit(f"scripts/cluster: {error}")


def _run(chosen: argparse.Namespace) -> None:
    if chosen.command == "tools":
        with phases.phase("programs"):
            toolchain.build(*chosen.groups)
    elif chosen.command == "images":
        print(images.archive())
    elif chosen.command == "prepare":
        _prepare()
    elif chosen.command == "phases":
        print(phases.table())
    elif chosen.command == "wheels":
        wheels.make(chosen.folder)
    elif chosen.command == "api":
        with api_server() as api:
            _stay(api)
    else:
        with node(images.archive()) as cluster:
            install(cluster)
            _stay(cluster.api)


def _prepare() -> None:
    """Beside each other: images and packages wait for downloads, programs for the compiler."""
    with phases.phase("programs and images"), ThreadPoolExecutor() as threads:
        for one in (threads.submit(toolchain.build), threads.submit(_fetch)):
            one.result()


def _fetch() -> None:
    fetch()
    images.archive()


def _stay(api: ApiServer) -> None:
    print(f"export KUBECONFIG={api.kubeconfig}\nexport PATH={toolchain.tool('kubectl').parent}:$PATH", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
