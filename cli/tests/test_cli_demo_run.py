"""The load client, the tokeniser and the greedy check against a small fake of OpenAI's API."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prefixpool_cli.demo import greedy, runner, workload
from prefixpool_cli.demo.client import ChatClient, RequestFailedError
from prefixpool_cli.demo.greedy import Difference, Token
from prefixpool_cli.demo.runner import ArmPlan
from prefixpool_cli.demo.samples import Arm, Sample
from prefixpool_cli.demo.tokens import Tokenizer


class FakeEngine:
    """Answers with the number of messages; `script` replaces answers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.script: dict[int, str] = {}
        self.in_flight = self.most_in_flight = 0
        self.logprobs: list[dict[str, Any]] = []
        self.app = web.Application()
        self.app.router.add_post("/v1/chat/completions", self.chat)
        self.app.router.add_post("/tokenize", self.tokenize)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if not body.get("stream"):
            return web.json_response({"choices": [{"logprobs": {"content": self.logprobs}}]})
        text = self.script.get(len(self.bodies) - 1, f"reply {len(body['messages'])}")
        if text == "refuse":
            return web.json_response({"error": {"message": "no"}}, status=503)
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return await self._stream(request, text, len(body["messages"]))

    async def _stream(self, request: web.Request, text: str, messages: int) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                "x-prefixpool-replica": "r-0",
                "x-prefixpool-reason": "warm",
                "x-prefixpool-predicted-tokens": "64",
            }
        )
        await response.prepare(request)
        usage = {
            "prompt_tokens": messages,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": text}, "finish_reason": None}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        if text == "break":
            events = [events[1], {"error": {"message": "engine died"}}]
        if text == "cut":
            events = events[:2]
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if text != "cut":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": list(range(len(body["messages"])))})


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine()
    async with TestServer(fake.app) as server:
        fake.url = str(server.make_url("")).rstrip("/")  # type: ignore[attr-defined]  # test data
        yield fake


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[ChatClient]:
    async with aiohttp.ClientSession() as http:
        yield ChatClient(http, engine.url, "m")  # type: ignore[attr-defined]  # set by the fixture


SMALL = workload.first(workload.load(), 60)


async def test_every_request_is_sent_with_its_sessions_own_replies(engine: FakeEngine, client: ChatClient) -> None:
    done: list[Sample] = []
    arm = await runner.run_arm(client, SMALL, ArmPlan("prefix", "prefix"), 4, done.append)
    assert [s.step for s in arm.samples] == list(range(60))
    assert len(done) == 60
    assert not [s.error for s in arm.samples if s.error]
    assert 1 < engine.most_in_flight <= 4
    last = max((s for s in arm.samples if s.kind == "chat"), key=lambda s: s.turn)
    assert last.turn > 0
    replies = [m["content"] for m in last.messages if m["role"] == "assistant"]
    assert replies == [f"reply {2 * turn + 2}" for turn in range(last.turn)]


async def test_a_sample_holds_what_headers_and_usage_say(client: ChatClient) -> None:
    arm = await runner.run_arm(client, workload.first(SMALL, 1), ArmPlan("a", "prefix"), 1, lambda _: None)
    sample = arm.samples[0]
    assert (sample.replica, sample.reason, sample.predicted_tokens) == ("r-0", "warm", 64)
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens, sample.finish) == (2, 1, 2, "stop")
    assert 0 < sample.ttft_s <= sample.ended_s - sample.started_s


@pytest.mark.parametrize(
    ("answer", "words"), [("refuse", "status 503"), ("break", "engine died"), ("cut", "the stream ended early")]
)
async def test_a_failed_request_is_counted_and_the_rest_goes_on(
    engine: FakeEngine, client: ChatClient, answer: str, words: str
) -> None:
    engine.script = {2: answer}
    arm = await runner.run_arm(client, SMALL, ArmPlan("a", "prefix"), 1, lambda _: None)
    failed = [s for s in arm.samples if s.error]
    assert [s.step for s in failed] == [2]
    assert words in failed[0].error
    assert len(arm.answered()) == 59


async def test_requests_ask_for_greedy_text_and_usage(engine: FakeEngine, client: ChatClient) -> None:
    await client.ask([{"role": "user", "content": "x"}], 8)
    assert engine.bodies[0]["temperature"] == 0
    assert engine.bodies[0]["stream_options"] == {"include_usage": True}
    assert engine.bodies[0]["max_tokens"] == 8


