"""The reference page of InferencePool in Markdown, from its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator

from prefixpool.api import resource
from prefixpool.api.crd import root_schema
from prefixpool.api.schema import Schema


def page() -> str:
    """Without a first line that says where it comes from."""
    root = root_schema()["properties"]
    lines = [
        "# InferencePool",
        "",
        f"`{resource.API_VERSION}`, full name `{resource.FULL_NAME}`, short name `{resource.SHORT_NAME}`. The Gateway API",
        "has a kind of the same name in another group: write the full name where both are installed.",
        f"`kubectl explain {resource.FULL_NAME}.spec` says the same as this page.",
        *_section("spec", root["spec"]),
        *_section("status", root["status"]),
    ]
    return "\n".join(lines) + "\n"


def _section(path: str, schema: Schema) -> Iterator[str]:
    """One heading for each object, fields as a table, rules as a list, then the objects in it."""
    yield from (
        "",
        f"## {path}",
        "",
        schema.get("description", ""),
        "",
        "| field | type | default | what |",
        "|---|---|---|---|",
    )
    properties: dict[str, Schema] = schema["properties"]
    required = schema.get("required", [])
    for name, field in properties.items():
        default = (
            "required"
            if name in required
            else f"`{json.dumps(field['default'])}`"
            if field.get("default") not in (None, {})
            else ""
        )
        yield f"| `{name}` | {_kind(field)} | {default} | {field['description'].replace('|', chr(92) + '|')} |"
    rules = schema.get("x-kubernetes-validations", [])
    if rules:
        yield from ("", "Rules:", "", *(f"- {rule['message']}" for rule in rules))
    for name, field in properties.items():
        inner, mark = (field["items"], "[]") if "items" in field else (field, "")
        if "properties" in inner:
            yield from _section(f"{path}.{name}{mark}", {"description": field["description"]} | inner)


def _kind(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "items" in field:
        return f"list of {_kind(field['items'])}"
    if "additionalProperties" in field:
        return f"map to {_kind(field['additionalProperties'])}"
    return "quantity" if "anyOf" in field else str(field["type"])
