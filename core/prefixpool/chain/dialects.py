"""Bodies of the chat-like APIs as one list of chat messages, the way vLLM converts them before it renders.

Sources: vLLM 0.32 entrypoints/anthropic/serving.py and entrypoints/openai/responses/utils.py. What vLLM would refuse is
skipped here: the engine answers such requests itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

_TOOL_CHANGES = ("tool_addition", "tool_removal")
# Claude Code puts a per-request hash there; vLLM strips it, because it would defeat prefix caching.
_BILLING = "x-anthropic-billing-header"


class Conversation(NamedTuple):
    """Chat messages as vLLM's chat API knows them, and tools as the template sees them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any]


def conversation(path: str, body: Mapping[str, Any], *, system_first: bool = False) -> Conversation | None:
    """None for paths without a conversation that is computed, or bodies without a usable one. `system_first`: Template's."""
    if path == "/v1/chat/completions":
        return _chat(body)
    if path == "/v1/messages":
        return _anthropic(body, system_first=system_first)
    if path == "/v1/responses":
        return _responses(body)
    return None


def _chat(body: Mapping[str, Any]) -> Conversation | None:
    messages = _mappings(body.get("messages"))
    return None if messages is None else Conversation(messages, _list(body.get("tools")))


def effort(path: str, body: Mapping[str, Any]) -> Any:
    """How much the model shall reason, which templates print. Each API has its own place for it. None: not told."""
    if path == "/v1/responses":
        return _member(body, "reasoning", "effort")
    if path != "/v1/messages":
        return body.get("reasoning_effort")
    if _member(body, "thinking", "type") == "disabled":
        return "disabled"  # `none` or `low`, as the template allows: a word of its own expects too little at worst
    return _member(body, "output_config", "effort")


def json_bytes(value: Any) -> bytes:
    """Of anything that JSON can say. Never raises: lone surrogates and numbers beyond 64 bits are written as Python does."""
    try:
        return _encoded(value)
    except RecursionError:
        return b"nested too deeply"  # what lies just within a limit when it is read may not lie within it here


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError):
        return repr(value).encode("utf-8", "surrogatepass")


def word(value: Any) -> str:
    """What should be a short text, such as a role or a name; clients send anything. Never raises."""
    return value if isinstance(value, str) else json_bytes(value).decode("utf-8", "surrogatepass")


def _member(body: Mapping[str, Any], holder: str, name: str) -> Any:
    held = body.get(holder)
    return held.get(name) if isinstance(held, Mapping) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: Any) -> list[Mapping[str, Any]] | None:
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else None


# -- Anthropic messages ---------------------------------------------------------------------------------------------------


def _anthropic(body: Mapping[str, Any], *, system_first: bool) -> Conversation | None:
    turns = _mappings(body.get("messages"))
    if turns is None:
        return None
    messages: list[Mapping[str, Any]] = []
    tools: list[Mapping[str, Any]] = [_anthropic_tool(tool) for tool in _mappings(body.get("tools")) or ()]
    if changes := _tool_changes(turns):
        tools.append({"changes": changes})  # vLLM prints the tools as they are in the end, where tools stand
    system = _system_text(body.get("system"))
    if system_first:
        system += "".join(_inline_system(turn.get("content")) for turn in turns if turn.get("role") == "system")
        turns = [turn for turn in turns if turn.get("role") != "system"]
    if system:
        messages.append({"role": "system", "content": system})
    for turn in turns:
        messages.extend(_anthropic_turn(turn))
    return Conversation(messages, tools)


def _tool_changes(turns: Sequence[Mapping[str, Any]]) -> list[Any]:
    blocks = (block for turn in turns if turn.get("role") == "system" for block in _list(turn.get("content")))
    return [block for block in blocks if isinstance(block, Mapping) and block.get("type") in _TOOL_CHANGES]


def _system_text(system: Any) -> str:
    if isinstance(system, str):
        return system
    texts = [block.get("text") for block in _list(system) if isinstance(block, Mapping)]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING))


