"""Fit the sim's timing model to real vLLM on this machine, and say how well it fits requests that it has not seen.

    .venv-engine/bin/python bench/sim_fit.py --model PATH [--cores 0] [--out build/bench/sim_fit.json]

The engine is bound to one core, as in a pool of two replicas on two cores. Three kinds of measurement are fitted: first
tokens of prompts with m new tokens behind c cached ones, and steps of 1 to 8 decoding sequences at several context lengths.
Held out are requests with other lengths, alone and overlapping; their times are predicted by the sim's own scheduler in
virtual time. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np

from prefixpool_agent.sim.scheduler import Scheduler, SchedulerConfig
from prefixpool_agent.sim.sequence import Limits, Scope
from prefixpool_agent.sim.sequence import Sequence as EngineSequence
from prefixpool_agent.sim.timing import TimingModel
from prefixpool_agent.sim.tokenizer import SimTokenizer

BLOCK_TOKENS = 32
BLOCKS = 1600
MAX_MODEL_LEN = 8192
BATCHED_TOKENS = 2048  # vLLM's default for its API server on CPUs
VOCABULARY = (100, 40_000)  # no special tokens
START_TIMEOUT_S = 300.0


class Timed(NamedTuple):
    """One answer: seconds from the request to each token."""

    tokens_s: list[float]
    cached: int

    @property
    def first_s(self) -> float:
        return self.tokens_s[0]


class Planned(NamedTuple):
    """A held-out request. `at_s`: when it is sent, from the start of its series."""

    at_s: float
    prompt: list[int]
    output_tokens: int


class Observation(NamedTuple):
    """One equation of the fit: coefficients of the model's parameters, and the seconds seen."""

    row: list[float]  # step, sequence, context, prefill, prefill2, request
    seconds: float


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@asynccontextmanager
async def engine(model: str, cores: str) -> AsyncIterator[str]:
    """Real vLLM, started as a worker starts it; yields its URL."""
    port = free_port()
    argv = [
        *("taskset", "-c", cores, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)),
        *("--enforce-eager", "--block-size", str(BLOCK_TOKENS), "--enable-prompt-tokens-details"),
        *("--num-gpu-blocks-override", str(BLOCKS)),
    ]
    env = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            await healthy(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


async def healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"vLLM ended with {process.returncode}")
            try:
                async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(2)) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.5)
    raise SystemExit(f"vLLM was not healthy within {START_TIMEOUT_S} s")


class Client:
    """Streams completions of token prompts and notes when each token came."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def complete(self, prompt: Sequence[int], output_tokens: int) -> Timed:
        body = {
            "model": "m",
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, times, cached = time.perf_counter(), [], 0
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk["choices"]:
                    times.append(time.perf_counter() - start)
                elif chunk.get("usage"):
                    cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Timed(times, cached)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*VOCABULARY) for _ in range(count)]


async def measure_prefill(client: Client, rng: random.Random, repeats: int) -> list[Observation]:
    """First tokens of cold, wholly cached and half cached prompts; of each shape the quickest, since noise only adds."""
    seen: list[Observation] = []
    for new in (64, 128, 256, 512, 1024, 2048, 3000):
        prompts = [tokens(rng, new) for _ in range(repeats)]
        for _ in ("cold", "cached"):
            seen.append(quickest([first_token(prompt, await client.complete(prompt, 1)) for prompt in prompts]))
            print(f"  {new:5} tokens: {seen[-1].seconds:.3f} s", flush=True)
    for behind in (1024, 3008):
        base = tokens(rng, behind)
        await client.complete(base, 1)
        for new in (64, 256, 1024):
            prompts = [base + tokens(rng, new) for _ in range(repeats)]
            seen.append(quickest([first_token(prompt, await client.complete(prompt, 1)) for prompt in prompts]))
            print(f"  {new:5} tokens behind {behind}: {seen[-1].seconds:.3f} s", flush=True)
    return seen


def quickest(observations: Sequence[Observation]) -> Observation:
    return min(observations, key=lambda seen: seen.seconds)


def first_token(prompt: Sequence[int], timed: Timed) -> Observation:
    new, behind = len(prompt) - timed.cached, timed.cached
    return Observation([1, 0, 0, new, new * (new + 2 * behind), 1], timed.first_s)


async def measure_decode(client: Client, rng: random.Random, output_tokens: int) -> list[Observation]:
    """Steps while 1 to 8 sequences decode: the interval between tokens, from when all of them have begun."""
    seen: list[Observation] = []
    for context in (64, 1024, 3000):
        prompts = [tokens(rng, context) for _ in range(8)]
        for prompt in prompts:
            await client.complete(prompt, 1)
        for sequences in (1, 2, 4, 8):
            answers = await asyncio.gather(*(client.complete(prompt, output_tokens) for prompt in prompts[:sequences]))
            gaps = [b - a for timed in answers for a, b in zip(timed.tokens_s[4:], timed.tokens_s[5:], strict=False)]
            middle = context + output_tokens / 2
            seen.append(Observation([1, sequences, sequences * middle, 0, 0, 0], statistics.median(gaps)))
            print(f"  {sequences} sequences of {context} tokens: {seen[-1].seconds:.4f} s a step", flush=True)
    return seen


def fit(observations: Sequence[Observation]) -> TimingModel:
    """Least squares of relative errors, parameters not below 0."""
    rows = np.array([[value / seen.seconds for value in seen.row] for seen in observations])
    ones = np.ones(len(rows))
    active = list(range(rows.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(rows[:, active], ones, rcond=None)
        if (solution >= 0).all():
            break
        del active[int(np.argmin(solution))]
    values = dict(zip(active, map(float, solution), strict=True))
    step, sequence, context, prefill, prefill2, request = (values.get(i, 0.0) for i in range(6))
    return TimingModel(step, sequence, context, prefill, prefill2, request_s=request)


def held_out(rng: random.Random, *, gap_s: float, requests: int) -> list[Planned]:
    """Requests that share some prefixes and overlap if the gap is short."""
    shared = [tokens(rng, length) for length in (600, 1500)]
    planned, at_s = [], 0.0
    for i in range(requests):
        prompt = tokens(rng, rng.randrange(100, 1800)) if i % 2 else rng.choice(shared) + tokens(rng, rng.randrange(20, 400))
        planned.append(Planned(at_s, prompt, rng.randrange(8, 33)))
        at_s += rng.expovariate(1 / gap_s)
    return planned


async def play(client: Client, planned: Sequence[Planned]) -> list[Timed]:
    start = time.perf_counter()

    async def one(request: Planned) -> Timed:
        await asyncio.sleep(start + request.at_s - time.perf_counter())
        return await client.complete(request.prompt, request.output_tokens)

    return list(await asyncio.gather(*map(one, planned)))


def simulate(planned: Sequence[Planned], timing: TimingModel) -> list[Timed]:
    """The same requests through the sim's scheduler in virtual time."""
    config = SchedulerConfig(BLOCKS, BLOCK_TOKENS, MAX_MODEL_LEN, max_num_seqs=256, max_num_batched_tokens=BATCHED_TOKENS)
    scheduler = Scheduler(config, SimTokenizer())
    waiting = list(planned)
    live: dict[EngineSequence, tuple[int, list[float]]] = {}
    done: dict[int, Timed] = {}
    now_s, number = 0.0, 0
    while waiting or scheduler.busy:
        if not scheduler.busy:
            now_s = max(now_s, waiting[0].at_s)
        while waiting and waiting[0].at_s <= now_s:
            request = waiting.pop(0)
            limits = Limits(max_tokens=request.output_tokens, ignore_eos=True)
            sequence = EngineSequence(request.prompt, limits, Scope(), block_tokens=BLOCK_TOKENS)
            live[sequence] = (number, [])
            number += 1
            scheduler.add(sequence)
        step = scheduler.schedule()
        now_s += timing.seconds(step.shape())
        scheduler.execute(step)
        for sequence in scheduler.sample(step):
            index, times = live[sequence]
            times.append(now_s - planned[index].at_s)
            if sequence.finished:
                done[index] = Timed(times, sequence.cached)
    return [done[index] for index in range(len(planned))]


