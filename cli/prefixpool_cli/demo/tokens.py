"""The tokens that were really sent, from an engine's own `/tokenize`: what the ideal hit rate is computed from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from prefixpool_cli.demo.client import ChatClient, RequestFailedError
from prefixpool_cli.demo.samples import Sample, Tokens

AT_ONCE: Final = 4


class Tokenizer:
    """Asks one engine; remembers, because the arms send mostly the same texts."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}

    async def of(self, samples: Iterable[Sample]) -> dict[int, Tokens]:
        """By step. Raises RequestFailedError if the engine refuses, or counts other tokens than it charged for."""
        queue = iter([s for s in samples if not s.error])
        out: dict[int, Tokens] = {}

        async def work() -> None:
            for sample in queue:
                out[sample.step] = await self._one(sample)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return out

    async def _one(self, sample: Sample) -> Tokens:
        sent = list(sample.messages)
        prompt = await self._tokens(sent, generation=True)
        if len(prompt) != sample.prompt_tokens:
            raise RequestFailedError(
                f"request {sample.step}: /tokenize counts {len(prompt)} tokens, the answer said {sample.prompt_tokens}"
            )
        whole = await self._tokens([*sent, {"role": "assistant", "content": sample.reply}], generation=False)
        # The last token that was chosen is never fed back, so nothing is stored for it.
        return Tokens(prompt, whole[: len(prompt) + max(0, sample.output_tokens - 1)])

    async def _tokens(self, messages: list[dict[str, Any]], *, generation: bool) -> tuple[int, ...]:
        key = (str(generation), *(f"{m['role']}\n{m['content']}" for m in messages))
        if key not in self._known:
            body = {"messages": messages, "add_generation_prompt": generation}
            self._known[key] = tuple((await self._client.post("/tokenize", body))["tokens"])
        return self._known[key]
