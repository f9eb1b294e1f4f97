"""The commands of the state store as data: names, arity, access, what they need; and their arguments parsed.

``COMMANDS`` is the one table that the parser, the engine and the documentation read. An argument list becomes a
:class:`Command` or the error that it deserves; when several errors apply the first of syntax, command, arity and key
length is given, and the engine checks the rest (authorisation, time stamp, token, condition, quota).

Source: state store protocol, "Supported commands", "-ERR responses", "KEYNOTIFY request messages".
"""

from __future__ import annotations

from enum import Enum, Flag, StrEnum
from typing import Final, assert_never, final

from librt.strings import read_i32_le
from mypy_extensions import i64, mypyc_attr

from penstock.errors import RemoteProtocolError
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.glob import MAX_PATTERN
from penstock.statestore.codec.resp3 import array_head, check_end, decode_array, element
from penstock.statestore.hlc import Hlc, parse_wire

__all__ = [
    "COMMANDS",
    "MAX_KEYS_AT_ONCE",
    "MAX_TTL_MS",
    "MAX_WRITES_AT_ONCE",
    "Access",
    "Command",
    "CommandSpec",
    "Condition",
    "Extension",
    "Verb",
    "parse",
    "parse_payload",
    "ttl_of",
]


_COMPILED: Final = not __file__.endswith(".py")


class Verb(StrEnum):
    """The commands."""

    SET = "SET"
    GET = "GET"
    DEL = "DEL"
    VDEL = "VDEL"
    KEYNOTIFY = "KEYNOTIFY"
    SCAN = "SCAN"
    MGET = "MGET"
    MVALUES = "MVALUES"
    PTTL = "PTTL"
    BATCH = "BATCH"

    __hash__ = str.__hash__  # the enum's own is Python code, and runs for every request


class Extension(Flag):
    """Features that the published document does not have. ``SCAN`` is on by default, since the newest SDKs use it.

    What is off is refused as any store would refuse it: an unknown command, or an unknown option (a syntax error).
    """

    NONE = 0
    SCAN = 1
    MGET = 2
    TTL = 4
    PREFIX_OBSERVE = 8
    RESUME = 16
    AS_OF = 32
    PREFIX_FENCE = 64
    BATCH = 128


class Condition(Enum):
    """When a SET applies: always, only where the key is absent, or also where it holds an expected value."""

    ALWAYS = "always"
    NX = "NX"
    NEX = "NEX"


class Access(Flag):
    """Permissions that a policy grants for a key."""

    READ = 1
    WRITE = 2


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Command:
    """One parsed request.

    ``key`` is the pattern of SCAN, the first of ``keys`` and of ``writes``, and the prefix where ``prefix`` is true.
    ``value`` is the value of SET, the expected one of VDEL and the continuation token of SCAN; ``expected`` the value
    that lets NEX apply; ``ttl_ms`` 0 = without expiry; ``stop`` = end the observation; ``keys`` those of MGET and
    MVALUES; ``writes`` the commands of BATCH; ``version`` the one that GET goes back to and that an observation resumes
    after.
    """

    __slots__ = (
        "condition",
        "expected",
        "key",
        "keys",
        "prefix",
        "spec",
        "stop",
        "ttl_ms",
        "value",
        "verb",
        "version",
        "writes",
    )

    def __init__(
        self,
        spec: CommandSpec,
        key: bytes,
        value: bytes = b"",
        *,
        condition: Condition = Condition.ALWAYS,
        expected: bytes = b"",
        ttl_ms: int = 0,
        stop: bool = False,
        keys: tuple[bytes, ...] = (),
        writes: tuple[Command, ...] = (),
        version: Hlc | None = None,
        prefix: bool = False,
    ) -> None:
        self.verb = spec.verb
        self.spec = spec
        self.key = key
        self.value = value
        self.condition = condition
        self.expected = expected
        self.ttl_ms = ttl_ms
        self.stop = stop
        self.keys = keys
        self.writes = writes
        self.version = version
        self.prefix = prefix

    def access(self, *, strict_read: bool) -> Access:
        """The permissions that the command needs; ``strict_read``: also Read if the answer depends on the value."""
        if strict_read and (self.condition is not Condition.ALWAYS or self.verb is Verb.VDEL):
            return self.spec.access | Access.READ
        return self.spec.access

    def __repr__(self) -> str:
        return f"<{self.verb} {self.key!r}>"