def errors(seen: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    relative = sorted(abs(p - s) / s for s, p in zip(seen, predicted, strict=True))
    return {
        "n": len(relative),
        "median": round(statistics.median(relative), 4),
        "p95": round(relative[min(len(relative) - 1, int(0.95 * len(relative)))], 4),
    }


async def measure(model: str, cores: str, repeats: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    async with engine(model, cores) as url, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        client = Client(session, url)
        for length in (32, 1024, 3000):
            await client.complete(tokens(rng, length), 4)  # first calls of each shape are slow
        print("prefill ...", flush=True)
        prefill = await measure_prefill(client, rng, repeats)
        print("decode ...", flush=True)
        decode = await measure_decode(client, rng, output_tokens=40)
        timing = fit([*prefill, *decode])
        print(timing, flush=True)
        series = {"alone": held_out(rng, gap_s=8.0, requests=10), "overlapping": held_out(rng, gap_s=1.0, requests=24)}
        report: dict[str, object] = {
            "parameters": timing._asdict(),
            "cores": cores,
            "observations": len(prefill) + len(decode),
        }
        report["fitted"] = errors(
            [o.seconds for o in [*prefill, *decode]], [_predicted(o, timing) for o in [*prefill, *decode]]
        )
        report["raw"] = {"prefill": prefill, "decode": decode}
        for name, planned in series.items():
            print(f"held out, {name} ...", flush=True)
            seen, predicted = await play(client, planned), simulate(planned, timing)
            report[name] = {
                "first_token": errors([t.first_s for t in seen], [t.first_s for t in predicted]),
                "whole": errors([t.tokens_s[-1] for t in seen], [t.tokens_s[-1] for t in predicted]),
                "cached_equal": sum(a.cached == b.cached for a, b in zip(seen, predicted, strict=True)),
                "raw": [
                    [a.first_s, b.first_s, a.tokens_s[-1], b.tokens_s[-1]] for a, b in zip(seen, predicted, strict=True)
                ],
            }
    return report


def _predicted(observation: Observation, timing: TimingModel) -> float:
    values = (timing.step_s, timing.sequence_s, timing.context_s, timing.prefill_s, timing.prefill_s2, timing.request_s)
    return sum(a * b for a, b in zip(observation.row, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cached = Path.home() / ".cache/prefixpool/models/smollm2-135m-instruct"
    parser.add_argument("--model", default=os.environ.get("MODEL", str(cached)), help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--cores", default="0", help="as for taskset and VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/bench/sim_fit.json"))
    options = parser.parse_args()
    report = asyncio.run(measure(options.model, options.cores, options.repeats, options.seed))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))
    for key, value in report.items():
        if key != "raw":
            print(key, {k: v for k, v in value.items() if k != "raw"} if isinstance(value, dict) else value)


if __name__ == "__main__":
    main()
