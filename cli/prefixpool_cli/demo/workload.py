"""The demo's workload: shared documents with questions, chats, and agents whose history grows. Pure and seeded.

The committed `workload.json` is what runs; `generate(SEED)` makes it again, letter by letter (a test holds them together).
Turns of one session keep their order and append the model's own replies, so texts beyond the first turn are known only at
run time. Every session returns after about a round of think time, hence after most of the others: with fewer tokens of
cache than the sessions have together, that is what makes a replica forget.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import resources
from random import Random
from typing import Any, Final

import msgspec

from prefixpool_cli.demo import text

SEED: Final = 20_261_129
FIXTURE: Final = "workload.json"
DOCUMENTS, CHATS, AGENTS = 8, 8, 6
TURNS: Final = 10  # of every session: 220 requests
REPLY_TOKENS: Final = 8  # the demo is about prompts
THINK_JITTER: Final = 0.25  # of one round; small enough that with a few requests in flight no turn waits for the one before

Message = dict[str, Any]


class Kind(StrEnum):
    """What a session is like."""

    DOCUMENT = "document"  # questions about one text; no history
    CHAT = "chat"
    AGENT = "agent"  # tool results come back as messages


class Turn(msgspec.Struct, frozen=True):
    """One request: what the client adds to the conversation, and how many tokens it lets the model write."""

    content: str
    max_tokens: int


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation. Chats and agents keep their history; document sessions ask every question afresh."""

    name: str
    kind: Kind
    system: str
    context: str  # stands before the content of the first user message (of every one, if there is no history)
    turns: tuple[Turn, ...]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`order[i]` is the session whose next turn is request i."""

    seed: int
    sessions: tuple[Session, ...]
    order: tuple[int, ...]

    def steps(self) -> list[tuple[int, int]]:
        """(session, turn) of every request, in the order in which they are sent."""
        seen = [0] * len(self.sessions)
        steps = []
        for session in self.order:
            steps.append((session, seen[session]))
            seen[session] += 1
        return steps


def load() -> Workload:
    """The committed workload."""
    return msgspec.json.decode(resources.files("prefixpool_cli.demo").joinpath(FIXTURE).read_bytes(), type=Workload)


def first(workload: Workload, requests: int) -> Workload:
    """The same workload, cut after so many requests (for quick looks; figures of a cut workload mean little)."""
    return msgspec.structs.replace(workload, order=workload.order[:requests])


def messages(session: Session, turn: int, replies: list[str]) -> list[Message]:
    """What request `turn` of a session sends, given the model's replies to the turns before it."""
    out: list[Message] = [{"role": "system", "content": session.system}]
    if session.kind is Kind.DOCUMENT:
        return [*out, {"role": "user", "content": session.context + session.turns[turn].content}]
    for number in range(turn + 1):
        if number:
            out.append({"role": "assistant", "content": replies[number - 1]})
        out.append(_client_message(session, number))
    return out


def _client_message(session: Session, number: int) -> Message:
    content = session.turns[number].content
    if number == 0:
        return {"role": "user", "content": session.context + content}
    if session.kind is Kind.AGENT:
        return {"role": "tool", "tool_call_id": f"call-{number}", "content": content}
    return {"role": "user", "content": content}


def generate(seed: int) -> Workload:
    """Make a workload; the same seed gives the same one."""
    draw = Random(seed)
    rules = [text.paragraph(draw, 12) for _ in Kind]  # what all sessions of a kind share: long instructions, as in practice
    sessions = (
        *(_document(draw, rules[0]) for _ in range(DOCUMENTS)),
        *(_chat(draw, rules[1]) for _ in range(CHATS)),
        *(_agent(draw, rules[2]) for _ in range(AGENTS)),
    )
    return Workload(seed=seed, sessions=sessions, order=interleave(draw, [len(s.turns) for s in sessions]))


def interleave(draw: Random, turns: list[int]) -> tuple[int, ...]:
    """Sessions start at random moments of one round; each returns after a round of think time, give or take THINK_JITTER."""
    due = []
    for session, count in enumerate(turns):
        at = draw.random()
        for _ in range(count):
            due.append((at, session))
            at += draw.uniform(1 - THINK_JITTER, 1 + THINK_JITTER)
    return tuple(session for _, session in sorted(due))


def _document(draw: Random, rules: str) -> Session:
    title = draw.choice(("Report", "Minutes", "Audit", "Survey"))
    return Session(
        name=f"document-{title.lower()}-{draw.randrange(1000, 9999)}",
        kind=Kind.DOCUMENT,
        system=f"Answer from the text that you are given, in one short sentence. Style: {rules}",
        context=text.document(draw, title, 4) + "\n\nQuestion: ",
        turns=tuple(
            Turn(f"What does it say about the {text.topic(draw)} in part {draw.randrange(1, 5)}?", REPLY_TOKENS)
            for _ in range(TURNS)
        ),
    )


def _chat(draw: Random, rules: str) -> Session:
    return Session(
        name=f"chat-{draw.randrange(1000, 9999)}",
        kind=Kind.CHAT,
        system=f"You are a calm assistant who helps with daily work. Keep answers short. You know this: {rules}",
        context=f"Some background first. {text.paragraph(draw, 18)}\n\n",
        turns=tuple(
            Turn(f"{text.sentence(draw)} What would you do about the {text.topic(draw)}?", REPLY_TOKENS)
            for _ in range(TURNS)
        ),
    )


def _agent(draw: Random, rules: str) -> Session:
    task = f"Find the cause of the {text.topic(draw)} problem. What is known: {text.paragraph(draw, 18)} "
    steps = (Turn(f"exit {draw.randrange(3)}\n{text.log_lines(draw, 2)}", REPLY_TOKENS) for _ in range(TURNS - 1))
    return Session(
        name=f"agent-{draw.randrange(1000, 9999)}",
        kind=Kind.AGENT,
        system=f"You operate a depot's services through a shell. House rules: {rules} Write one command at a time.",
        context=task,
        turns=(Turn("Begin.", REPLY_TOKENS), *steps),
    )
