"""Write core/tests/chain_vectors.json. Run it only when `SCHEME` in chain/canonical.py changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from prefixpool.chain import canonical, prefix_chain
from prefixpool.wire import Template

LONG = " ".join(f"word{i}" for i in range(900))
CASES: list[dict[str, Any]] = [
    {"path": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}},
    {"path": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": LONG}]}},
    {
        "path": "/v1/chat/completions",
        "salt": "tenant-a",
        "body": {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "rain ☔"},
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
        },
    },
    {"path": "/v1/completions", "body": {"model": "m", "prompt": "Once upon a time"}},
    {"path": "/v1/completions", "body": {"model": "m", "prompt": [1, 2, 3, 70000]}},
    {
        "path": "/v1/messages",
        "body": {
            "model": "m",
            "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be kind."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        },
    },
    {
        "path": "/v1/responses",
        "body": {"model": "m", "instructions": "Be kind.", "input": [{"role": "user", "content": "Hello"}]},
    },
    {
        "path": "/v1/chat/completions",
        "day": "2026-01-31",
        "template": {"digest": "d", "prints_date": True, "trims": True, "renders_tools": False},
        "body": {"model": "m", "messages": [{"role": "user", "content": "  hi  "}], "tools": [{"type": "function"}]},
    },
]


def main() -> None:
    out = []
    for case in CASES:
        template = msgspec.convert(case.get("template", {}), Template)
        request = canonical(
            case["path"], case["body"], salt=case.get("salt", ""), day=case.get("day", ""), template=template
        )
        assert request is not None
        found = prefix_chain(request)
        hashes = [f"{key:016x}" for key in found.hashes]
        out.append({**case, "hashes": hashes, "offsets": list(found.offsets), "cold": found.cold})
    target = Path(__file__).parent.parent / "core/tests/chain_vectors.json"
    target.write_bytes(msgspec.json.format(msgspec.json.encode(out), indent=1) + b"\n")


if __name__ == "__main__":
    main()
