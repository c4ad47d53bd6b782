"""A request as the model will read it: a seed, and segments in the order of the rendered prompt. Pure; no tokens, no HTTP.

Order that worked on agent traces, chats and tools (research: alignment.md): leading system messages, tools, the rest. All
APIs are first brought to chat messages the way vLLM does it, so that the same conversation has the same chain through
`/v1/chat/completions`, `/v1/responses` and `/v1/messages`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import mmh3
import msgspec

from prefixpool.chain import dialects
from prefixpool.chain.dialects import json_bytes, word
from prefixpool.wire import Template

SCHEME: Final = b"prefixpool-chain-1"  # changes when equal text would get other hashes

# Fields that change how a request is rendered or tokenised, hence part of the seed when present.
_RENDERING: Final = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "reasoning_effort",
    "truncate_prompt_tokens",  # what is left of a prompt begins elsewhere
    "truncation",
    "truncation_side",
)
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_SURROGATES: Final = "surrogatepass"  # JSON allows lone surrogates; a prefix must not fail on them


class SegmentKind(IntEnum):
    """How a segment's bytes relate to the text that the template prints."""

    TEXT = 0  # printed as it is
    JSON = 1  # re-serialised by the template (tools, tool calls): only its string literals survive
    TOKENS = 2  # token ids, 4 bytes little-endian each: no text at all
    OPAQUE = 3  # an image or another part, by digest: occupies an unknown number of tokens


class Segment(NamedTuple):
    """One run of content behind one role marker."""

    role: str
    data: bytes
    kind: SegmentKind = SegmentKind.TEXT


class Canonical(NamedTuple):
    """What boundaries are cut from."""

    seed: bytes  # 16 bytes: model, adapter, salt, template and whatever changes rendering
    segments: tuple[Segment, ...]
    generation: bool  # the render ends with the generation prompt (an assistant role marker)
    lead: int  # number of leading segments that are system text or tools


def canonical(
    path: str, body: Mapping[str, Any], *, template: Template | None = None, salt: str = "", day: str = ""
) -> Canonical | None:
    """None if requests of this path have no prefix chain, or the body has no usable prompt (the engine will say why).

    `salt`: the scope's cache salt; the agent passes the body's own `cache_salt`. `day`: ISO date (UTC), used only if the
    template prints it. Never raises on odd input: clients send anything.
    """
    template = template or Template()
    if path == "/v1/completions":
        prompt = _completion(body.get("prompt"), template)
        if prompt is None:
            return None
        return Canonical(_seed(b"completion", path, body, template, salt), (prompt,), generation=False, lead=0)
    conversation = dialects.conversation(path, body, system_first=template.system_first)
    if conversation is None or not conversation.messages:
        return None
    segments, lead = _chat(conversation, template)
    day = day if template.prints_date else ""
    generation = body.get("add_generation_prompt", True) is not False and body.get("continue_final_message") is not True
    return Canonical(_seed(b"chat", path, body, template, salt, day), segments, generation=generation, lead=lead)


def _seed(api: bytes, path: str, body: Mapping[str, Any], template: Template, salt: str, day: str = "") -> bytes:
    model = body.get("model")
    parts = [SCHEME, api, _bytes(model if isinstance(model, str) else ""), _bytes(salt), _bytes(day)]
    if api == b"chat":
        parts.append(_bytes(template.digest))
    effort = dialects.effort(path, body)
    if effort is not None or not body.keys().isdisjoint(_RENDERING):
        found = {**body, "reasoning_effort": effort}
        parts += [name.encode() + json_bytes(found[name]) for name in _RENDERING if found.get(name) is not None]
    # Length-prefixed, so that no salt can pretend to be another model's name (peers.md 81).
    return mmh3.mmh3_x64_128_digest(b"".join([len(part).to_bytes(4, "little") + part for part in parts]))


def _completion(prompt: Any, template: Template) -> Segment | None:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # a list of one prompt is that prompt; of several, no single prefix
    if isinstance(prompt, str) and prompt:
        return Segment("", _text(prompt, msgspec.structs.replace(template, trims=False)))
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and 0 <= token < 1 << 32 for token in prompt):
        return Segment("", b"".join(token.to_bytes(4, "little") for token in prompt), SegmentKind.TOKENS)
    return None


def _chat(conversation: dialects.Conversation, template: Template) -> tuple[tuple[Segment, ...], int]:
    segments: list[Segment] = []
    messages = conversation.messages
    leading = next((i for i, m in enumerate(messages) if word(m.get("role")) not in _SYSTEM_ROLES), len(messages))
    for message in messages[:leading]:
        segments.extend(_message(message, template))
    if conversation.tools and template.renders_tools:
        segments.append(Segment("tools", json_bytes(conversation.tools), SegmentKind.JSON))
    lead = len(segments)
    for message in messages[leading:]:
        segments.extend(_message(message, template))
    return tuple(segments), lead


def _message(message: Mapping[str, Any], template: Template) -> list[Segment]:
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and isinstance(role, str) and isinstance(content, str):  # as most are: nothing else to look at
        return [Segment(role, _text(content, template))]
    segments = _content(_marker(message), content, template)
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        segments.insert(0, Segment("reasoning", _text(reasoning, template)))
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        segments.append(Segment("calls", b"".join(map(_call, calls)), SegmentKind.JSON))
    return segments


def _marker(message: Mapping[str, Any]) -> str:
    """Role, and what templates print beside it: a speaker's name, the id of the call that a tool answers."""
    marker = word(message.get("role", ""))
    for key in ("name", "tool_call_id"):
        if isinstance(value := message.get(key), str):
            marker = f"{marker}:{value}"
    return marker


def _content(role: str, content: Any, template: Template) -> list[Segment]:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return [Segment(role, _text(content if isinstance(content, str) else "", template))]
    segments: list[Segment] = []
    texts: list[str] = []
    for part in content:
        text = _part_text(part)
        if text is not None:
            texts.append(text)
            continue
        segments.append(Segment(role, _text("\n".join(texts), template)))
        segments.append(Segment("part", mmh3.mmh3_x64_128_digest(json_bytes(part)), SegmentKind.OPAQUE))
        role, texts = "", []
    if texts or role or not segments:  # never none at all
        segments.append(Segment(role, _text("\n".join(texts), template)))  # vLLM joins text parts with a newline
    return segments


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else None


def _call(call: Any) -> bytes:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return b"\x1d" + json_bytes(call)
    arguments = function.get("arguments")
    raw = _bytes(arguments) if isinstance(arguments, str) else json_bytes(arguments)
    return b"\x1d" + _bytes(word(function.get("name", ""))) + b" " + raw


def _text(text: str, template: Template) -> bytes:
    if template.trims:
        text = text.strip()
    if template.nfc and not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return _bytes(text)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", _SURROGATES)
