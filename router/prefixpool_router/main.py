"""`prefixpool-router`: reads settings and runs one process, or several that share a port."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from prefixpool import settings as reading
from prefixpool.errors import SettingsError
from prefixpool_router.processes import raise_file_limit, run, set_up, stop_on_signals
from prefixpool_router.serve import Router
from prefixpool_router.settings import PREFIX, RouterSettings
from prefixpool_router.workers import serve_with_workers

_DESCRIPTION: Final = """\
One OpenAI- and Anthropic-compatible endpoint for a pool of vLLM replicas. Each request goes to the replica that most
likely still has its prompt's prefix in its KV cache, as long as that replica is not too busy.

Start it with the replicas as flags, in a file that it reads again whenever it changes, or found in Kubernetes:

  prefixpool-router --replica pool-0=http://10.0.0.1:8100,http://10.0.0.1:8101 --replica pool-1=http://10.0.0.2:8100
  prefixpool-router --members members.json --engine-key-file engine.key --workers 2
  prefixpool-router --kubernetes-service pool-replicas        in a pod; its ServiceAccount may read EndpointSlices

  members.json: [{"name": "pool-0", "engine": "http://10.0.0.1:8100", "agent": "http://10.0.0.1:8101", "state": "ready"}]

A replica with an agent (second URL) is known precisely; one without is routed by what was sent there.
"""
_EPILOG: Final = """\
Then ask the admin port:

  curl localhost:8001/readyz                    ready? if not, why
  curl localhost:8001/state                     every replica, how well its cache is known, and why
  curl localhost:8001/explain?n=5               why the last requests went where they went
  curl localhost:8001/metrics                   Prometheus

SIGTERM drains: not ready at once, still accepting for --drain-accept-s, then running answers end. Ctrl-C skips the wait.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status as processes.run."""
    parser = argparse.ArgumentParser(
        prog="prefixpool-router",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    try:
        settings = reading.parse(
            RouterSettings, sys.argv[1:] if argv is None else argv, os.environ, prefix=PREFIX, parser=parser
        )
    except SettingsError as error:
        sys.stderr.write(f"prefixpool-router: {error}\n")
        return 2
    set_up(settings)
    raise_file_limit()
    return run(lambda: _serve(settings))


async def _serve(settings: RouterSettings) -> int:
    if settings.workers > 1:
        return await serve_with_workers(settings)
    router = Router(settings)
    stop_on_signals(router.draining)
    return await router.serve()


if __name__ == "__main__":
    sys.exit(main())
