"""The command table: what each argument list means, and which error it gets first."""

from __future__ import annotations

import pytest

from penstock.statestore.codec.commands import (
    COMMANDS,
    MAX_WRITES_AT_ONCE,
    Access,
    Command,
    Condition,
    Extension,
    Verb,
    parse,
    parse_payload,
)
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import encode_array
from tests.vectors.statestore import vectors


def described(command: Command) -> tuple[object, ...]:
    return (command.verb, command.key, command.value, command.condition, command.expected, command.ttl_ms, command.stop)


ALWAYS, NX, NEX = Condition.ALWAYS, Condition.NX, Condition.NEX
MEANINGS: list[tuple[bytes, tuple[object, ...]]] = [
    (b"SET k v", (Verb.SET, b"k", b"v", ALWAYS, b"", 0, False)),
    (b"set k v", (Verb.SET, b"k", b"v", ALWAYS, b"", 0, False)),
    (b"SET k v NX", (Verb.SET, b"k", b"v", NX, b"", 0, False)),
    (b"SET k v nx px 5", (Verb.SET, b"k", b"v", NX, b"", 5, False)),
    (b"SET k v PX 5", (Verb.SET, b"k", b"v", ALWAYS, b"", 5, False)),
    (b"SET k v PX 5 NX", (Verb.SET, b"k", b"v", NX, b"", 5, False)),
    (b"SET k v PX 31536000000000", (Verb.SET, b"k", b"v", ALWAYS, b"", 31_536_000_000_000, False)),
    (b"SET k v NEX", (Verb.SET, b"k", b"v", NEX, b"v", 0, False)),
    (b"SET k v NEX PX 5", (Verb.SET, b"k", b"v", NEX, b"v", 5, False)),
    (b"SET k v PX 5 NEX", (Verb.SET, b"k", b"v", NEX, b"v", 5, False)),
    (b"SET k v NEX old", (Verb.SET, b"k", b"v", NEX, b"old", 0, False)),
    (b"SET k v NEX old PX 5", (Verb.SET, b"k", b"v", NEX, b"old", 5, False)),
    (b"SET k v PX 5 NEX old", (Verb.SET, b"k", b"v", NEX, b"old", 5, False)),
    (b"SET k v NEX PX PX 5", (Verb.SET, b"k", b"v", NEX, b"PX", 5, False)),
    (b"SET k v NEX NX", (Verb.SET, b"k", b"v", NEX, b"NX", 0, False)),
    (b"GET k", (Verb.GET, b"k", b"", ALWAYS, b"", 0, False)),
    (b"get k", (Verb.GET, b"k", b"", ALWAYS, b"", 0, False)),
    (b"DEL k", (Verb.DEL, b"k", b"", ALWAYS, b"", 0, False)),
    (b"VDEL k v", (Verb.VDEL, b"k", b"v", ALWAYS, b"", 0, False)),
    (b"KEYNOTIFY k", (Verb.KEYNOTIFY, b"k", b"", ALWAYS, b"", 0, False)),
    (b"KEYNOTIFY k GET", (Verb.KEYNOTIFY, b"k", b"", ALWAYS, b"", 0, False)),
    (b"KEYNOTIFY k STOP", (Verb.KEYNOTIFY, b"k", b"", ALWAYS, b"", 0, True)),
    (b"keynotify k stop", (Verb.KEYNOTIFY, b"k", b"", ALWAYS, b"", 0, True)),
    (b"KEYNOTIFY *?", (Verb.KEYNOTIFY, b"*?", b"", ALWAYS, b"", 0, False)),
]


@pytest.mark.parametrize(
    ("line", "meaning"), MEANINGS, ids=lambda value: value.decode() if type(value) is bytes else ""
)
def test_meaning(line: bytes, meaning: tuple[object, ...]) -> None:
    command = parse(line.split(b" "))
    assert isinstance(command, Command)
    assert described(command) == meaning
    assert command.spec is COMMANDS[command.verb]


ERRORS: list[tuple[str, list[bytes]]] = [
    # unknown command: also before arity and key length
    *(
        ("unknown command", words)
        for words in ([b"FOO"], [b"", b"k"], [b"Get", b"k"], [b"sET", b"", b""], [b"EXPIRED"])
    ),
    # arity
    *(("wrong number of arguments", [verb]) for verb in (b"SET", b"GET", b"DEL", b"VDEL", b"KEYNOTIFY")),
    ("wrong number of arguments", [b"SET", b"k"]),
    ("wrong number of arguments", [b"GET", b"k", b"x"]),
    ("wrong number of arguments", [b"DEL", b"k", b"x"]),
    ("wrong number of arguments", [b"VDEL", b"k"]),
    ("wrong number of arguments", [b"VDEL", b"k", b"v", b"x"]),
    ("wrong number of arguments", [b"KEYNOTIFY", b"k", b"STOP", b"x"]),
    ("wrong number of arguments", [b"GET", b"", b""]),
    # options
    *(
        ("syntax error", [b"SET", b"k", b"v", *options.split(b" ")])
        for options in (
            *(b"XX", b"Nx", b"pX 5", b"NX NX", b"NX NEX", b"NEX NX PX 5 PX", b"NX x", b"PX", b"NX PX", b"NEX PX"),
            *(b"NEX a b", b"NEX a b PX 5", b"PX 5 PX 6", b"PX 5 NEX a b", b"NEX v PX 5 NX", b"a b c d e f", b"NEX px"),
            *(b"PX 0", b"PX -1", b"PX +1", b"PX 1e3", b"PX 05", b"PX 1.5", b"PX 9223372036854775808", b"PX x"),
        )
    ),
    ("syntax error", [b"SET", b"k", b"v", b"PX", b" 5"]),
    ("syntax error", [b"SET", b"k", b"v", b"PX", b""]),
    ("syntax error", [b"SET", b"k", b"v", b""]),
    ("syntax error", [b"SET", b"k", b"v", b"PX", "\u0665".encode()]),
    ("syntax error", [b"KEYNOTIFY", b"k", b"Stop"]),
    ("syntax error", [b"KEYNOTIFY", b"k", b"x", b"STOP"]),
    # syntax comes before the key's length
    ("syntax error", [b"SET", b"", b"v", b"XX"]),
    *(
        ("the key length is zero", words)
        for words in ([b"SET", b"", b""], [b"GET", b""], [b"DEL", b""], [b"VDEL", b"", b"v"], [b"KEYNOTIFY", b""])
    ),
]


