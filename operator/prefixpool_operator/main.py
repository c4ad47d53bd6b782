"""`prefixpool-operator`: reads settings and runs one operator process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from prometheus_client import disable_created_metrics

from prefixpool import logs, names
from prefixpool import settings as reading
from prefixpool.errors import SettingsError
from prefixpool.kubernetes_names import check_label, check_subdomain
from prefixpool_operator.serve import serve
from prefixpool_operator.settings import PREFIX, OperatorSettings

_OWN_NAMESPACE: Final = Path(names.SERVICE_ACCOUNT_DIR, "namespace")

_DESCRIPTION: Final = """\
Looks after InferencePools (inferencepools.prefixpool.dev): sizes them, runs their replicas and routers, replaces pods when
a spec changes, and says in their status how they are. Pools serve on while it is away.

In a cluster it uses its ServiceAccount; elsewhere KUBECONFIG:

  prefixpool-operator --worker-image prefixpool-worker:1 --router-image prefixpool-router:1
  prefixpool-operator --namespaces team-a --namespaces team-b ...      only those, with rights only there

Several may run: one leads, by a Lease; the others wait.
"""
_EPILOG: Final = """\
Then ask the cluster, or this process:

  kubectl get inferencepools.prefixpool.dev -A                 (short: ppool)
  kubectl describe inferencepools.prefixpool.dev my-pool       conditions, sizes and events, with reasons
  curl localhost:8080/readyz                                   ready? if not, why
  curl localhost:8080/metrics                                  Prometheus

SIGTERM ends it in order and lets the next one lead at once. A leader that cannot renew its Lease exits with status 1.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 told to stop, 1 the Lease was lost, 2 it cannot work like this."""
    parser = argparse.ArgumentParser(
        prog="prefixpool-operator",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    try:
        settings = checked(
            reading.parse(OperatorSettings, sys.argv[1:] if argv is None else argv, os.environ, prefix=PREFIX, parser=parser)
        )
        disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps would double what is scraped
        logs.setup(settings.log_level, json=settings.log_format is logs.LogFormat.JSON)
        logging.getLogger("kopf").setLevel(logging.WARNING)  # its lines bear all its settings, one for each event
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # it warns that signals are not its business
        uvloop.run(_until_stopped(settings))
    except (SettingsError, OSError) as error:
        sys.stderr.write(f"prefixpool-operator: {error}\n")
        return 2
    return 0


def checked(settings: OperatorSettings) -> OperatorSettings:
    """With the namespace filled in. SettingsError: what is said does not go together."""
    if not settings.lease_retry_s < settings.lease_renew_s < settings.lease_duration_s:
        raise SettingsError(
            f"--lease-retry-s ({settings.lease_retry_s:g}) must be less than --lease-renew-s ({settings.lease_renew_s:g}), "
            f"and that less than --lease-duration-s ({settings.lease_duration_s:g})"
        )
    for namespace in settings.namespaces:
        check_label("--namespaces", namespace)
    if settings.namespace:
        check_label("--namespace", settings.namespace)
    check_subdomain("--lease-name", settings.lease_name)
    own = _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.exists() else "default"
    return msgspec.structs.replace(settings, namespace=settings.namespace or own)


async def _until_stopped(settings: OperatorSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop, abort=os._exit)


if __name__ == "__main__":
    sys.exit(main())
