"""What a user sees while things go on: stages, bars, restarts, interruptions."""

import asyncio
import errno
import io
import json
import os
import shlex
import signal
from pathlib import Path

import pytest
from rich.console import Console

from prefixpool_cli import engine_log, interrupt, up
from prefixpool_cli.console import PipeConsole
from prefixpool_cli.display import ArmDisplay, PoolDisplay
from prefixpool_cli.pool_watch import Stage


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain() -> Console:
    return Console(file=io.StringIO(), width=100)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=True)


def test_without_a_terminal_a_line_for_each_change_and_no_more() -> None:
    console = plain()
    with PoolDisplay(console) as display:
        for fraction in (0.3, 0.35, 0.4):
            display(Stage("local-0", "loading weights", fraction, 3.0))
        display(Stage("local-0", "ready", 1.0, 4.0, ready=True))
    assert text_of(console) == "local-0: loading weights (3 s)\nlocal-0: ready (4 s)\n"


def test_on_a_terminal_every_part_has_its_line() -> None:
    console = terminal()
    with PoolDisplay(console) as display:
        display(Stage("local-0", "loading weights", 0.4, 3.0))
        display(Stage("local-1", "ready", 1.0, 3.0, ready=True))
    shown = text_of(console)
    assert "local-0" in shown
    assert "loading weights" in shown
    assert "local-1" in shown


@pytest.mark.parametrize("console", [plain(), terminal()])
def test_arms_are_told_to_the_end(console: Console) -> None:
    with ArmDisplay(console) as display:
        display.begin("prefix", 3)
        for done in range(3):
            display.advance("prefix", f"hit rate 0.{done}")
    assert "3/3" in text_of(console)
    assert "hit rate 0.2" in text_of(console)


def test_the_engines_log_says_how_far_it_is(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert engine_log.stage(log) == ("starting", 0.0)
    log.write_text("INFO Starting to load model m...\n")
    words, fraction = engine_log.stage(log)
    assert words == "loading weights"
    log.write_text("INFO Starting to load model m...\nINFO:     Application startup complete.\n")
    assert engine_log.stage(log)[1] == 1.0 > fraction


async def _until_cancelled(cleaned: list[str]) -> bool:
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(10)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # an impatient user
        await asyncio.sleep(0.01)
        cleaned.append("done")
    return True


def test_a_closed_terminal_left_the_run_directory_and_its_key_behind() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "the terminal is gone")

    cleaned: list[str] = []

    async def closed() -> bool:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(60)
        finally:
            cleaned.append("yes")
        return True

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with pytest.raises(interrupt.CutShortError):
            interrupt.run(closed(), Console(file=Gone()))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert cleaned == ["yes"]


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    async def closed() -> bool:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return True

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert interrupt.run(closed(), plain())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_lets_the_command_clean_up_however_often_it_comes() -> None:
    console, cleaned = plain(), list[str]()
    with pytest.raises(interrupt.CutShortError):
        interrupt.run(_until_cancelled(cleaned), console)
    assert cleaned == ["done"]
    assert "stopping, this takes a few seconds" in text_of(console)
    assert "still stopping" in text_of(console)


def test_a_commands_result_comes_through() -> None:
    async def fine() -> bool:
        return True

    assert interrupt.run(fine(), plain())


@pytest.mark.parametrize("console", [plain(), terminal()])
def test_words_of_an_engine_that_look_like_markup_ended_the_pool(console: Console) -> None:
    with PoolDisplay(console) as display:
        display(Stage("local-0", "last log line: [/INST] [red]\x1b]0;owned\x07", 0.4, 3.0))
    told = text_of(console)
    assert "[/INST] [red]" in told
    assert "\x1b]0;owned" not in told


def test_a_port_of_an_address_was_shown_as_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    console, words = terminal(), "http://h:100: refused"
    with PoolDisplay(console) as display:
        display(Stage("local-0", words, 0.4, 3.0))
    assert words in text_of(console)
    with PoolDisplay(PipeConsole(100)) as display:
        display(Stage("local-0", words, 0.4, 3.0))
    assert words in capsys.readouterr().out


def test_the_curl_line_broke_at_a_quote() -> None:
    *_, flag, body = shlex.split(up.curl_line("http://127.0.0.1:8000", 'it\'s "mine"'))
    assert (flag, json.loads(body)["model"]) == ("-d", 'it\'s "mine"')


def test_the_curl_line_is_json_for_the_right_model() -> None:
    line = up.curl_line("http://127.0.0.1:8000", "tiny")
    assert line.startswith("curl -i http://127.0.0.1:8000/v1/chat/completions ")
    assert '"model": "tiny"' in line
