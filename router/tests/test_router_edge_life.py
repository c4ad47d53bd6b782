"""TLS with renewal, and the drain of a router."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest

from prefixpool.errors import SettingsError
from prefixpool_router.tls import ServerTls
from prefixpool_testing.backend import Stream, event
from prefixpool_testing.edge import EdgeUnderTest, running_edge, until

CERTIFICATES = Path(__file__).parent / "certificates"
TOKEN = event({"choices": [{"index": 0, "text": "t"}]})


def install(name: str, folder: Path) -> dict[str, str]:
    for part in ("cert", "key"):
        shutil.copy(CERTIFICATES / f"{name}.{part}.pem", folder / f"{part}.pem")
    return {"tls_cert_file": str(folder / "cert.pem"), "tls_key_file": str(folder / "key.pem")}


def trusting(name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATES / f"{name}.cert.pem"))


async def models(edge: EdgeUnderTest, context: ssl.SSLContext) -> int:
    async with edge.client.get(f"https://127.0.0.1:{edge.edge.port}/v1/models", ssl=context) as response:
        await response.read()
        return response.status


async def test_tls_and_a_renewed_certificate(tmp_path: Path) -> None:
    async with running_edge(**install("first", tmp_path)) as edge:
        assert await models(edge, trusting("first")) == 200
        install("second", tmp_path)

        async def renewed() -> None:
            while True:
                try:
                    assert await models(edge, trusting("second")) == 200
                except OSError:
                    await asyncio.sleep(0.01)
                else:
                    return

        async with asyncio.timeout(2):
            await renewed()


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["silent", "half"])
async def test_a_client_that_never_finished_its_handshake_kept_its_connection(
    tmp_path: Path, sent: bytes, *, tls: bool
) -> None:
    files = install("first", tmp_path) if tls else {}
    async with running_edge(idle_timeout_s=0.1, **files) as edge:
        reader, writer = await edge.connect()
        writer.write(sent)
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert not tls or answer == b""


async def test_a_client_that_says_nothing_behind_its_handshake_is_cut_off(tmp_path: Path) -> None:
    async with running_edge(idle_timeout_s=0.3, **install("first", tmp_path)) as edge:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", edge.edge.port, ssl=trusting("first"), server_hostname="127.0.0.1"
        )
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.transport.abort()


def test_half_a_renewal_changes_nothing(tmp_path: Path) -> None:
    tls = ServerTls(*install("first", tmp_path).values())
    shutil.copy(CERTIFICATES / "second.cert.pem", tmp_path / "cert.pem")
    assert not tls.refresh()
    shutil.copy(CERTIFICATES / "second.key.pem", tmp_path / "key.pem")
    assert tls.refresh()
    assert not tls.refresh()


def test_files_renewed_in_the_middle_of_a_look_ended_all_further_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ServerTls(*install("first", tmp_path).values())
    real = tls._loaded

    def renewed_meanwhile(context: ssl.SSLContext) -> ssl.SSLContext:
        if context is tls.context:
            raise SettingsError("the key is another one by now")
        return real(context)

    install("second", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tls, "_loaded", renewed_meanwhile)
        assert not tls.refresh()
    install("first", tmp_path)
    assert tls.refresh()


@pytest.mark.parametrize("alone", ["tls_cert_file", "tls_key_file"])
async def test_a_key_without_its_certificate_meant_plain_http(tmp_path: Path, alone: str) -> None:
    with pytest.raises(SettingsError, match="--tls-cert-file and --tls-key-file are needed together"):
        async with running_edge(**{alone: install("first", tmp_path)[alone]}):
            pass


def test_certificate_files_that_do_not_fit_are_refused_at_start(tmp_path: Path) -> None:
    paths = install("first", tmp_path)
    with pytest.raises(SettingsError, match="missing"):
        ServerTls(paths["tls_cert_file"], str(tmp_path / "missing.pem"))
    with pytest.raises(SettingsError, match="not a certificate and its key"):
        ServerTls(paths["tls_cert_file"], str(CERTIFICATES / "second.key.pem"))


async def test_a_draining_router_finishes_streams_and_asks_clients_to_connect_anew() -> None:
    gate = asyncio.Event()
    async with running_edge() as edge:
        edge.backend.script(Stream(TOKEN, gate, TOKEN))
        async with edge.post("/v1/completions", {"stream": True}) as running:
            assert (await running.content.readchunk())[0] == TOKEN
            edge.edge.begin_drain()
            async with edge.post("/v1/completions", {}) as response:  # still accepting
                assert (response.status, response.headers["Connection"]) == (200, "close")
            async with edge.post("/v1/completions", b"nonsense") as response:
                assert (response.status, response.headers["Connection"]) == (400, "close")
            stopping = asyncio.ensure_future(edge.edge.stop(5))
            await asyncio.sleep(0.01)
            with pytest.raises(OSError, match="Connect"):
                await asyncio.open_connection("127.0.0.1", edge.edge.port)
            assert not stopping.done()
            gate.set()
            assert await running.read() == TOKEN
            assert await stopping == 0


async def test_streams_that_outlast_the_drain_are_cut_off_and_counted() -> None:
    async with running_edge() as edge:
        edge.backend.script(Stream(TOKEN, asyncio.Event()))
        async with edge.post("/v1/completions", {"stream": True}) as running:
            assert (await running.content.readchunk())[0] == TOKEN
            assert await edge.edge.stop(0.02) == 1
        await until(lambda: edge.last.ended.is_set())
        assert edge.last.outcome is not None
        assert edge.last.outcome.aborted


async def test_several_edges_share_one_port() -> None:
    async with running_edge(shared=True) as one, running_edge(port=one.edge.port, shared=True) as two:
        async with two.post("/v1/completions", {}) as response:
            assert response.status == 200
        assert one.edge.port == two.edge.port
        assert len(one.dispatcher.dispatches) + len(two.dispatcher.dispatches) == 1
