"""A real engine with tiers below its device, and answers that can be compared bit by bit."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from enum import StrEnum
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from prefixpool import names
from prefixpool_agent.supervisor.plan import Plan
from prefixpool_testing.engine_contract.asks import exactly
from prefixpool_testing.engine_worker import OPTIONS, EngineWorker

BLOCK = 32
CHUNK_BYTES = 1_474_560  # SmolLM2-135M: 30 layers, 3 KV heads of 64, float32, 32 tokens
E2E = Path(__file__).parents[1]
ENV_FAULT = "PREFIXPOOL_TESTING_FAULT"  # path of a file with a word of `Fault`


EXACT = ("--dtype", "float32")  # in bf16 a cold prompt's logits differ from a cached one's by whole eighths
TIE = 0.05  # two tokens so near each other in log-probability may change places with bf16 rounding


class Fault(StrEnum):
    """What loads from host memory do wrong."""

    NONE = "none"
    NOTHING_COPIED = "nothing copied"
    ROTATED = "each chunk to its neighbour's place"


class Said(NamedTuple):
    """What must be the same wherever the prefix came from."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the chosen tokens
    margins: tuple[float, ...]  # of the chosen tokens over the next best; infinite for the sim, which names no other
    cached: int

    def agrees(self, other: Said) -> bool:
        """Greedy tokens are the same, but for what follows a tie."""
        for mine, theirs, margin in zip(self.ids, other.ids, self.margins, strict=True):
            if mine != theirs:
                return margin <= TIE
        return True


class SpillEngine:
    """One engine; `reset` empties the device tier only."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker = worker

    def fail(self, fault: Fault) -> None:
        """How, from the next load on; only of an engine that was started to be faulty."""
        fault_file(self.worker).write_text(fault)

    def say(self, prompt: Sequence[int], tokens: int = 8, **more: Any) -> Said:
        """A greedy answer to a prompt of token ids."""
        body = {"model": "contract", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "logprobs": 2}
        answer = self.worker.post("/v1/completions", {**body, "return_token_ids": True, "ignore_eos": True, **more})
        assert answer.status == 200, answer.body
        reply = answer.json()
        choice = reply["choices"][0]
        cached = (reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        tops = [sorted(top.values()) for top in choice["logprobs"]["top_logprobs"]]
        margins = tuple(top[-1] - top[-2] if len(top) > 1 else inf for top in tops)
        return Said(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), margins, cached)

    def prompt(self, seed: str, tokens: int) -> list[int]:
        """Token ids of a text that is nobody else's."""
        return exactly(self.worker, seed, tokens)

    def reset(self, *, host: bool = False) -> None:
        """The device tier is empty, and that in host memory if wanted; what is below stays."""
        assert self.worker.post(f"/reset_prefix_cache?reset_external={str(host).lower()}", {}).status == 200

    def disk_events(self, event: str) -> int:
        """Of the disk tier, so far."""
        return int(self.metric(f'prefixpool:disk_events_total{{[^}}]*event="{event}"[^}}]*}}'))

    def written(self, chunks: int, within_s: float = 20.0) -> None:
        """Until so many chunks have gone to disk since the engine's start."""
        end = time.monotonic() + within_s
        while (found := self.disk_events("written")) < chunks:
            assert time.monotonic() < end, f"{found} of {chunks} chunks on disk"
            self.say([1] * 4, tokens=1)  # a step of the engine brings its figures up to date

    def cached_from(self, source: str) -> int:
        """Cached tokens so far that came from a tier, as the engine counts them: device, host, disk."""
        return int(self.metric(f'vllm:prompt_tokens_cached_by_source_total{{[^}}]*source="{source}"[^}}]*}}'))

    def preemptions(self) -> float:
        """Requests so far that had to give their place on the device to others, and began anew."""
        return self.metric(r"vllm:num_preemptions_total\{[^}]*\}")

    def metric(self, pattern: str) -> float:
        """Sum of all samples whose name and labels match."""
        text = self.worker.get("/metrics").body.decode()
        return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))

    def until_disk_takes_writes(self, within_s: float = 30.0) -> None:
        """Behind a failure it rests for some seconds."""
        end, before, turn = time.monotonic() + within_s, self.disk_events("written"), 0
        while self.disk_events("written") == before:
            assert time.monotonic() < end, "the disk tier takes no writes"
            self.say(self.prompt(f"writes {before} {turn}", 2 * BLOCK), tokens=1)
            turn += 1


@contextmanager
def spill_engine(model: str, *options: str, faulty: bool = False) -> Iterator[SpillEngine]:
    """`faulty`: its host tier obeys `fail` (`spill_controls`). Must leave nothing behind."""

    def change(plan: Plan) -> Plan:
        if not faulty:
            return plan
        fault_file(worker).write_text(Fault.NONE)
        argv = [_with_control(word) if "kv_connector" in word else word for word in plan.engine.argv]
        env = {**plan.engine.env, "PYTHONPATH": str(E2E), ENV_FAULT: str(fault_file(worker))}
        return replace(plan, engine=replace(plan.engine, argv=tuple(argv), env=env))

    with TemporaryDirectory(prefix="pp") as folder:
        worker = EngineWorker(Path(folder), model, *OPTIONS, *EXACT, *options)
        try:
            worker.start(change)
            yield SpillEngine(worker)
        except BaseException:
            print((worker.run_dir / names.RUN_ENGINE_LOG).read_text()[-20_000:])
            worker.stop()
            raise
        assert worker.stop() == []


@contextmanager
def side_by_side(*engines: AbstractContextManager[SpillEngine]) -> Iterator[list[SpillEngine]]:
    """They start together, because a start keeps little more than one core busy."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(engines)) as pool:
            starts = [pool.submit(stack.enter_context, engine) for engine in engines]
        yield [start.result() for start in starts]


def fault_file(worker: EngineWorker) -> Path:
    return worker.run_dir / "fault"


def _with_control(config: str) -> str:
    assert '"HostSpec"' in config
    return config.replace('"HostSpec"', '"FaultySpec"').replace(
        "prefixpool_agent.tiers.specs", "prefixpool_testing.spill_controls"
    )
