"""The chat template of the sim: ChatML as SmolLM2-Instruct prints it, with tools in the system block.

Pure. Differs from SmolLM2's file in two ways, so that the pool's promises about tools can be tested: tools and tool calls
are rendered (SmolLM2 ignores them), unless `renders_tools` is off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from prefixpool.wire import Template

DEFAULT_SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
GENERATION_PROMPT: Final = "<|im_start|>assistant\n"
_VERSION: Final = "sim-chatml-1"


class TemplateError(ValueError):
    """A conversation that the template cannot render; the message is for the client."""


class NotTextError(TemplateError):
    """A part that is an image or the like."""


class ChatTemplate:
    """Renders conversations. Without state."""

    def __init__(self, *, renders_tools: bool = True) -> None:
        self.renders_tools = renders_tools

    def facts(self) -> Template:
        """What agents tell routers of this template."""
        digest = sha256(f"{_VERSION} tools={self.renders_tools}".encode()).hexdigest()[:16]
        return Template(digest=digest, renders_tools=self.renders_tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt. Raises TemplateError for messages without a role or with parts that are not text."""
        shown = tools if self.renders_tools else ()
        first_is_system = bool(messages) and _role(messages[0]) == "system"
        system = content_text(messages[0].get("content")) if first_is_system else DEFAULT_SYSTEM
        parts = [_block("system", system + _tools_text(shown))]
        parts += [_block(_role(message), self._body(message)) for message in messages[first_is_system:]]
        if continue_final_message:
            return "".join(parts).removesuffix("<|im_end|>\n")
        return "".join(parts) + (GENERATION_PROMPT if add_generation_prompt else "")

    def _body(self, message: Mapping[str, Any]) -> str:
        text = content_text(message.get("content"))
        calls = message.get("tool_calls") or () if self.renders_tools else ()
        if not isinstance(calls, (list, tuple)):
            raise TemplateError("tool calls must be a list")
        return "\n".join([*([text] if text or not calls else []), *map(_call_text, calls)])


def content_text(content: Any) -> str:
    """Text of a message's content; text parts are joined by newlines, as vLLM does for templates that expect strings."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError("message content must be a string or a list of parts")
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
    raise NotTextError


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError("every message needs a role")
    return "system" if role == "developer" else role


def _block(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _tools_text(tools: Sequence[Any]) -> str:
    if not tools:
        return ""
    return "\n\n# Tools\n\n<tools>\n" + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + "\n</tools>"


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise TemplateError("a tool call needs a function")
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise TemplateError(f"tool call arguments are not JSON: {error}") from error
    shown = {"name": function.get("name"), "arguments": parsed}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"
