"""Continuous batching with chunked prefill and prefix caching, step by step as vLLM's V1 scheduler. No clock, and no I/O but
what a disk tier does that it is given.

A step is `schedule()` (who computes what; blocks are allocated and enter the prefix cache at once, so that a request
scheduled later in the same step already hits them), `execute()` (contents are computed, in the same order) and `sample()`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from prefixpool_agent.sim.below import Below, Found
from prefixpool_agent.sim.blockhash import external
from prefixpool_agent.sim.disk import DiskTier
from prefixpool_agent.sim.host import Copy, HostTier
from prefixpool_agent.sim.pool import GROUP, MEDIUM_DEVICE, Block, BlockPool, Event, digest_of
from prefixpool_agent.sim.reply import Reply
from prefixpool_agent.sim.sequence import Sequence
from prefixpool_agent.sim.timing import Prefill, StepShape
from prefixpool_agent.sim.tokenizer import SimTokenizer


class SchedulerConfig(NamedTuple):
    """vLLM's settings of the same names; sizes in tokens, blocks or sequences."""

    blocks: int
    block_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    host_blocks: int = 0


class Work(NamedTuple):
    """Tokens [start, start + new) of one sequence are computed in this step."""

    sequence: Sequence
    start: int
    new: int

    @property
    def decodes(self) -> bool:
        return self.new == 1 and self.start >= self.sequence.prompt_tokens


class Step(NamedTuple):
    """What one step computes. `admitted`: sequences that left the queue for the first time."""

    work: list[Work]
    admitted: list[Sequence]
    preempted: int
    restored_tokens: int  # from tiers below the device
    read_tokens: int = 0  # of these, from disk

    def shape(self) -> StepShape:
        decodes = [item for item in self.work if item.decodes]
        prefills = [Prefill(item.new, item.start) for item in self.work if not item.decodes]
        context = sum(item.start for item in decodes)
        return StepShape(len(decodes), context, prefills, len(self.admitted), self.restored_tokens, self.read_tokens)


