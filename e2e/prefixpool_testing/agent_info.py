"""What an agent says of itself (`/info`), for tests that care about a few fields of it."""

from __future__ import annotations

from typing import Any

from prefixpool.wire import Costs, DrainStatus, Info, Mode, State, Template


def info(replica: str, **changes: Any) -> Info:
    """Of an agent whose engine is ready."""
    values: dict[str, Any] = {
        "version": "1", "replica": replica, "engine": "vllm", "engine_version": "0.32.0", "epoch": 1, "state": State.READY,
        "reason": "", "mode": Mode.PRECISE, "models": (), "block_tokens": 16, "device_blocks": 0, "device_tokens": 0,
        "host_bytes": 0, "disk_bytes": 0, "boundaries": 0, "resident_blocks": 0, "inflight": 0, "running": 0, "waiting": 0,
        "restarts": 0, "engine_pid": 1, "uptime_s": 1.0, "template": Template(), "costs": Costs(), "drain": DrainStatus(),
    }  # fmt: skip
    return Info(**(values | changes))
