"""What the agent must know of a model's text: the bytes of its tokens, and facts about its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from prefixpool.api.engine import EngineKind
from prefixpool.wire import Template
from prefixpool_agent.residency import TokenTable, VocabularyError, load_table, read_template
from prefixpool_agent.sim.template import ChatTemplate
from prefixpool_agent.sim.tokenizer import token_bytes

_MEMO_TOKENS: Final = 200_000


class ModelText(NamedTuple):
    """`problem`: why there is no table, in words; then predictions must come from what routers sent there."""

    table: TokenTable | None
    template: Template
    problem: str = ""


class SimTable(dict[int, bytes]):
    """The sim's tokens carry their own bytes; a dictionary remembers those that occurred."""

    def __missing__(self, token: int) -> bytes:
        if len(self) >= _MEMO_TOKENS:
            self.clear()
        try:
            value = token_bytes(token)
        except KeyError:
            value = b""
        self[token] = value
        return value


def read_model(kind: EngineKind, folder: Path) -> ModelText:
    """Blocks for a fraction of a second on large vocabularies. Never raises."""
    if kind is EngineKind.SIM:
        return ModelText(SimTable(), ChatTemplate().facts())
    template = read_template(folder)
    try:
        return ModelText(load_table(folder), template)
    except VocabularyError as error:
        return ModelText(None, template, f"no table of tokens: {error}")