async def test_tokens_are_those_of_the_engine_and_the_last_chosen_one_is_not_stored(client: ChatClient) -> None:
    messages = ({"role": "user", "content": "x"}, {"role": "user", "content": "y"})
    sample = Sample(
        step=3, session=0, turn=0, kind="chat", started_s=0, prompt_tokens=2, output_tokens=2, reply="z", messages=messages
    )
    tokens = await Tokenizer(client).of([sample])
    assert tokens[3].prompt == (0, 1)
    assert tokens[3].stored == (0, 1, 2)


async def test_an_engine_that_counts_otherwise_than_it_charges_is_told(client: ChatClient) -> None:
    sample = Sample(
        step=3, session=0, turn=0, kind="chat", started_s=0, prompt_tokens=7, messages=({"role": "user", "content": "x"},)
    )
    with pytest.raises(RequestFailedError, match="counts 1 tokens, the answer said 7"):
        await Tokenizer(client).of([sample])


def _token(text: str, best: float, second: float) -> Token:
    return Token(text.encode(), best, second)


@pytest.mark.parametrize(
    ("reply", "gap"),
    [("ab", 0.0), ("aX", 0.04), ("Xb", 2.9), ("a", 0.04), ("abc", greedy.UNKNOWN)],
)
def test_the_gap_is_that_of_the_token_where_answers_part(reply: str, gap: float) -> None:
    alone = [_token("a", -0.1, -3.0), _token("b", -0.70, -0.74)]
    assert greedy.gap_at_difference(reply.encode(), alone) == pytest.approx(gap)


def test_only_a_near_tie_excuses_a_difference() -> None:
    gaps = (0.0, 0.05, 0.051, 0.125, 0.25, 2.9, greedy.UNKNOWN)
    found = greedy.figures(9, [Difference(step=i, pool="a", alone="b", gap=gap) for i, gap in enumerate(gaps)])
    assert (found.compared, found.equal, found.near_ties) == (9, 2, 2)
    assert (found.wrong, found.steps_wrong) == (5, (2, 3, 4, 5, 6))


async def test_greedy_answers_are_compared_with_those_of_one_engine(engine: FakeEngine, client: ChatClient) -> None:
    arm = await runner.run_arm(client, SMALL, ArmPlan("prefix", "prefix"), 2, lambda _: None)
    same = await greedy.compare(client, arm, SMALL, 2, lambda _: None)
    assert (same.compared, same.equal, same.wrong) == (60, 60, 0)


async def test_a_wrong_answer_is_found(engine: FakeEngine, client: ChatClient) -> None:
    arm = await runner.run_arm(client, workload.first(SMALL, 3), ArmPlan("prefix", "prefix"), 1, lambda _: None)
    spoiled = Arm(
        name=arm.name, policy=arm.policy, precise=True, started_s=0, ended_s=1,
        samples=(*arm.samples[:2], _with_reply(arm.samples[2], "something else")),
    )  # fmt: skip
    engine.logprobs = [{"token": "reply", "top_logprobs": [{"logprob": -0.1}, {"logprob": -2.5}]}]
    found = await greedy.compare(client, spoiled, SMALL, 1, lambda _: None)
    assert (found.equal, found.near_ties, found.wrong, found.steps_wrong) == (2, 0, 1, (2,))
    assert found.differences[0].pool == "something else"
    assert found.differences[0].gap == pytest.approx(2.4)


async def test_an_engine_without_log_probabilities_cannot_excuse_anything(engine: FakeEngine, client: ChatClient) -> None:
    arm = await runner.run_arm(client, workload.first(SMALL, 1), ArmPlan("prefix", "prefix"), 1, lambda _: None)
    spoiled = Arm(
        name="prefix", policy="prefix", precise=True, started_s=0, ended_s=1, samples=(_with_reply(arm.samples[0], "else"),)
    )
    engine.logprobs = None  # type: ignore[assignment]  # what an engine without them answers
    with pytest.raises(RequestFailedError, match="no log-probabilities"):
        await greedy.compare(client, spoiled, SMALL, 1, lambda _: None)


def _with_reply(sample: Sample, reply: str) -> Sample:
    return Sample(**{field: getattr(sample, field) for field in sample.__struct_fields__} | {"reply": reply})
