"""`prefixpool-worker drain`, for a container's preStop hook: fence this replica and wait until its requests have ended.

The engine runs on: the SIGTERM that the kubelet sends afterwards stops it. An agent that is gone has nothing to drain; one
that is being restarted is waited for.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from prefixpool import engine_key, names
from prefixpool.errors import PrefixpoolError, SettingsError
from prefixpool.listening import reachable
from prefixpool.settings import parse
from prefixpool.wire import DrainRequest, DrainStatus
from prefixpool_agent.settings import WORKER_PREFIX, DrainSettings

_GONE_S: Final = 3.0  # a supervisor starts a dead agent again within this time
_RETRY_S: Final = 0.2
_ANSWER_S: Final = 5.0  # beyond the drain's own deadline

_DESCRIPTION: Final = """\
Fence the replica whose worker runs in this container, and wait until its requests have ended: the command of a preStop hook.
It reads the environment of the worker; a container needs no flags. Routers hear of the fence at once and send new requests
to other replicas. The engine is left running; SIGTERM to the worker stops it.
"""
_EPILOG: Final = (
    "Exit status: 0 drained, or the deadline has passed, or there is no agent; 1 the agent refused; 2 wrong settings."
)


class RefusedError(PrefixpoolError):
    """The agent answers, but will not drain."""


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        prog="prefixpool-worker drain",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    try:
        settings = parse(DrainSettings, sys.argv[1:] if argv is None else argv, env, prefix=WORKER_PREFIX, parser=parser)
        status = drain(settings, engine_key.read_sent(settings.engine_key_file))
    except SettingsError as error:
        sys.stderr.write(f"prefixpool-worker drain: {error}\n")
        return 2
    except RefusedError as error:
        sys.stderr.write(f"prefixpool-worker drain: {error}\n")
        return 1
    told = f"{status.phase.value}: {status.reason}" if status is not None else "no agent answers, so nothing is drained"
    sys.stderr.write(f"prefixpool-worker drain: {told}\n")
    return 0


def drain(settings: DrainSettings, key: str) -> DrainStatus | None:
    """None: there is no agent. Raises RefusedError."""
    seen_s = time.monotonic()
    deadline_s = seen_s + settings.drain_timeout_s
    while time.monotonic() - seen_s < _GONE_S:
        try:
            return _ask(settings, key, max(0.0, deadline_s - time.monotonic()))
        except ConnectionRefusedError:
            pass
        except (OSError, http.client.HTTPException):  # it was there, and ended while it drained
            seen_s = time.monotonic()
            if seen_s > deadline_s:
                break
        time.sleep(_RETRY_S)  # noqa: TID251 - no event loop
    return None


def _ask(settings: DrainSettings, key: str, timeout_s: float) -> DrainStatus:
    host = reachable(settings.host).strip("[]")
    connection = http.client.HTTPConnection(host, settings.agent_port, timeout=timeout_s + _ANSWER_S)
    try:
        body = msgspec.json.encode(DrainRequest(timeout_s=timeout_s, stop=False, wait=True))
        connection.request("POST", names.PATH_DRAIN, body, {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        told = answer.read()
        if answer.status != 200:
            raise RefusedError(f"the agent on port {settings.agent_port} answers {answer.status}: {told[:200]!r}")
        return msgspec.json.decode(told, type=DrainStatus)
    except msgspec.DecodeError as error:
        raise RefusedError(f"what listens on port {settings.agent_port} is no agent: {error}") from error
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