@pytest.mark.parametrize(("error", "args"), ERRORS, ids=lambda value: value if isinstance(value, str) else repr(value))
def test_first_error(error: str, args: list[bytes]) -> None:
    assert parse(args) == error


@pytest.mark.parametrize(
    ("line", "extension", "error"),
    [
        *(
            (words.encode(), spec.extension, StoreError.UNKNOWN_COMMAND)
            for spec in COMMANDS.values()
            if spec.extension
            for words in (spec.examples[0].request, spec.examples[0].request.lower())
        ),
        (b"GET k ASOF 1:0:n", Extension.AS_OF, StoreError.ARITY),
        (b"KEYNOTIFY p PREFIX", Extension.PREFIX_OBSERVE, StoreError.SYNTAX),
        (b"KEYNOTIFY k AFTER 1:0:n", Extension.RESUME, StoreError.SYNTAX),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else "",
)
def test_disabled_extensions_are_refused_like_unknown_commands(
    line: bytes, extension: Extension, error: StoreError
) -> None:
    assert parse(line.split(b" "), ~extension) is error
    command = parse(line.split(b" "), extension)
    assert isinstance(command, Command)
    assert command.verb == line.split(b" ")[0].decode().upper()


def test_a_payload_that_is_not_resp3_is_a_syntax_error() -> None:
    assert parse_payload(b"GET k\r\n") is StoreError.SYNTAX
    assert isinstance(parse_payload(encode_array([b"GET", b"k"])), Command)


def test_every_error_text_of_the_sdks_exists() -> None:
    texts = vectors()["errors"]["texts_matched_exactly"]
    assert len(texts) == 12
    assert [error.value for error in StoreError][:12] == texts


def test_access_that_each_command_needs() -> None:
    """Commands that change keys, which the engine refuses when it is read-only, need Write; the others need Read."""
    for spec in COMMANDS.values():
        assert (Access.WRITE in spec.access) == spec.checks_fence, spec.verb
        assert spec.checks_fence or Access.READ in spec.access, spec.verb
    writing = {verb for verb, spec in COMMANDS.items() if spec.checks_fence}
    assert writing >= {Verb.SET, Verb.DEL, Verb.VDEL}


def test_a_batch_is_its_commands_in_order() -> None:
    line = b"BATCH 3 SET a BATCH 6 set b v NX PX 5 2 DEL a 3 VDEL b v"
    command = parse(line.split(b" "), Extension.BATCH)
    assert isinstance(command, Command)
    assert (command.verb, command.key) == (Verb.BATCH, b"a")
    alone = [parse(words.split(b" ")) for words in (b"SET a BATCH", b"SET b v NX PX 5", b"DEL a", b"VDEL b v")]
    assert [described(write) for write in command.writes] == [
        described(write) for write in alone if isinstance(write, Command)
    ]
    assert len(command.writes) == len(alone)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"BATCH", StoreError.ARITY),
        (b"BATCH 1 DEL", StoreError.ARITY),
        (b"BATCH 1 DEL 2 DEL k", StoreError.ARITY),
        (b"BATCH 2 SET k 2 DEL k", StoreError.ARITY),
        (b"BATCH 3 DEL k", StoreError.SYNTAX),
        (b"BATCH 2 DEL k 2", StoreError.SYNTAX),
        (b"BATCH 2 DEL k 0 2 DEL k", StoreError.SYNTAX),
        (b"BATCH 02 DEL k", StoreError.SYNTAX),
        (b"BATCH -1 DEL k", StoreError.SYNTAX),
        (b"BATCH 8 SET k v NX PX 5 a b", StoreError.SYNTAX),
        (b"BATCH DEL k v", StoreError.SYNTAX),
        (b"BATCH 2 GET k", StoreError.SYNTAX),
        (b"BATCH 2 FOO k", StoreError.SYNTAX),
        (b"BATCH 4 BATCH 2 DEL k", StoreError.SYNTAX),
        (b"BATCH 2 DEL k 5 SET k v PX 0", StoreError.SYNTAX),
        (b"BATCH 2 DEL k 2 DEL ", StoreError.KEY_EMPTY),
        (b"BATCH" + b" 2 DEL k" * MAX_WRITES_AT_ONCE + b" 2 DEL k", StoreError.ARITY),
    ],
    ids=lambda value: value[:40].decode() if isinstance(value, bytes) else "",
)
def test_a_batch_with_a_mistake_is_refused_as_a_whole(line: bytes, error: StoreError) -> None:
    assert parse(line.split(b" "), Extension.BATCH) is error


def test_a_batch_of_the_longest_commands_is_taken() -> None:
    words = [b"7", b"SET", b"k", b"v", b"NEX", b"w", b"PX", b"5"] * MAX_WRITES_AT_ONCE
    command = parse([b"BATCH", *words], Extension.BATCH)
    assert isinstance(command, Command)
    assert len(command.writes) == MAX_WRITES_AT_ONCE