class Scheduler:
    """Owns the block pool and all sequences. Not thread-safe."""

    def __init__(self, config: SchedulerConfig, tokenizer: SimTokenizer, disk: DiskTier | None = None) -> None:
        self.config = config
        self.pool = BlockPool(config.blocks, config.block_tokens)
        self.below = Below(HostTier(config.host_blocks), disk)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._tokenizer = tokenizer
        self._restored = self._read = 0  # tokens, in this step

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, reason: str) -> None:
        """End a sequence early: abort, or a stop string was seen. Its full blocks stay cached."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.finish = reason
        self._free(sequence)

    def schedule(self) -> Step:
        """Decide the next step: running sequences first, then the queue in order of arrival."""
        self._restored = self._read = 0
        budget, work, preempted = self._schedule_running()
        admitted: list[Sequence] = []
        while not preempted and budget > 0 and self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            item = self._admit(sequence, budget)
            if item is None:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            work.append(item)
            budget -= item.new
            if sequence.preemptions == 0:
                admitted.append(sequence)
        return Step(work, admitted, preempted, self._restored, self._read)

    def execute(self, step: Step) -> None:
        """Compute the contents of the scheduled tokens, from what the blocks before them really hold."""
        size = self.config.block_tokens
        for sequence, start, new in step.work:
            position, end = start, start + new
            while position < end:
                index, stop = position // size, min(end, position // size * size + size)
                before = sequence.blocks[index - 1] if index else None
                sequence.blocks[index].fill(before, sequence.tokens[position:stop], size)
                position = stop
            sequence.computed = end
            self._offload(sequence, start, end)

    def sample(self, step: Step) -> list[Sequence]:
        """Append one token to every sequence that is computed up to its end; those that finish leave. Returns them all."""
        grown: list[Sequence] = []
        for sequence, _, _ in step.work:
            if sequence.finished or sequence.computed < len(sequence.tokens):
                continue
            if sequence.reply is None:
                sequence.reply = Reply(self._seed(sequence), self._tokenizer)
            limits = sequence.limits
            may_end = not limits.ignore_eos and sequence.output_tokens + 1 >= limits.min_tokens
            last = sequence.append(sequence.reply.next_token(may_end=may_end), self.config.max_model_len)
            grown.append(sequence)
            if last:
                self.running.remove(sequence)
                self._free(sequence)
        return grown

    def take_events(self) -> list[Event]:
        """KV events of this step: the device's own, and what the tiers below did in the step before."""
        return self.pool.take_events() + self.below.take_events()

    def reset(self, *, external_tiers: bool) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        done = self.pool.reset()
        if external_tiers:
            self.below.reset()
        return done

    def _schedule_running(self) -> tuple[int, list[Work], int]:
        budget, work, preempted, index = self.config.max_num_batched_tokens, [], 0, 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            while not (fits := self._grow(sequence, count)):
                victim = self.running.pop()
                self._preempt(victim)
                preempted += 1
                if victim is sequence:
                    break
            if not fits:
                break
            work.append(Work(sequence, sequence.computed, count))
            budget -= count
            index += 1
        return budget, work, preempted

    def _admit(self, sequence: Sequence, budget: int) -> Work | None:
        size, digests = self.config.block_tokens, sequence.hashes.digests
        usable = 0 if sequence.scope.skip_cache else (len(sequence.tokens) - 1) // size  # the last token is always computed
        hits = self.pool.match(digests, usable)
        whole = -(-len(sequence.tokens) // size)
        if self.pool.needs(whole, hits, 0) > self.pool.free_blocks:
            return None
        most, upto = sequence.scope.most_loaded_tokens, usable
        if most is not None:
            upto = min(usable, len(hits) + most // size)
        found = self.below.match(digests, len(hits), upto, disk=sequence.scope.reads_disk)
        self.pool.touch(hits)
        sequence.blocks = list(hits)
        if hits and sequence.scope.report_full:
            self._announce(sequence, 0, len(hits))
        self._restore(sequence, found)
        sequence.computed = len(sequence.blocks) * size
        if sequence.cached < 0:
            sequence.cached = sequence.computed
            sequence.cached_disk = sum(one.from_disk for one in found) * size
            sequence.cached_host = len(found) * size - sequence.cached_disk
        count = min(len(sequence.tokens) - sequence.computed, budget)
        self._grow(sequence, count)
        return Work(sequence, sequence.computed, count)

    def _restore(self, sequence: Sequence, found: list[Found]) -> None:
        if not found:
            return
        size, first = self.config.block_tokens, len(sequence.blocks)
        for block, (copy, _) in zip(self.pool.allocate(len(found)), found, strict=True):
            block.content, block.state = list(copy.content), copy.state
            sequence.blocks.append(block)
        self._cache(sequence, first, len(sequence.blocks))
        for index, (copy, from_disk) in enumerate(found, first):
            if from_disk:
                self.below.promote(sequence.hashes.digests[index], copy, self._describing(sequence, index))
                self._read += size
        self._restored += len(found) * size

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens; those that this fills enter the prefix cache."""
        size, end = self.config.block_tokens, sequence.computed + count
        missing = -(-end // size) - len(sequence.blocks)
        if missing > self.pool.free_blocks:
            return False
        full_before = sequence.computed // size
        sequence.blocks.extend(self.pool.allocate(max(missing, 0)))
        self._cache(sequence, full_before, end // size)
        return True

    def _cache(self, sequence: Sequence, first: int, last: int) -> None:
        if last <= first:
            return
        for index in range(first, last):
            self.pool.publish(sequence.blocks[index], sequence.hashes.digests[index])
        self._announce(sequence, first, last)

    def _announce(self, sequence: Sequence, first: int, last: int) -> None:
        self.pool.note(self._stored(sequence, first, last))

    def _stored(self, sequence: Sequence, first: int, last: int) -> Event:
        """`BlockStored` of blocks [first, last), with the keys that vLLM 0.32 sends (research: vllm.md 1.1)."""
        size, hashes, scope = self.config.block_tokens, sequence.hashes, sequence.scope
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [external(digest) for digest in hashes.digests[first:last]],
            "parent_block_hash": external(hashes.digests[first - 1]) if first else None,
            "token_ids": sequence.tokens[first * size : last * size],
            "block_size": size,
            "lora_id": 1 if scope.adapter else None,
            "medium": MEDIUM_DEVICE,
            "lora_name": scope.adapter or None,
            "extra_keys": [hashes.event_keys(index) for index in range(first, last)],
            "group_idx": GROUP,
            "kv_cache_spec_kind": "full_attention",
        }
        if scope.label is not None:
            event["session_id"] = scope.label
        return event

    def _offload(self, sequence: Sequence, start: int, end: int) -> None:
        """Full blocks of prompts and replies: a reply is part of the next turn's prompt."""
        if not self.below.exists:
            return
        size = self.config.block_tokens
        for index in range(start // size, end // size):
            block = sequence.blocks[index]
            copy = Copy(tuple(block.content), block.state)
            self.below.store(sequence.hashes.digests, index, copy, self._describing(sequence, index))

    def _describing(self, sequence: Sequence, index: int) -> Event:
        """`BlockStored` of one block as tiers below the device tell it: without keys, which are never filled there."""
        stored = self._stored(sequence, index, index + 1)
        del stored["extra_keys"]
        stored.pop("session_id", None)
        return stored

    def _seed(self, sequence: Sequence) -> bytes:
        """What the reply follows from: the contents of the prompt's blocks as they are, and which reply is asked for."""
        size, end = self.config.block_tokens, sequence.prompt_tokens
        state = sequence.blocks[end // size - 1].state if end >= size else b""
        rest = sequence.blocks[end // size].content[: end % size] if end % size else []
        return digest_of(state + sequence.variant.encode(), rest)

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        blocks: list[Block] = sequence.blocks
        sequence.blocks = []
        self.pool.release(blocks)
