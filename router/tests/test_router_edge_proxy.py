"""What passes through the edge, byte for byte, and what is changed on the way."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixpool.errors import RequestError
from prefixpool.names import H_CACHED, H_POLICY, H_PREDICTED, H_REASON, H_REPLICA, H_REQUEST_ID, H_SESSION
from prefixpool_testing.backend import Answer, Raw, Stream, Then, as_json, event
from prefixpool_testing.edge import running_edge, until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 96}}
TOKENS = [event({"choices": [{"index": 0, "delta": {"content": f"t{i}"}}]}) for i in range(5)]
USAGE_CHUNK = event({"choices": [], "usage": USAGE})
DONE = event(b"[DONE]")


async def chunks_of(response: Any) -> list[bytes]:
    """HTTP chunks, as the client's parser saw them."""
    out, partial = [], b""
    async for data, end in response.content.iter_chunks():
        partial += data
        if end:
            out.append(partial)
            partial = b""
    assert not partial
    return out


@pytest.mark.parametrize("answer", ["whole", "stream", "other"])
@pytest.mark.parametrize("value", [b"caf\xe9", b"\xff\xfe", "caf\u00e9 \U0001f600".encode(), b"\xed\xa0\x80", b"plain"])
async def test_header_values_that_are_not_utf_8_arrived_without_those_bytes(answer: str, value: bytes) -> None:
    path = b"/v1/other" if answer == "other" else b"/v1/chat/completions"
    kind, output = (b"text/event-stream", TOKENS[0]) if answer == "stream" else (b"application/json", b"{}")
    fields = b"X-Note: " + value + b"\r\nContent-Type: " + kind + b"\r\nContent-Length: %d\r\n\r\n" % len(output)
    async with running_edge() as edge:
        edge.backend.script(Raw(b"HTTP/1.1 200 Fine " + value + b"\r\n" + fields + output))
        reader, writer = await edge.connect()
        writer.write(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nX-Note: " + value + b"\r\nContent-Length: 2\r\n\r\n{}")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 Fine " + value + b"\r\n")
        assert b"\r\nX-Note: " + value + b"\r\n" in head
        assert edge.backend.received[0].headers["X-Note"].encode("utf-8", "surrogateescape") == value


CHUNKED = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ONE_TOKEN = b"%x\r\n%b\r\n0\r\n\r\n" % (len(TOKENS[0]), TOKENS[0])
WHOLE = b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("control", [b"\x01", b"\x1b", b"\x7f"])
@pytest.mark.parametrize("rest", [CHUNKED + ONE_TOKEN, WHOLE], ids=["stream", "whole"])
async def test_one_bad_header_field_of_an_engine_cost_its_whole_answer(rest: bytes, control: bytes) -> None:
    async with running_edge() as edge:
        edge.backend.script(Raw(b"HTTP/1.1 200 OK\r\nX-Bad: a" + control + b"b\r\nX-Good: c\r\n" + rest))
        async with edge.post("/v1/chat/completions", CHAT) as response:
            assert response.status == 200
            assert await response.read() in (TOKENS[0], b"{}")
        assert ("X-Bad" in response.headers, response.headers["X-Good"]) == (False, "c")


