"""The demo's workload: committed, seeded, and shaped as the report claims."""

from random import Random

from prefixpool.api.engine import EngineKind
from prefixpool_cli.demo import capacity, command, workload
from prefixpool_cli.demo.workload import Kind


def test_the_committed_fixture_is_what_the_seed_generates() -> None:
    assert workload.load() == workload.generate(workload.SEED)


def test_other_seeds_give_other_work() -> None:
    assert workload.generate(1) != workload.generate(2)


def test_at_least_200_requests_of_all_three_kinds() -> None:
    loaded = workload.load()
    assert len(loaded.order) >= 200
    assert {session.kind for session in loaded.sessions} == set(Kind)


def test_every_turn_is_sent_once_and_in_its_order() -> None:
    loaded = workload.load()
    turns: dict[int, list[int]] = {}
    for session, turn in loaded.steps():
        turns.setdefault(session, []).append(turn)
    assert turns == {i: list(range(len(s.turns))) for i, s in enumerate(loaded.sessions)}


def test_two_turns_of_a_session_are_further_apart_than_requests_in_flight() -> None:
    order = workload.load().order
    last: dict[int, int] = {}
    gaps = []
    for at, session in enumerate(order):
        if session in last:
            gaps.append(at - last[session])
        last[session] = at
    assert min(gaps) > 4


def test_sessions_are_interleaved_not_run_one_after_the_other() -> None:
    order = workload.load().order
    assert len(set(order[:40])) > 15


def test_interleave_gives_every_session_its_turns() -> None:
    order = workload.interleave(Random(7), [3, 0, 5])
    assert sorted(order) == [0, 0, 0, 2, 2, 2, 2, 2]


def test_a_chat_appends_the_models_own_replies() -> None:
    loaded = workload.load()
    chat = next(s for s in loaded.sessions if s.kind is Kind.CHAT)
    second = workload.messages(chat, 1, ["so it said"])
    first = workload.messages(chat, 0, [])
    assert second[: len(first)] == first
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"] == "so it said"
    assert second[1]["content"].startswith(chat.context)


def test_an_agents_later_messages_are_tool_results() -> None:
    agent = next(s for s in workload.load().sessions if s.kind is Kind.AGENT)
    sent = workload.messages(agent, 2, ["ls", "cat log"])
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert sent[3]["tool_call_id"] == "call-1"


def test_questions_about_a_document_share_it_and_nothing_else() -> None:
    document = next(s for s in workload.load().sessions if s.kind is Kind.DOCUMENT)
    first = workload.messages(document, 0, [])
    other = workload.messages(document, 3, ["ignored", "ignored", "ignored"])
    assert len(first) == len(other) == 2
    assert first[0] == other[0]
    assert first[1]["content"].startswith(document.context)
    assert other[1]["content"].startswith(document.context)
    assert first[1] != other[1]


def test_the_work_fits_two_replicas_but_not_one() -> None:
    loaded = workload.load()
    for engine in EngineKind:
        need = capacity.estimated_working_set(loaded, capacity.CHARS_PER_TOKEN[engine])
        holds = (capacity.device_blocks(loaded, engine, 32) - 1) * 32
        assert holds < need < 2 * holds


def test_a_cut_workload_needs_less() -> None:
    loaded = workload.load()
    cut = workload.first(loaded, 20)
    assert len(cut.steps()) == 20
    assert capacity.estimated_working_set(cut, 4.0) < capacity.estimated_working_set(loaded, 4.0)


def test_a_few_requests_left_no_room_for_the_longest_sequence() -> None:
    """`prefixpool demo --requests 1`"""
    for engine in EngineKind:
        chosen = command.plan(1, [], 4, check_output=False, evicting=False)
        assert (command.blocks_for(chosen, engine) - 1) * command.BLOCK_TOKENS >= command.MAX_MODEL_LEN
