"""Facts about a model's chat template, by looking at its text. Rendering it would need Jinja and still not be a proof.

What matters is where canonical text and rendered text part ways (research: alignment.md): templates that print the date,
ignore tools, or strip contents. A wrong guess costs prediction quality, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from prefixpool.wire import Template

_DIGEST_DIGITS: Final = 32
_COMMENT: Final = re.compile(r"\{#.*?#\}", re.DOTALL)
_CODE: Final = re.compile(r"\{%-?(.*?)-?%\}|\{\{-?(.*?)-?\}\}", re.DOTALL)
_STRING: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_TOOLS: Final = re.compile(r"\btools\b")
_DATE: Final = re.compile(r"\bstrftime_now\b")
# "System message must be at the beginning.", "Conversation roles must alternate": vLLM finds it out by rendering
_SYSTEM_FIRST: Final = re.compile(r"\braise_exception\([^)]*\b(?:system\b|alternat)", re.IGNORECASE)
# `message.content | trim`, `message['content'].strip()`, `content.strip()`
_TRIM: Final = re.compile(r"content\b(?:['\"]\s*\])?\s*(?:\|\s*trim\b|\.strip\(\s*\))")


def read_template(folder: Path) -> Template:
    """Facts about a model folder's template (digest "" when it has none that can be read) and its tokenizer."""
    text = _template_text(folder)
    nfc = "NFC" in _normalizers(_document(folder / "tokenizer.json").get("normalizer"))
    return describe(text, nfc=nfc) if text else Template(nfc=nfc)


def describe(text: str, *, nfc: bool = False) -> Template:
    """Facts about one template text."""
    code = "\n".join(one or two for one, two in _CODE.findall(_COMMENT.sub("", text)))
    names = _STRING.sub("''", code)
    return Template(
        digest=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_DIGITS],
        renders_tools=bool(_TOOLS.search(names)),
        prints_date=bool(_DATE.search(names)),
        trims=bool(_TRIM.search(code)),
        nfc=nfc,
        system_first=bool(_SYSTEM_FIRST.search(code)),
    )


def _normalizers(normalizer: Any) -> list[str]:
    if not isinstance(normalizer, Mapping):
        return []
    inner = normalizer.get("normalizers") or ()
    return [str(normalizer.get("type")), *(kind for one in inner for kind in _normalizers(one))]


def _template_text(folder: Path) -> str:
    """The engine's own order: chat_template.jinja, then chat_template.json, then tokenizer_config.json."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # most models have none: look further
        pass
    for name in ("chat_template.json", "tokenizer_config.json"):
        if text := _chosen(_document(folder / name).get("chat_template")):
            return text
    return ""


def _document(path: Path) -> Mapping[str, Any]:
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):  # absent or broken: the engine would not start either
        return {}
    return document if isinstance(document, Mapping) else {}


def _chosen(templates: Any) -> str:
    """One text, or several named ones of which engines use `default` for requests that name none."""
    if isinstance(templates, str):
        return templates
    if not isinstance(templates, list):
        return ""
    named = {str(t.get("name")): t.get("template") for t in templates if isinstance(t, Mapping)}
    chosen = named.get("default", next(iter(named.values()), ""))
    return chosen if isinstance(chosen, str) else ""