@final
class CommandSpec:
    """One row: arguments counted with the verb, access, whether a time stamp must be there and a fence is checked.

    ``upper`` and ``lower`` are the two ways in which the verb is written, ``upper_word`` and ``lower_word`` their first
    four bytes as a number, ``size`` is their length.
    ``syntax`` is how the arguments are written, ``extension`` what must be switched on for the command.
    """

    __slots__ = (
        "access",
        "checks_fence",
        "extension",
        "lower",
        "lower_word",
        "max_args",
        "min_args",
        "needs_timestamp",
        "size",
        "summary",
        "syntax",
        "upper",
        "upper_word",
        "verb",
    )

    def __init__(
        self,
        verb: Verb,
        min_args: int,
        max_args: int,
        access: Access,
        syntax: str,
        summary: str,
        *,
        needs_timestamp: bool = False,
        checks_fence: bool = False,
        extension: Extension = Extension.NONE,
    ) -> None:
        self.verb = verb
        self.upper = verb.encode()
        self.lower = verb.lower().encode()
        self.size: i64 = len(verb)
        self.upper_word = _first_four(self.upper)
        self.lower_word = _first_four(self.lower)
        self.min_args = min_args
        self.max_args = max_args
        self.access = access
        self.syntax = syntax
        self.summary = summary
        self.needs_timestamp = needs_timestamp
        self.checks_fence = checks_fence
        self.extension = extension


# Reading a member of an enum costs as much as a call: those that every request meets have names of their own.
_ALWAYS: Final = Condition.ALWAYS
_NX_CONDITION: Final = Condition.NX
_NEX_CONDITION: Final = Condition.NEX
_PLAIN: Final = Extension.NONE
_NONE: Final[list[bytes]] = []
_SET_VERB: Final = Verb.SET
_GET_VERB: Final = Verb.GET
_DEL_VERB: Final = Verb.DEL
_VDEL_VERB: Final = Verb.VDEL

# Words are upper case, or lower case as in the published examples; nothing in between.
_NX = (b"NX", b"nx")
_NEX = (b"NEX", b"nex")
_PX = (b"PX", b"px")
_STOP = (b"STOP", b"stop")
_GET = (b"GET", b"get")
_ASOF = (b"ASOF", b"asof")
_AFTER = (b"AFTER", b"after")
_PREFIX = (b"PREFIX", b"prefix")

MAX_TTL_MS: Final = 1000 * 365 * 86_400_000
"""The longest expiry, 1,000 years: the instant stays one that every language's date type can hold."""
_MAX_TTL_DIGITS: Final = len(str(MAX_TTL_MS))

MAX_KEYS_AT_ONCE: Final = 10_000
"""Keys of one MGET or MVALUES, some 10 ms."""

MAX_WRITES_AT_ONCE: Final = 1000
"""Commands of one BATCH, some 10 ms."""


def parse_payload(payload: bytes, extensions: Extension = Extension.SCAN) -> Command | StoreError:
    """Parse a request's payload; return the command, or the error to answer."""
    try:
        return _parse_elements(payload, extensions) if _COMPILED else parse(decode_array(payload), extensions)
    except RemoteProtocolError:
        return StoreError.SYNTAX


def _parse_elements(payload: bytes, extensions: Extension) -> Command | StoreError:
    """The second form of :func:`parse`: without a list of all arguments, which costs as much as all that is in it.

    The array is read to its end before anything else: an error in it is the first.
    """
    count, position = array_head(payload)
    verb_at, position = element(payload, position)
    spec = _spec_at(payload, verb_at, position - 2)
    key = first = b""
    rest = _NONE
    if count > 1:
        start, position = element(payload, position)
        key = payload[start : position - 2]
    if count > 2:
        start, position = element(payload, position)
        first = payload[start : position - 2]
    if count > 3:
        rest = []
        for _ in range(count - 3):
            start, position = element(payload, position)
            rest.append(payload[start : position - 2])
    check_end(payload, position)
    return _parse(spec, count, key, first, rest, extensions)


def _spec_at(payload: bytes, start: i64, end: i64) -> CommandSpec | None:
    """The command whose name is ``payload[start:end]``."""
    size = end - start
    if size < 3:
        return None
    word = i64(read_i32_le(payload, start))
    if size == 3:
        word &= 0xFFFFFF
    for spec in _SPECS:
        if spec.size == size and (word == spec.upper_word or word == spec.lower_word):  # noqa: PLR1714 - numbers
            return spec if size <= 4 or payload[start:end] in (spec.upper, spec.lower) else None
    return None


def _first_four(name: bytes) -> i64:
    return int.from_bytes(name[:4], "little")


def parse(args: list[bytes], extensions: Extension = Extension.SCAN) -> Command | StoreError:
    """Parse ``args`` (verb first, never empty): a command, or the first error in command, arity, syntax or key."""
    count = len(args)
    if count == 3:  # a SET
        return _parse(_BY_NAME.get(args[0]), 3, args[1], args[2], _NONE, extensions)
    key = args[1] if count > 1 else b""
    first = args[2] if count > 2 else b""
    return _parse(_BY_NAME.get(args[0]), count, key, first, args[3:], extensions)


