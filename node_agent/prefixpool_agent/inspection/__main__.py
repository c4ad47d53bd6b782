"""`prefixpool-worker inspect`: one JSON document on standard output, and in the pod's termination message."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp

from prefixpool.errors import PrefixpoolError, SettingsError
from prefixpool.settings import parse
from prefixpool.sizing import inspection
from prefixpool.sizing.errors import ShapeError
from prefixpool.sizing.inspection import Inspection
from prefixpool_agent.inspection import folder
from prefixpool_agent.inspection.hub import Hub, HubAwayError
from prefixpool_agent.inspection.settings import PREFIX, InspectionSettings

DEADLINE_S: Final = 600.0


def inspect(settings: InspectionSettings, env: Mapping[str, str]) -> Inspection:
    """Raises ShapeError, in words for the pool's owner."""
    if settings.model.startswith(("/", ".", "~")):
        path = Path(settings.model).expanduser()
        return inspection.inspection(folder.config_of(path), folder.weight_bytes_of(path), "")
    return asyncio.run(_on_the_hub(settings, env))


async def _on_the_hub(settings: InspectionSettings, env: Mapping[str, str]) -> Inspection:
    token = _token(settings, env)
    try:
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(trust_env=True) as session:
            hub = Hub(session, settings.hub or env.get("HF_ENDPOINT") or "https://huggingface.co", token)
            repository = await hub.repository(settings.model, settings.revision)
            config = await hub.config(repository)
            return inspection.inspection(config, await hub.weight_bytes(repository), repository.commit)
    except TimeoutError as error:
        raise HubAwayError(f"reading {settings.model} took longer than {DEADLINE_S:g} s") from error


def _token(settings: InspectionSettings, env: Mapping[str, str]) -> str:
    if not settings.token_file:
        return env.get("HF_TOKEN", "").strip()
    try:
        return Path(settings.token_file).read_text().strip()
    except OSError as error:
        raise ShapeError(f"the token file {settings.token_file} cannot be read: {error.strerror}") from error


def leave(document: bytes, output: str) -> None:
    """On standard output; and in the file, which only a kubelet makes."""
    sys.stdout.write(document.decode() + "\n")
    if output and os.path.exists(output):
        Path(output).write_bytes(document)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: found; else one of `inspection.EXIT_…`."""
    parser = argparse.ArgumentParser(prog="prefixpool-worker inspect", description=__doc__, allow_abbrev=False)
    try:
        settings = parse(
            InspectionSettings, sys.argv[1:] if argv is None else argv, os.environ, prefix=PREFIX, parser=parser
        )
    except SettingsError as error:
        sys.stderr.write(f"prefixpool-worker inspect: {error}\n")
        return inspection.EXIT_SETTINGS
    try:
        leave(inspection.write(inspect(settings, os.environ)), settings.output)
    except PrefixpoolError as error:
        leave(inspection.write_error(str(error)), settings.output)
        return inspection.EXIT_AGAIN if isinstance(error, HubAwayError) else inspection.EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
