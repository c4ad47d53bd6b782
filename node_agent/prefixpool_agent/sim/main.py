"""`prefixpool-sim`: serves until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import uvloop

from prefixpool import settings as core_settings
from prefixpool.errors import SettingsError
from prefixpool_agent.sim.server import SimServer
from prefixpool_agent.sim.settings import ENV_PREFIX, SimSettings


def main() -> None:
    """Entry point."""
    dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE", "1") == "1"  # vLLM's variable, on unless it says no
    parser = argparse.ArgumentParser(prog="prefixpool-sim", description="An engine that speaks vLLM's API without a model.")
    try:
        settings = core_settings.parse(SimSettings, sys.argv[1:], os.environ, prefix=ENV_PREFIX, parser=parser)
        server = SimServer(settings, dev_mode=dev_mode, handle_signals=True)
    except SettingsError as error:
        sys.exit(f"prefixpool-sim: {error}")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve())
    except OSError as error:
        sys.exit(f"prefixpool-sim: {error}")
    if server.serving.engine.failed.is_set():
        sys.exit("prefixpool-sim: the engine has failed")


if __name__ == "__main__":
    main()