def _parse(
    spec: CommandSpec | None, count: i64, key: bytes, first: bytes, rest: list[bytes], extensions: Extension
) -> Command | StoreError:
    """Parse ``count`` arguments: the verb, whose ``spec`` it is, ``key``, ``first`` and ``rest``; empty: not there.

    Calls and not a table of functions: compiled code calls functions directly, and values of a table generically.
    """
    if spec is None or (spec.extension is not _PLAIN and not spec.extension & extensions):
        return StoreError.UNKNOWN_COMMAND
    if count < spec.min_args:
        return StoreError.ARITY
    verb = spec.verb
    if verb is _SET_VERB:
        command = _parse_set(spec, key, first, rest)
    elif verb is _GET_VERB:
        command = _parse_get(spec, count, key, first, rest, extensions)
    elif verb is _DEL_VERB or verb is Verb.PTTL:
        command = Command(spec, key) if count == 2 else StoreError.ARITY
    elif verb is _VDEL_VERB:
        command = Command(spec, key, first) if count == 3 else StoreError.ARITY
    elif verb is Verb.KEYNOTIFY:
        command = _parse_key_notify(spec, key, [first, *rest] if count > 2 else _NONE, extensions)
    elif verb is Verb.SCAN:
        command = _parse_scan(spec, count, key, first)
    elif verb is Verb.MGET or verb is Verb.MVALUES:
        command = _parse_keys(spec, [key, first, *rest] if count > 2 else [key])
    elif verb is Verb.BATCH:
        command = _parse_batch(spec, [key, first, *rest], extensions)
    else:
        assert_never(verb)
    if isinstance(command, Command) and len(command.key) == 0:
        return StoreError.KEY_EMPTY
    return command


def _parse_get(
    spec: CommandSpec, count: i64, key: bytes, word: bytes, rest: list[bytes], extensions: Extension
) -> Command | StoreError:
    """``GET key [ASOF version]``; the option is an extension."""
    if count == 2:
        return Command(spec, key)
    if not extensions & Extension.AS_OF:
        return StoreError.ARITY
    if word not in _ASOF:
        return StoreError.SYNTAX
    if count != 4:
        return StoreError.ARITY
    version = parse_wire(rest[0])
    return StoreError.SYNTAX if version is None else Command(spec, key, version=version)


def _parse_key_notify(
    spec: CommandSpec, key: bytes, options: list[bytes], extensions: Extension
) -> Command | StoreError:
    """``KEYNOTIFY key [PREFIX] [AFTER version | STOP | GET]``; PREFIX and AFTER are extensions."""
    command = Command(spec, key)
    position = 0
    if options and options[0] in _PREFIX and extensions & Extension.PREFIX_OBSERVE:
        command.prefix = True
        position = 1
    if position == len(options):
        return command
    word = options[position]
    if word in _AFTER and extensions & Extension.RESUME:
        command.version = parse_wire(options[position + 1]) if position + 1 < len(options) else None
        if command.version is None:
            return StoreError.SYNTAX
        position += 1
    elif word in _STOP:
        command.stop = True
    # GET is an option of early brokers: the value is sent with or without it.
    elif word not in _GET:
        return StoreError.SYNTAX
    return command if position + 1 == len(options) else StoreError.ARITY


def _parse_scan(spec: CommandSpec, count: i64, pattern: bytes, token: bytes) -> Command | StoreError:
    if count > 3:
        return StoreError.ARITY
    if len(pattern) > MAX_PATTERN:
        return StoreError.SYNTAX
    return Command(spec, pattern, token)


def _parse_keys(spec: CommandSpec, keys: list[bytes]) -> Command | StoreError:
    if len(keys) > MAX_KEYS_AT_ONCE:
        return StoreError.ARITY
    if not all(keys):
        return StoreError.KEY_EMPTY
    return Command(spec, keys[0], keys=tuple(keys))


def _parse_batch(spec: CommandSpec, args: list[bytes], extensions: Extension) -> Command | StoreError:
    """SETs, DELs and VDELs, each behind the number of its words.

    What is wrong with one of them is wrong with the request: it never was one that a store could have granted.
    """
    writes: list[Command] = []
    position, end = 0, len(args)
    while position < end:
        start = position + 1
        position = start + _SIZES.get(args[position], end)
        if position > end:
            return StoreError.SYNTAX
        if len(writes) == MAX_WRITES_AT_ONCE:
            return StoreError.ARITY
        words = args[start:position]
        found = _BY_NAME.get(words[0])
        if found is None or found.verb not in _WRITES:
            # Not "unknown command", by which a client learns that there is no BATCH here.
            return StoreError.SYNTAX
        write = parse(words, extensions)
        if isinstance(write, StoreError):
            return write
        writes.append(write)
    return Command(spec, writes[0].key, writes=tuple(writes))