def _inline_system(content: Any) -> str:
    """Of a turn. Other than the `system` of the body, it may be such a header and nothing else."""
    return "" if isinstance(content, str) and content.startswith(_BILLING) else _system_text(content)


def _anthropic_turn(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = turn.get("content")
    if turn.get("role") == "system":
        text = _inline_system(content)
        return [{"role": "system", "content": text}] if text else []
    if not isinstance(content, list):
        return [turn]
    before: list[Mapping[str, Any]] = []  # tool results become messages of their own, ahead of the turn's text
    message: dict[str, Any] = {"role": turn.get("role")}
    parts: list[Any] = []
    thoughts: list[str] = []
    for block in content:
        if isinstance(block, Mapping):
            _anthropic_block(block, message, parts, before, thoughts)
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if parts:
        message["content"] = parts
    empty_user = turn.get("role") == "user" and not parts
    return before if empty_user else [*before, message]


def _anthropic_block(
    block: Mapping[str, Any],
    message: dict[str, Any],
    parts: list[Any],
    before: list[Mapping[str, Any]],
    thoughts: list[str],
) -> None:
    kind = block.get("type")
    if kind == "text" and block.get("text"):
        parts.append(block)
    elif kind == "image":
        parts.append({"type": "image", "source": block.get("source")})
    elif kind == "thinking":
        thoughts.append(word(block.get("thinking") or ""))
    elif kind == "tool_use":
        arguments = json_bytes(block.get("input") or {}).decode("utf-8", "surrogatepass")
        function = {"name": block.get("name", ""), "arguments": arguments}
        message.setdefault("tool_calls", []).append({"function": function})
    elif kind == "tool_result":
        before.append({"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": _tool_result(block)})


def _tool_result(block: Mapping[str, Any]) -> Any:
    content = block.get("content")
    return content if isinstance(content, str | list) else ""


def _anthropic_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    keys = {"name": "name", "description": "description", "input_schema": "parameters"}
    return {"type": "function", "function": {new: tool[old] for old, new in keys.items() if tool.get(old) is not None}}


# -- OpenAI responses -----------------------------------------------------------------------------------------------------

_EARLIER = ("previous_response_id", "previous_response", "previous_input_messages")


def _responses(body: Mapping[str, Any]) -> Conversation | None:
    if any(body.get(field) for field in _EARLIER):
        return None  # what the model reads first is not in the body
    messages: list[dict[str, Any]] = []
    if isinstance(body.get("instructions"), str) and body["instructions"]:
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif (items := _mappings(given)) is not None:
        for item in items:
            _response_item(item, messages)
    else:
        return None
    return Conversation(messages, [_responses_tool(tool) for tool in _list(body.get("tools"))])


def _response_item(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments", item.get("input", ""))
        call = {"function": {"name": item.get("name", ""), "arguments": arguments}}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": item.get("output")})
    elif kind == "reasoning":
        _assistant(messages, without="reasoning")["reasoning"] = _reasoning(item)
    elif item.get("role") == "assistant":
        _assistant(messages, without="content")["content"] = item.get("content")
    else:
        messages.append(dict(item))


def _assistant(messages: list[dict[str, Any]], without: str = "") -> dict[str, Any]:
    """The assistant message under construction: consecutive items (reasoning, text, calls) are one message."""
    last = messages[-1] if messages else None
    if last is None or last.get("role") != "assistant" or (without and last.get(without) is not None):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _reasoning(item: Mapping[str, Any]) -> str:
    for field in ("content", "summary"):
        blocks = _list(item.get(field))
        if blocks and isinstance(blocks[0], Mapping) and isinstance(blocks[0].get("text"), str):
            return str(blocks[0]["text"])
    return ""


def _responses_tool(tool: Any) -> Any:
    """Responses tools are flat; templates see the chat form."""
    if isinstance(tool, Mapping) and tool.get("type") == "function" and "function" not in tool:
        fields = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        return {"type": "function", "function": fields}
    return tool
