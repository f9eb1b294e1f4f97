"""Times are in ms and rounded down: a key lives at least as long as its PX says, and at most 1 ms longer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.statestore.codec.commands import Command, Extension, parse
from penstock.statestore.codec.dialects import SDK
from penstock.statestore.engine.requests import Answer, AnswerKind, Context
from penstock.statestore.engine.store import Engine

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000
EXTENSIONS = Extension.SCAN | Extension.TTL | Extension.MGET


class Clocked:
    """An engine with a clock in ns."""

    def __init__(self) -> None:
        self.engine = Engine(extensions=EXTENSIONS)
        self.now_ns = START_NS

    def ask(self, words: str) -> Answer:
        command = parse([word.encode() for word in words.split(" ")], EXTENSIONS)
        assert isinstance(command, Command)
        now_ms = self.now_ns // MS
        return self.engine.execute(command, Context("c", SDK, b"%d:0:c" % now_ms), now_ms, now_ms)[0]

    def has(self, look: str) -> bool:
        """Whether the key ``k`` exists, for a request or the timer."""
        now_ms = self.now_ns // MS
        if look == "timer":
            deadline = self.engine.next_deadline()
            expired = self.engine.tick(now_ms, now_ms)
            assert (deadline is None or deadline <= now_ms) == bool(expired)
            return not expired
        if look == "restart":
            kept = self.engine.record(b"k", now_ms)
            self.engine = Engine(extensions=EXTENSIONS)
            self.engine.restore([] if kept is None else [kept], None)
            return bool(self.engine.page(b"*", None, 10, now_ms)[0])
        answer = self.ask(look)
        match look.split(" ", maxsplit=1)[0]:
            case "GET":
                return answer.kind is AnswerKind.VALUE
            case "SET":
                return answer.kind is AnswerKind.NOT_MET
            case "DEL":
                return answer.count == 1
            case "VDEL":
                return answer.kind is AnswerKind.NOT_MET
            case "SCAN":
                return b"$1\r\nk\r\n" in answer.value
            case "MGET":
                return answer.value != b"*2\r\n$-1\r\n$-1\r\n"
            case _:
                left = int(answer.value[1:])
                assert left == -2 or left >= 0
                return left >= 0


LOOKS = ["GET k", "SET k w NX", "SET k w NEX", "DEL k", "VDEL k w", "SCAN *", "MGET k", "PTTL k", "timer", "restart"]


@pytest.mark.parametrize("look", LOOKS)
@given(
    start_ns=st.integers(0, MS - 1),
    px=st.integers(1, 3),
    share=st.integers(-3 * MS, 3 * MS) | st.sampled_from([-MS, -1, 0, 1, MS - 1, MS]),
)
def test_no_key_expires_before_its_time(look: str, start_ns: int, px: int, share: int) -> None:
    clocked = Clocked()
    clocked.now_ns += start_ns
    assert clocked.ask(f"SET k v PX {px}").kind is AnswerKind.OK
    due_ns = clocked.now_ns + px * MS
    clocked.now_ns = max(clocked.now_ns, due_ns + share)
    exists = clocked.has(look)
    if clocked.now_ns < due_ns:
        assert exists
    if clocked.now_ns >= due_ns + MS:
        assert not exists