def ttl_of(digits: bytes) -> int:
    """Milliseconds from 1 to :data:`MAX_TTL_MS` in plain decimal; 0 for anything else."""
    if not digits.isdigit() or digits[0] == 0x30 or len(digits) > _MAX_TTL_DIGITS:
        return 0
    ttl_ms = int(digits)
    return ttl_ms if ttl_ms <= MAX_TTL_MS else 0


def _parse_set(spec: CommandSpec, key: bytes, value: bytes, options: list[bytes]) -> Command | StoreError:
    """``SET key value [NX | NEX [value]] [PX ms]``, condition and PX in either order.

    The SDKs write ``NEX`` alone, which compares with the value to be set; the document's list has ``NEX <value>``.
    The number of arguments left tells them apart, and PX without its number is never read as a value: a lease that
    silently does not expire would be the worse mistake.
    """
    command = Command(spec, key, value)
    position, end = 0, len(options)
    while position < end:
        word = options[position]
        left = end - position - 1
        if word in _PX:
            ttl_ms = ttl_of(options[position + 1]) if left else 0
            if not ttl_ms or command.ttl_ms:
                return StoreError.SYNTAX
            command.ttl_ms = ttl_ms
            position += 2
            continue
        if command.condition is not _ALWAYS:
            return StoreError.SYNTAX
        if word in _NX:
            command.condition = _NX_CONDITION
        elif word in _NEX:
            command.condition = _NEX_CONDITION
            command.expected = value
            if (left == 1 and options[position + 1] not in _PX) or left == 3:
                command.expected = options[position + 1]
                position += 1
        else:
            return StoreError.SYNTAX
        position += 1
    return command


COMMANDS: Final[dict[Verb, CommandSpec]] = {
    spec.verb: spec
    for spec in (
        CommandSpec(
            Verb.SET,
            3,
            7,
            Access.WRITE,
            "SET key value [NX | NEX [value]] [PX ms]",
            "set a key, also under a condition or with an expiry",
            needs_timestamp=True,
            checks_fence=True,
        ),
        CommandSpec(Verb.GET, 2, 4, Access.READ, "GET key [ASOF version]", "read a key"),
        CommandSpec(Verb.DEL, 2, 2, Access.WRITE, "DEL key", "delete a key", checks_fence=True),
        CommandSpec(
            Verb.VDEL,
            3,
            3,
            Access.WRITE,
            "VDEL key value",
            "delete a key that has a given value",
            checks_fence=True,
        ),
        CommandSpec(
            Verb.KEYNOTIFY,
            2,
            5,
            Access.READ,
            "KEYNOTIFY key [PREFIX] [GET | STOP | AFTER version]",
            "observe a key, or stop observing it with STOP",
        ),
        CommandSpec(
            Verb.SCAN,
            2,
            3,
            Access.READ,
            "SCAN pattern [token]",
            "list the keys that match a pattern, page by page",
            extension=Extension.SCAN,
        ),
        CommandSpec(
            Verb.MGET,
            2,
            1 + MAX_KEYS_AT_ONCE,
            Access.READ,
            "MGET key [key ...]",
            "read several keys and their versions at one version",
            extension=Extension.MGET,
        ),
        CommandSpec(
            Verb.MVALUES,
            2,
            1 + MAX_KEYS_AT_ONCE,
            Access.READ,
            "MVALUES key [key ...]",
            "read the values of several keys at one version",
            extension=Extension.MGET,
        ),
        CommandSpec(
            Verb.PTTL,
            2,
            2,
            Access.READ,
            "PTTL key",
            "how many milliseconds a key has left",
            extension=Extension.TTL,
        ),
        CommandSpec(
            Verb.BATCH,
            4,
            1 + 8 * MAX_WRITES_AT_ONCE,
            Access.WRITE,
            "BATCH (words command) [(words command) ...]",
            "carry out several SETs, DELs and VDELs",
            needs_timestamp=True,
            checks_fence=True,
            extension=Extension.BATCH,
        ),
    )
}

_WRITES: Final = (Verb.SET, Verb.DEL, Verb.VDEL)
_SIZES: Final = {b"%d" % words: words for words in range(1, 1 + COMMANDS[Verb.SET].max_args)}
"""The numbers of words of a command of BATCH, as they are written."""

_SPECS: Final[list[CommandSpec]] = list(COMMANDS.values())
_BY_NAME: Final[dict[bytes, CommandSpec]] = {name: spec for spec in _SPECS for name in (spec.upper, spec.lower)}
