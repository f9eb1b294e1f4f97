"""The commands of the state store as data: names, arity, access, what they need; and their arguments parsed.

``COMMANDS`` is the one table that the parser, the engine and the documentation read. An argument list becomes a
:class:`Command` or the error that it deserves; when several errors apply the first of syntax, command, arity and key
length is given, and the engine goes on from there (authorisation, time stamp, token, condition, quota).

Source: state store protocol, "Supported commands", "-ERR responses", "KEYNOTIFY request messages".
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, Flag, StrEnum
from typing import Final, NamedTuple

from penstock.errors import RemoteProtocolError
from penstock.statestore.codec import decode_array

__all__ = ["COMMANDS", "Access", "Command", "CommandSpec", "Condition", "StoreError", "Verb", "parse", "parse_payload"]


class StoreError(StrEnum):
    """Error texts, exactly as clients compare them; on the wire ``-ERR <text>``.

    The first twelve are the document's, in its order. It prints ``lower version that`` in the fourth; the SDKs compare
    with ``than``, and the published dialect prints it as the document does. The last two are ours: clients must
    handle texts they do not know.
    """

    TIMESTAMP_TOO_FAR_AHEAD = (
        "the request timestamp is too far in the future; ensure that the client and broker system clocks are "
        "synchronized"
    )
    FENCE_REQUIRED = "a fencing token is required for this request"
    FENCE_TOO_FAR_AHEAD = (
        "the request fencing token timestamp is too far in the future; ensure that the client and broker system clocks "
        "are synchronized"
    )
    FENCE_LOWER = "the request fencing token is a lower version than the fencing token protecting the resource"
    QUOTA = "the quota has been exceeded"
    SYNTAX = "syntax error"
    NOT_AUTHORIZED = "not authorized"
    UNKNOWN_COMMAND = "unknown command"
    ARITY = "wrong number of arguments"
    TIMESTAMP_MISSING = "missing timestamp"
    TIMESTAMP_MALFORMED = "malformed timestamp"
    KEY_EMPTY = "the key length is zero"

    TOPIC_TOO_LONG = "the notification topic for this key would be longer than 65535 bytes"
    READ_ONLY = "the state store is read-only after a storage failure; nothing was changed"


class Verb(StrEnum):
    """The commands."""

    SET = "SET"
    GET = "GET"
    DEL = "DEL"
    VDEL = "VDEL"
    KEYNOTIFY = "KEYNOTIFY"


class Condition(Enum):
    """When a SET applies: always, only where the key is absent, or also where it holds an expected value."""

    ALWAYS = "always"
    NX = "NX"
    NEX = "NEX"


class Access(Flag):
    """What a policy must grant for the key."""

    READ = 1
    WRITE = 2


class Command:
    """One parsed request.

    ``value`` is the value of SET and the expected one of VDEL; ``expected`` the value that lets NEX apply;
    ``ttl_ms`` 0 = without expiry; ``stop`` = end the observation.
    """

    __slots__ = ("condition", "expected", "key", "spec", "stop", "ttl_ms", "value", "verb")

    def __init__(
        self,
        verb: Verb,
        key: bytes,
        value: bytes = b"",
        *,
        condition: Condition = Condition.ALWAYS,
        expected: bytes = b"",
        ttl_ms: int = 0,
        stop: bool = False,
    ) -> None:
        self.verb = verb
        self.spec = COMMANDS[verb]
        self.key = key
        self.value = value
        self.condition = condition
        self.expected = expected
        self.ttl_ms = ttl_ms
        self.stop = stop

    def access(self, *, strict_read: bool) -> Access:
        """What a policy must grant; ``strict_read``: also Read where the answer tells something of the value."""
        if strict_read and (self.condition is not Condition.ALWAYS or self.verb is Verb.VDEL):
            return self.spec.access | Access.READ
        return self.spec.access

    def __repr__(self) -> str:
        return f"<{self.verb} {self.key!r}>"


class CommandSpec(NamedTuple):
    """One row: arguments counted with the verb, access, whether a time stamp must be there and a fence is checked."""

    verb: Verb
    min_args: int
    max_args: int
    access: Access
    parse: Callable[[list[bytes]], Command | StoreError]
    """Arguments (verb and key included, at least ``min_args``) -> command; it reports syntax and too many arguments."""
    summary: str
    needs_timestamp: bool = False
    checks_fence: bool = False


_MAX_TTL_MS: Final = 2**63 - 1
_MAX_TTL_DIGITS: Final = 19

# Words are upper case, or lower case as in the published examples; nothing in between.
_NX = (b"NX", b"nx")
_NEX = (b"NEX", b"nex")
_PX = (b"PX", b"px")
_STOP = (b"STOP", b"stop")
_GET = (b"GET", b"get")


def parse_payload(payload: bytes) -> Command | StoreError:
    """What ``payload`` asks for, or the error to answer."""
    try:
        args = decode_array(payload)
    except RemoteProtocolError:
        return StoreError.SYNTAX
    return parse(args)


def parse(args: list[bytes]) -> Command | StoreError:
    """What ``args`` (verb first, never empty) asks for, or the first error of syntax, command, arity, key length."""
    spec = _BY_NAME.get(args[0])
    if spec is None:
        return StoreError.UNKNOWN_COMMAND
    if len(args) < spec.min_args:
        return StoreError.ARITY
    command = spec.parse(args)
    if isinstance(command, Command) and not command.key:
        return StoreError.KEY_EMPTY
    return command


def _parse_get(args: list[bytes]) -> Command | StoreError:
    return Command(Verb.GET, args[1]) if len(args) == 2 else StoreError.ARITY


def _parse_delete(args: list[bytes]) -> Command | StoreError:
    return Command(Verb.DEL, args[1]) if len(args) == 2 else StoreError.ARITY


def _parse_value_delete(args: list[bytes]) -> Command | StoreError:
    return Command(Verb.VDEL, args[1], args[2]) if len(args) == 3 else StoreError.ARITY


def _parse_key_notify(args: list[bytes]) -> Command | StoreError:
    if len(args) == 2:
        return Command(Verb.KEYNOTIFY, args[1])
    # GET is an option of early brokers: the value is sent with or without it.
    if args[2] not in _STOP and args[2] not in _GET:
        return StoreError.SYNTAX
    if len(args) > 3:
        return StoreError.ARITY
    return Command(Verb.KEYNOTIFY, args[1], stop=args[2] in _STOP)


def _parse_set(args: list[bytes]) -> Command | StoreError:
    """``SET key value [NX | NEX [value]] [PX ms]``, condition and PX in either order.

    The SDKs write ``NEX`` alone, which compares with the value to be set; the document's list has ``NEX <value>``.
    The number of arguments left tells them apart, and PX without its number is never read as a value: a lease that
    silently does not expire would be the worse mistake.
    """
    command = Command(Verb.SET, args[1], args[2])
    position, end = 3, len(args)
    while position < end:
        word = args[position]
        left = end - position - 1
        if word in _PX:
            ttl_ms = _ttl(args[position + 1]) if left else 0
            if not ttl_ms or command.ttl_ms:
                return StoreError.SYNTAX
            command.ttl_ms = ttl_ms
            position += 2
            continue
        if command.condition is not Condition.ALWAYS:
            return StoreError.SYNTAX
        if word in _NX:
            command.condition = Condition.NX
        elif word in _NEX:
            command.condition = Condition.NEX
            command.expected = command.value
            if (left == 1 and args[position + 1] not in _PX) or left == 3:
                command.expected = args[position + 1]
                position += 1
        else:
            return StoreError.SYNTAX
        position += 1
    return command


def _ttl(digits: bytes) -> int:
    """Milliseconds from 1 to 2^63 - 1 in plain decimal; 0 for anything else."""
    if not digits.isdigit() or digits[0] == 0x30 or len(digits) > _MAX_TTL_DIGITS:
        return 0
    ttl_ms = int(digits)
    return ttl_ms if ttl_ms <= _MAX_TTL_MS else 0


COMMANDS: Final[dict[Verb, CommandSpec]] = {
    spec.verb: spec
    for spec in (
        CommandSpec(
            Verb.SET,
            3,
            7,
            Access.WRITE,
            _parse_set,
            "set a key, also under a condition or with an expiry",
            needs_timestamp=True,
            checks_fence=True,
        ),
        CommandSpec(Verb.GET, 2, 2, Access.READ, _parse_get, "read a key"),
        CommandSpec(Verb.DEL, 2, 2, Access.WRITE, _parse_delete, "delete a key", checks_fence=True),
        CommandSpec(
            Verb.VDEL, 3, 3, Access.WRITE, _parse_value_delete, "delete a key that has a given value", checks_fence=True
        ),
        CommandSpec(
            Verb.KEYNOTIFY, 2, 3, Access.READ, _parse_key_notify, "observe a key, or stop observing it with STOP"
        ),
    )
}

_BY_NAME: Final[dict[bytes, CommandSpec]] = {
    name: spec for verb, spec in COMMANDS.items() for name in (verb.encode(), verb.lower().encode())
}
