"""One token sequence in the engine: a prompt and the reply that grows behind it. Pure state, owned by the scheduler."""

from __future__ import annotations

from typing import Final, NamedTuple

from prefixpool_agent.sim.blockhash import BlockHashes
from prefixpool_agent.sim.pool import Block
from prefixpool_agent.sim.reply import Reply
from prefixpool_agent.sim.tokenizer import END_OF_TEXT, IM_END

END_TOKENS: Final = frozenset({IM_END, END_OF_TEXT})


class Limits(NamedTuple):
    """When a reply ends, in tokens."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_tokens: frozenset[int] = frozenset()


class Scope(NamedTuple):
    """What separates one request's cache from another's, and how its events are labelled."""

    salt: str = ""
    adapter: str = ""
    label: str | None = None  # `session_id` of its KV events
    report_full: bool = False  # announce reused blocks, too (kv_cache_report_mode=full)
    skip_cache: bool = False  # prompt_logprobs: vLLM must compute every token
    most_loaded_tokens: int | None = None  # from tiers below the device (max_load_tokens); None: all
    reads_disk: bool = True  # kv_load_tiers leaves it out


class Sequence:
    """Compared by identity. `tokens` is the prompt and the reply so far."""

    def __init__(self, prompt: list[int], limits: Limits, scope: Scope, *, block_tokens: int, variant: str = "") -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.limits = limits
        self.scope = scope
        self.variant = variant  # which of several replies to one prompt: choice index and seed
        self.hashes = BlockHashes(block_tokens, adapter=scope.adapter, salt=scope.salt)
        self.hashes.extend(self.tokens)
        self.blocks: list[Block] = []
        self.computed = 0  # tokens whose KV is in `blocks`
        self.cached = -1  # tokens found in the cache when it was first scheduled; -1 = never scheduled
        self.cached_host = 0  # of these, restored from the host tier
        self.cached_disk = 0  # and from disk
        self.preemptions = 0
        self.reply: Reply | None = None
        self.finish: str | None = None  # "stop", "length", "abort"
        self.stop_token: int | None = None

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def finished(self) -> bool:
        return self.finish is not None

    def append(self, token: int, max_model_len: int) -> bool:
        """Take a sampled token; True if it was the last, then `finish` says why."""
        self.tokens.append(token)
        self.hashes.extend(self.tokens)
        limits = self.limits
        if self.output_tokens >= limits.min_tokens:
            if token in END_TOKENS and not limits.ignore_eos:
                self.finish = "stop"
            elif token in limits.stop_tokens:
                self.finish, self.stop_token = "stop", token
        if self.finish is None and (self.output_tokens >= limits.max_tokens or len(self.tokens) >= max_model_len):
            self.finish = "length"
        return self.finish is not None
