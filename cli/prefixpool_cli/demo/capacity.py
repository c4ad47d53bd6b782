"""How much cache to give each replica, so that the workload does not fit into one but fits into two. Pure."""

from __future__ import annotations

from typing import Final

from prefixpool.api.engine import EngineKind
from prefixpool_cli.demo.workload import Kind, Workload

PRESSURE: Final = 1.55  # working set over one replica's device tokens
# Characters per token, fitted so that the estimate is the working set that the demo then measured.
CHARS_PER_TOKEN: Final = {EngineKind.VLLM: 4.5, EngineKind.SIM: 3.1}
MARKUP_TOKENS: Final = 12  # what a chat template adds to a request and its reply
LOST_IN_BLOCK: Final = 12  # of a question without successor: only whole blocks are kept


def estimated_working_set(workload: Workload, chars_per_token: float) -> int:
    """Unique tokens that the workload will have computed in the end, replies included."""
    used = {session for session, _ in workload.steps()}
    sessions = [workload.sessions[i] for i in used]
    shared = {s.system for s in sessions} | {s.context for s in sessions}
    turns = [workload.sessions[session].turns[turn] for session, turn in workload.steps()]
    chars = sum(map(len, shared)) + sum(len(turn.content) for turn in turns)
    ends = sum(workload.sessions[session].kind is Kind.DOCUMENT for session, _ in workload.steps())
    written = sum(turn.max_tokens + MARKUP_TOKENS for turn in turns)
    return round(chars / chars_per_token) + written - LOST_IN_BLOCK * ends


def device_blocks(workload: Workload, engine: EngineKind, block_tokens: int) -> int:
    """Blocks for each replica, the engine's null block included."""
    return round(estimated_working_set(workload, CHARS_PER_TOKEN[engine]) / PRESSURE / block_tokens) + 1