async def test_a_fault_at_the_beginning_of_a_stream_left_its_booking_and_a_garbled_answer() -> None:
    """It said so many bytes in its head, and went out in chunks: their ends were taken for the next answer."""
    async with running_edge() as edge:
        edge.backend.script(Raw(b"HTTP/1.1 200 O\x01K\r\n" + CHUNKED + ONE_TOKEN, then=Then.CLOSE))
        reader, writer = await edge.connect()
        body = msgspec.json.encode(CHAT)
        request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 ")
        assert edge.last.ended.is_set()
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert b"The router failed." in await reader.readexactly(length)
        writer.write(request)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_a_whole_answer() -> None:
    body = b'{"id": "x",\n "choices":[{"message":{"content":"\xc3\xa9"}}], "usage": ' + msgspec.json.encode(USAGE) + b"}\n"
    async with running_edge() as edge:
        edge.backend.script(Answer(body, headers={"Content-Type": "application/json", "X-Engine": "1"}))
        async with edge.post("/v1/chat/completions?a=b%20c", CHAT, headers={H_REQUEST_ID: "my-id"}) as response:
            assert response.status == 200
            assert await response.read() == body
        assert response.headers["X-Engine"] == "1"
        assert response.headers["Content-Length"] == str(len(body))
        assert response.headers[H_REQUEST_ID] == "my-id"
        assert response.headers[H_REPLICA] == "p-0"
        assert response.headers[H_REASON] == "warm"
        assert response.headers[H_PREDICTED] == "32"
        assert response.headers[H_CACHED] == "96"
        received = edge.backend.received[0]
        assert received.path == "/v1/chat/completions?a=b%20c"
        assert received.headers[H_REQUEST_ID] == "my-id"
        outcome = edge.last.outcome
        assert outcome is not None
        assert (outcome.status, outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (200, 100, 96, 7)
        assert (outcome.error, outcome.aborted, edge.last.first_bytes) == ("", False, 0)


async def test_request_bytes_pass_untouched() -> None:
    raw = b'{"messages": [], "model":"m" , "big":123456789012345678901234567890, "huge": 1e400, "tools":[{"function":{}}]}'
    async with running_edge() as edge:
        async with edge.post("/v1/chat/completions", raw, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 200
        assert edge.backend.received[0].body == raw
        assert edge.backend.received[0].headers["Content-Type"] == "application/json"
        assert edge.last.request.body is not None
        assert edge.last.request.body["model"] == "m"
        assert edge.last.request.body_bytes == raw


async def test_what_the_engine_is_told_of_loading_is_added_at_the_end() -> None:
    raw = b'{"messages": [], "kv_transfer_params":{"do_remote_prefill":true}, "big":123456789012345678901234567890}\n'
    async with running_edge() as edge:
        edge.dispatcher.told = {"max_load_tokens": 0}
        async with edge.post("/v1/chat/completions", raw) as response:
            assert response.status == 200
        assert edge.backend.received[0].body == (
            b'{"messages":[],"big":123456789012345678901234567890,"kv_transfer_params":{"max_load_tokens":0}}'
        )
        assert not edge.last.request.steers_loading


async def test_another_attempt_is_told_what_its_own_replica_needs() -> None:
    async with running_edge(2) as edge:
        edge.dispatcher.told = {"max_load_tokens": 0}
        edge.backends[0].script(Answer(b"{}", status=503, headers={"x-prefixpool-busy": "1"}))
        async with edge.post("/v1/chat/completions", CHAT) as response:
            assert response.status == 200
        assert [backend.received[0].json() for backend in edge.backends] == [
            CHAT | {"kv_transfer_params": {"max_load_tokens": 0}}
        ] * 2


async def test_a_key_that_may_steer_loading_keeps_what_it_says(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(b'k').hexdigest()} team allow=kv_transfer_params\n")
    salt = tmp_path / "salt"
    salt.write_text("a salt key of the pool")
    headers = {"Authorization": "Bearer k"}
    async with running_edge(keys_file=str(keys), salt_key_file=str(salt)) as edge:
        steering = CHAT | {"kv_transfer_params": {"max_load_tokens": 64}}
        for body in (steering, CHAT):
            async with edge.post("/v1/chat/completions", body, headers=headers) as response:
                assert response.status == 200
            assert edge.backend.received[-1].json().get("kv_transfer_params") == body.get("kv_transfer_params")
            assert edge.last.request.steers_loading is (body is steering)


async def test_stream_chunks_keep_their_boundaries_and_the_usage_chunk_is_withheld() -> None:
    async with running_edge() as edge:
        edge.backend.script(Stream(*TOKENS[:3], TOKENS[3] + TOKENS[4], USAGE_CHUNK, DONE))
        async with edge.post("/v1/chat/completions", CHAT | {"stream": True}) as response:
            assert await chunks_of(response) == [*TOKENS[:3], TOKENS[3] + TOKENS[4], DONE]
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert H_CACHED not in response.headers
            assert response.headers[H_PREDICTED] == "32"
        assert edge.backend.received[0].json()["stream_options"] == {"include_usage": True}
        outcome = edge.last.outcome
        assert outcome is not None
        assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (100, 96, 7)
        assert edge.last.first_bytes == 1


async def test_a_stream_with_a_declared_length_may_lose_its_usage_chunk() -> None:
    whole = TOKENS[0] + USAGE_CHUNK + DONE
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(whole)
    async with running_edge() as edge:
        edge.backend.script(Raw(head + whole))
        async with edge.post("/v1/chat/completions", CHAT | {"stream": True}) as response:
            assert await response.read() == TOKENS[0] + DONE


async def test_usage_that_was_asked_for_is_delivered() -> None:
    async with running_edge() as edge:
        edge.backend.script(Stream(TOKENS[0], USAGE_CHUNK, DONE))
        body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        async with edge.post("/v1/chat/completions", body) as response:
            assert await response.read() == TOKENS[0] + USAGE_CHUNK + DONE
        assert edge.backend.received[0].json() == body
        assert edge.last.outcome is not None
        assert edge.last.outcome.cached_tokens == 96


async def test_each_event_leaves_before_the_next_one_is_made() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    async with running_edge() as edge:
        edge.backend.script(Stream(TOKENS[0], gates[0], TOKENS[1], gates[1], b'data: {"half', gates[2], b'": 1}\n\n', DONE))
        body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        async with edge.post("/v1/chat/completions", body) as response:
            for expected, gate in zip([TOKENS[0], TOKENS[1], b'data: {"half'], gates, strict=True):
                assert (await response.content.readchunk())[0] == expected
                gate.set()
            assert await response.read() == b'": 1}\n\n' + DONE


async def test_a_bare_role_chunk_does_not_wait_for_the_first_token() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    gate = asyncio.Event()
    async with running_edge() as edge:
        edge.backend.script(Stream(role, gate, TOKENS[0], DONE))
        async with edge.post("/v1/chat/completions", CHAT | {"stream": True}) as response:
            assert (await response.content.readchunk())[0] == role
            gate.set()
            assert await response.read() == TOKENS[0] + DONE


async def test_one_http_chunk_in_two_packets_stays_one_chunk() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    size = f"{len(TOKENS[0]):x}\r\n".encode()
    gate = asyncio.Event()
    async with running_edge() as edge:
        edge.backend.script(Raw(head + size + TOKENS[0][:10], gate, TOKENS[0][10:] + b"\r\n0\r\n\r\n"))
        asyncio.get_running_loop().call_later(0.02, gate.set)
        async with edge.post("/v1/chat/completions", CHAT | {"stream": True}) as response:
            assert await chunks_of(response) == [TOKENS[0]]


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_errors_of_the_engine_pass_byte_equal_and_are_not_retried(status: int) -> None:
    body = b'{"error": {"message":"This model\'s maximum context length is 8 tokens", "code": 400}}\n'
    async with running_edge(replicas=2) as edge:
        edge.backend.script(Answer(body, status, {"Content-Type": "application/json", "Retry-After": "7"}))
        async with edge.post("/v1/chat/completions", CHAT | {"stream": True}) as response:
            assert (response.status, await response.read()) == (status, body)
            assert response.headers["Retry-After"] == "7"
            assert response.headers[H_REPLICA] == "p-0"
        assert [len(backend.received) for backend in edge.backends] == [1, 0]
        assert edge.last.outcome is not None
        assert edge.last.outcome.status == status


async def test_internal_fields_and_headers_of_clients_do_not_reach_the_engine() -> None:
    sent = CHAT | {"cache_salt": "x", "session_id": "s", "kv_transfer_params": {}, "vllm_xargs": {}, "priority": -9}
    sent |= {"skip_reading_prefix_cache": True, "unknown": {"kept": True}}
    fields = {H_SESSION: "s2", "X-Vllm-Priority": "-9", "x-data-parallel-rank": "1", "Authorization": "Bearer mine"}
    async with running_edge() as edge:
        async with edge.post("/v1/chat/completions", sent, headers=fields) as response:
            assert response.status == 200
        received = edge.backend.received[0]
        assert received.json() == CHAT | {"unknown": {"kept": True}}
        assert not {"x-session-id", "x-vllm-priority", "x-data-parallel-rank", "authorization"} & {
            k.lower() for k in received.headers
        }
        assert edge.last.request.session == "s2"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
)
async def test_scopes_get_their_own_salt_and_the_engine_its_key(tmp_path: Path, path: str) -> None:
    (tmp_path / "keys").write_text("".join(f"{hashlib.sha256(k.encode()).hexdigest()} {k}-scope\n" for k in ("a", "b")))
    (tmp_path / "salt").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "engine").write_text("engine-key\n")
    files = {f"{n}_file": str(tmp_path / p) for n, p in (("keys", "keys"), ("salt_key", "salt"), ("engine_key", "engine"))}
    async with running_edge(**files) as edge:
        for key in ("a", "b", "a"):
            body = {"model": "m", "cache_salt": "guess"}
            async with edge.post(path, body, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == 200
        first, second, third = [received.json()["cache_salt"] for received in edge.backend.received]
        assert first == third != second
        assert "guess" not in (first, second)
        assert [d.request.scope_salt for d in edge.dispatcher.dispatches] == [first, second, third]
        assert all(r.headers["Authorization"] == "Bearer engine-key" for r in edge.backend.received)
        async with edge.post(path, {}) as response:
            assert response.status == 401
            assert (await response.json())["error"]["type"] == "authentication_error"


async def test_with_scopes_even_an_unknown_path_can_not_carry_a_clients_salt(tmp_path: Path) -> None:
    (tmp_path / "salt").write_text("0123456789abcdef0123456789abcdef")
    async with running_edge(salt_key_file=str(tmp_path / "salt")) as edge:
        async with edge.post("/v1/chat/completions/batch", {"cache_salt": "x", "messages": []}) as response:
            assert response.status == 200
        assert edge.backend.received[0].json()["cache_salt"] == edge.last.request.scope_salt != "x"
        async with edge.post(
            "/v1/audio/transcriptions", b"--b\r\n", headers={"Content-Type": "multipart/form-data"}
        ) as response:
            assert response.status == 200
        assert edge.backend.received[1].body == b"--b\r\n"


async def test_other_paths_are_streamed_both_ways_untouched() -> None:
    body = b"\x00\xff" * 3_000_000

    async def upload() -> Any:
        yield body[:10]
        await until(lambda: edge.backend.connections)  # the rest is sent only when the engine is being told
        yield body[10:]

    async with running_edge() as edge:
        edge.backend.script(Stream(b"RIFF", b"\x00" * 200_000, headers={"Content-Type": "audio/wav"}))
        async with edge.client.post(
            edge.url + "/v1/audio/speech", data=upload(), headers={"Content-Type": "a/b"}
        ) as response:
            assert await response.read() == b"RIFF" + b"\x00" * 200_000
            assert response.headers["Content-Type"] == "audio/wav"
        assert edge.backend.received[0].body == body
        assert edge.last.request.body is None
        assert edge.last.outcome is not None
        assert edge.last.outcome.status == 200


async def test_models_by_get_and_head() -> None:
    async with running_edge() as edge:
        edge.backend.default = as_json({"object": "list", "data": []})
        async with edge.client.get(edge.url + "/v1/models") as response:
            assert await response.json() == {"object": "list", "data": []}
        async with edge.client.head(edge.url + "/v1/models") as response:
            assert (response.status, response.headers["Content-Length"]) == (200, "27")
        assert [received.method for received in edge.backend.received] == ["GET", "HEAD"]


async def test_models_are_listed_from_the_settings_while_no_replica_can_be_asked() -> None:
    async with running_edge(served_models=("base", "adapter")) as edge:
        edge.dispatcher.refusal = RequestError(503, "The pool has no replicas now.", retry_after_s=10)
        async with edge.client.get(edge.url + "/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["base", "adapter"]
            assert response.headers[H_REQUEST_ID]
        async with edge.client.head(edge.url + "/v1/models") as response:
            assert response.status == 200
        async with edge.post("/v1/completions", {"prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "10")
    async with running_edge() as edge:
        edge.dispatcher.refusal = RequestError(503, "The pool has no replicas now.", retry_after_s=10)
        async with edge.client.get(edge.url + "/v1/models") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "10")


async def test_methods() -> None:
    async with running_edge() as edge:
        async with edge.client.options(edge.url + "/v1/chat/completions") as response:
            assert (response.status, response.headers["Allow"]) == (204, "POST, OPTIONS")
        async with edge.client.get(edge.url + "/v1/chat/completions") as response:
            assert response.status == 405
        async with edge.client.request("TRACE", edge.url + "/v1/files") as response:
            assert response.status == 405
        assert not edge.backend.received


async def test_a_preflight_is_answered_as_docs_install_says_without_a_word_of_cors() -> None:
    fields = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    async with running_edge() as edge:
        async with edge.client.options(edge.url + "/v1/chat/completions", headers=fields) as response:
            assert response.status == 204
            assert not [name for name in response.headers if name.lower().startswith("access-control-")]
        assert not edge.backend.received


async def test_unknown_paths_are_404_in_the_dialect_of_the_path() -> None:
    async with running_edge() as edge:
        for path, shape in (("/metrics", "error"), ("/v1/messages/", "type")):
            async with edge.post(path, {}) as response:
                assert response.status == 404
                assert shape in await response.json()
                assert response.headers[H_REQUEST_ID]
        assert not edge.dispatcher.dispatches


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/other", 200),
        ("GET", "/v1/models", 200),
        ("OPTIONS", "/v1/models", 204),
        ("GET", "/metrics", 404),
    ],
)
async def test_answers_told_the_versions_of_python_and_aiohttp(method: str, path: str, status: int) -> None:
    async with running_edge() as edge:
        edge.backend.script(Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"))
        async with edge.client.request(method, edge.url + path, json={}) as response:
            assert (response.status, response.headers.getall("Server")) == (status, ["prefixpool"])


async def test_what_an_engine_calls_itself_is_passed_on() -> None:
    async with running_edge() as edge:
        edge.backend.script(Raw(b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\nContent-Length: 2\r\n\r\n{}"))
        async with edge.post("/v1/completions", {}) as response:
            assert response.headers.getall("Server") == ["uvicorn"]


async def test_the_policy_header_counts_only_where_it_is_allowed() -> None:
    for allowed, expected in ((False, ""), (True, "random")):
        async with running_edge(policy_header=allowed) as edge:
            async with edge.post("/v1/completions", {"prompt": "x"}, headers={H_POLICY: "random"}) as response:
                assert response.status == 200
            assert edge.last.request.policy == expected
            assert H_POLICY not in edge.backend.received[0].headers


async def test_anthropic_usage_is_passed_as_it_is_and_understood() -> None:
    usage = {"input_tokens": 9, "cache_read_input_tokens": 1088, "cache_creation_input_tokens": 0, "output_tokens": 4}
    pieces = [
        event({"type": "message_start", "message": {"usage": {"input_tokens": 1097, "output_tokens": 0}}}, "message_start"),
        event({"type": "content_block_delta", "delta": {"text": "x"}}, "content_block_delta"),
        event({"type": "message_delta", "delta": {}, "usage": usage}, "message_delta"),
        event({"type": "message_stop"}, "message_stop"),
    ]
    async with running_edge() as edge:
        edge.backend.script(Stream(*pieces), as_json({"type": "message", "usage": usage}))
        async with edge.post("/v1/messages", CHAT | {"stream": True}) as response:
            assert await chunks_of(response) == pieces
        assert edge.backend.received[0].json() == CHAT | {"stream": True}
        assert edge.last.outcome is not None
        assert (edge.last.outcome.prompt_tokens, edge.last.outcome.cached_tokens) == (1097, 1088)
        async with edge.post("/v1/messages", CHAT) as response:
            assert response.headers[H_CACHED] == "1088"


async def test_prefill_of_a_responses_stream_is_over_with_its_first_output() -> None:
    gate = asyncio.Event()
    created = event({"type": "response.created", "response": {}}, "response.created")
    delta = event({"type": "response.output_text.delta", "delta": "x"}, "response.output_text.delta")
    async with running_edge() as edge:
        edge.backend.script(Stream(created, gate, delta))
        async with edge.post("/v1/responses", {"input": "x", "stream": True}) as response:
            assert (await response.content.readchunk())[0] == created
            assert edge.last.first_bytes == 0
            gate.set()
            assert await response.read() == delta
        assert edge.last.first_bytes == 1


async def test_stored_responses_are_refused_unless_engines_keep_them() -> None:
    async with running_edge() as edge:
        async with edge.post("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "previous_response_id"
        assert not edge.backend.received
    async with running_edge(engine_store=True) as edge:
        async with edge.post("/v1/responses", {"input": "x", "store": True}) as response:
            assert response.status == 200
        async with edge.client.get(edge.url + "/v1/responses/resp_1") as response:
            assert response.status == 200


async def test_no_prompt_in_any_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="prefixpool_router")
    async with running_edge() as edge:
        edge.dispatcher.dispatch = None  # type: ignore[method-assign, assignment]
        async with edge.post("/v1/completions", {"prompt": "the secret"}) as response:
            assert response.status == 500
            assert (await response.json())["error"]["message"] == "The router failed."
    assert "Request failed" in caplog.text
    assert "secret" not in caplog.text
