"""Facts about chat templates, from their text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixpool.wire import Template
from prefixpool_agent.residency import read_template
from prefixpool_agent.residency.template import describe

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "renders_tools", "prints_date", "trims"),
    [
        (CHATML, False, False, False),
        (CHATML + "{%- if tools %}{{ tools | tojson }}{%- endif %}", True, False, False),
        (CHATML + "{# tools and strftime_now are described here #}", False, False, False),
        (CHATML + "# tools: none. {{ 'no tools' }}", False, False, False),
        (CHATML + "{{ strftime_now('%d %b %Y') }}", False, True, False),
        (CHATML + "{% set date_string = '26 Jul 2024' %}", False, False, False),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", False, False, True),
        ("{% for m in messages %}{{ m.content|trim + eos }}{% endfor %}", False, False, True),
        ("{% for m in messages %}{{ m['content'].strip() }}{% endfor %}", False, False, True),
        ("{% for m in messages %}{{- m.content -}}{{ m.name | trim }}{% endfor %}", False, False, False),
    ],
)
def test_facts(text: str, renders_tools: bool, prints_date: bool, trims: bool) -> None:
    facts = describe(text)
    assert (facts.renders_tools, facts.prints_date, facts.trims) == (renders_tools, prints_date, trims)


@pytest.mark.parametrize(
    ("guard", "system_first"),
    [
        ("{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}", True),
        ("{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}", True),
        ('{{- raise_exception("System role not supported") }}', True),
        ("{{- raise_exception('Unexpected message role.') }}", False),
        ('{{- raise_exception("Cannot put tools in the first user message when there is no first user message!") }}', False),
        ("{# raise_exception('System message must be at the beginning.') #}", False),
    ],
)
def test_whether_system_text_may_stand_between_turns(guard: str, system_first: bool) -> None:
    assert describe(CHATML + guard).system_first == system_first


def test_digest_tells_templates_apart_and_is_stable() -> None:
    assert describe(CHATML).digest == describe(CHATML).digest != describe(CHATML + " ").digest


def test_file_order_is_the_engine_s(tmp_path: Path) -> None:
    assert read_template(tmp_path) == Template()
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == describe(CHATML)
    (tmp_path / "chat_template.jinja").write_text("other")
    assert read_template(tmp_path) == describe("other")


def test_normalisation_is_read_from_the_tokenizer(tmp_path: Path) -> None:
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend"}, {"type": "NFC"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer, "model": {}}))
    assert read_template(tmp_path) == Template(nfc=True)


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": 7}', '{"chat_template": [{"name": "default"}]}'])
def test_unreadable_configuration_means_no_template(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert read_template(tmp_path) == Template()
