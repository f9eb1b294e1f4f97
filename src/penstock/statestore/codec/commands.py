"""The commands of the state store as data: names, arity, access, documentation; and the parser of their arguments.

``COMMANDS``, at the end, is the one table that the parser, the engine, the documentation and the tests read. To add a
command:

* a member of :class:`Verb`, a branch of :func:`_parse`, and a row of the table: arity, access, syntax, and the text and
  examples of its page. The access of a command that returns a value or reveals it, for example by a length, includes
  reading; one that writes needs ``needs_timestamp`` and ``checks_fence``, which fencing, read-only stores and the
  recognition of repeated requests depend on;
* if the protocol's document lacks it, a member of :class:`Extension`, the next power of two, named after the command;
  a new option of a command is a row of ``OPTION_EXTENSIONS``;
* a branch of ``_carry_out`` in ``statestore/engine/store.py``. ``statestore/engine/requests.py`` has the kinds of
  answers: ``VALUE`` and ``MISSING`` for a value, ``COUNT`` for deleted keys, ``PAYLOAD`` for others, which waits for
  all pending commits, while the others wait for those of their keys. In that module, ``fence_prefix`` must handle each
  command with ``checks_fence``, and ``encode_answers`` each verb of ``_BATCH_VERBS``;
* a method of ``statestore/client/client.py``, and its blocking form in ``BlockingCommands``, which
  ``tests/unit/statestore/test_blocking.py`` misses otherwise;
* a rule of ``tests/engine/statestore/test_model.py``; the client's side is tested in
  ``tests/unit/statestore/client/test_client.py``, a disabled extension in ``tests/unit/statestore/test_extensions.py``.

Where the command needs it: a new error is a member of ``StoreError`` (``statestore/codec/errors.py``) and a row of
``_KINDS`` (``statestore/errors.py``) with what a user does about it; a command whose answer depends on the value
requires the permission Read if ``strict_read`` is set (:meth:`Command.access`); BATCH accepts the verbs of
``_BATCH_VERBS``, which clients build in ``statestore/client/writes.py``. A shell command is in ``cli/kv.py``, its test
in ``tests/unit/cli/test_kv_store.py``; ``docs/state-store/clients.md`` and ``command-line.md`` describe both clients.

An argument list is parsed into a :class:`Command` or an error; if several errors apply, the first of syntax, command,
arity and key length is returned, and the engine checks the rest (authorization, timestamp, token, condition, quota).

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
    "EXAMPLE_TIME_MS",
    "MAX_KEYS_AT_ONCE",
    "MAX_SCAN_KEYS",
    "MAX_TTL_MS",
    "MAX_WRITES_AT_ONCE",
    "OPTION_EXTENSIONS",
    "Access",
    "Command",
    "CommandSpec",
    "Condition",
    "Example",
    "Extension",
    "ExtensionSpec",
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

    __hash__ = str.__hash__  # the hash of an enum is Python code, which would run for every request


class Extension(Flag):
    """Features that the published document lacks. ``SCAN`` is enabled by default, since the newest SDKs use it.

    A disabled extension is refused as by a store without it: an unknown command, or an unknown option (syntax error).
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
    """Condition of a SET: always, only if the key does not exist, or also if it has an expected value."""

    ALWAYS = "always"
    NX = "NX"
    NEX = "NEX"


_ALWAYS: Final = Condition.ALWAYS


class Access(Flag):
    """Permissions that a policy grants for a key."""

    READ = 1
    WRITE = 2


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Command:
    """One parsed request.

    ``key`` is the pattern of SCAN, the first of ``keys`` and of ``writes``, and the prefix if ``prefix`` is true.
    ``value`` is the value of SET, the expected value of VDEL and the continuation token of SCAN; ``expected`` the value
    that NEX accepts; ``ttl_ms`` 0 = without expiry; ``stop`` = end the observation; ``keys`` those of MGET and MVALUES;
    ``writes`` the commands of BATCH; ``version`` the version of GET ASOF, or the one after which an observation
    resumes; ``count`` the number of keys of SCAN, 0 = a full page.
    """

    condition: Condition = _ALWAYS
    expected: bytes = b""
    ttl_ms: int = 0
    stop: bool = False
    keys: tuple[bytes, ...] = ()
    writes: tuple[Command, ...] = ()
    version: Hlc | None = None
    prefix: bool = False
    count: int = 0

    def __init__(self, spec: CommandSpec, key: bytes, value: bytes = b"") -> None:
        self.verb = spec.verb
        self.spec = spec
        self.key = key
        self.value = value

    def access(self, *, strict_read: bool) -> Access:
        """Return the required permissions; ``strict_read``: also Read if the answer depends on the value."""
        if strict_read and (self.condition is not Condition.ALWAYS or self.verb is Verb.VDEL):
            return self.spec.access | Access.READ
        return self.spec.access

    def __repr__(self) -> str:
        return f"<{self.verb} {self.key!r}>"


@final
class Example:
    """A request on the reference page, which shows the response of the engine when the page is generated.

    ``request`` has words separated by spaces, ``''`` for an empty word; ``before`` are preceding requests, with a
    fencing token if ``fenced``. ``token`` and ``fence_prefix`` are properties of the request; ``extension`` is enabled
    in addition to that of the command. ``max_keys``: quota, 0 = none.
    """

    __slots__ = ("before", "extension", "fence_prefix", "fenced", "max_keys", "request", "title", "token")

    def __init__(
        self,
        title: str,
        request: str,
        before: tuple[str, ...] = (),
        *,
        fenced: bool = False,
        token: str | None = None,
        fence_prefix: str | None = None,
        extension: Extension = Extension.NONE,
        max_keys: int = 0,
    ) -> None:
        self.title = title
        self.request = request
        self.before = before
        self.fenced = fenced
        self.token = token
        self.fence_prefix = fence_prefix
        self.extension = extension
        self.max_keys = max_keys


@final
class ExtensionSpec:
    """Documentation of an extension: the ``request`` that uses it, in Markdown, and its ``effect``."""

    __slots__ = ("effect", "request")

    def __init__(self, request: str, effect: str) -> None:
        self.request = request
        self.effect = effect


@final
class CommandSpec:
    """One row: number of arguments including the verb, access, and whether timestamp and fence are checked.

    ``text`` is the description of the reference page in Markdown, ``examples`` are successful requests (refused
    requests that all commands share are derived from the first one), ``errors`` are further refused requests.
    ``authorizes_each_key``: the engine authorizes each key that it accesses, instead of the request.
    ``upper`` and ``lower`` are the two spellings of the verb, ``upper_word`` and ``lower_word`` their first four bytes
    as a number, ``size`` is their length.
    ``syntax`` is the syntax of the arguments, ``extension`` the extension that the command requires.
    """

    __slots__ = (
        "access",
        "authorizes_each_key",
        "checks_fence",
        "errors",
        "examples",
        "extension",
        "lower",
        "lower_word",
        "max_args",
        "min_args",
        "needs_timestamp",
        "size",
        "summary",
        "syntax",
        "text",
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
        text: str,
        examples: tuple[Example, ...],
        errors: tuple[Example, ...] = (),
        needs_timestamp: bool = False,
        checks_fence: bool = False,
        extension: Extension = Extension.NONE,
        authorizes_each_key: bool = False,
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
        self.authorizes_each_key = authorizes_each_key
        self.text = text
        self.examples = examples
        self.errors = errors


# Reading a member of an enum costs as much as a call: constants for the members that every request uses.
_NX_CONDITION: Final = Condition.NX
_NEX_CONDITION: Final = Condition.NEX
_PLAIN: Final = Extension.NONE
_NONE: Final[list[bytes]] = []
_SET_VERB: Final = Verb.SET
_GET_VERB: Final = Verb.GET
_DEL_VERB: Final = Verb.DEL
_VDEL_VERB: Final = Verb.VDEL

# Words are in upper case, or in lower case as in the published examples; mixed case is refused.
_NX = (b"NX", b"nx")
_NEX = (b"NEX", b"nex")
_PX = (b"PX", b"px")
_STOP = (b"STOP", b"stop")
_GET = (b"GET", b"get")
_ASOF = (b"ASOF", b"asof")
_AFTER = (b"AFTER", b"after")
_COUNT = (b"COUNT", b"count")
_PREFIX = (b"PREFIX", b"prefix")

MAX_TTL_MS: Final = 1000 * 365 * 86_400_000
"""Maximum time to live, 1,000 years: date types of all languages can represent the time of expiry."""
_MAX_TTL_DIGITS: Final = len(str(MAX_TTL_MS))

MAX_KEYS_AT_ONCE: Final = 10_000
"""Maximum number of keys of an MGET or MVALUES, which takes about 10 ms."""
MAX_SCAN_KEYS: Final = 1000
"""Maximum number of keys in a page of SCAN."""

MAX_WRITES_AT_ONCE: Final = 1000
"""Maximum number of commands of a BATCH, which takes about 10 ms."""


def parse_payload(payload: bytes, extensions: Extension = Extension.SCAN) -> Command | StoreError:
    """Parse a request's payload; return the command, or the error to answer."""
    try:
        return _parse_elements(payload, extensions) if _COMPILED else parse(decode_array(payload), extensions)
    except RemoteProtocolError:
        return StoreError.SYNTAX


def _parse_elements(payload: bytes, extensions: Extension) -> Command | StoreError:
    """Variant of :func:`parse` for the compiled form, without a list of the arguments, which would cost as much as
    parsing them.

    The whole array is read first, since its errors have precedence.
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
    """Return the row of the command with the name ``payload[start:end]``."""
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
    """Parse ``args`` (verb first, never empty); return a command, or the first error: command, arity, syntax, key."""
    verb, key, first = (*args, b"", b"")[:3]
    return _parse(_BY_NAME.get(verb), len(args), key, first, args[3:], extensions)


def _parse(
    spec: CommandSpec | None, count: i64, key: bytes, first: bytes, rest: list[bytes], extensions: Extension
) -> Command | StoreError:
    """Parse ``count`` arguments: the verb described by ``spec``, ``key``, ``first`` and ``rest``; empty if missing.

    Branches instead of a table of functions, since compiled code calls functions directly, but not the entries of a
    table.
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
        command = _parse_scan(spec, count, key, first, rest)
    elif verb is Verb.MGET or verb is Verb.MVALUES:
        command = _parse_keys(spec, [key, first, *rest] if count > 2 else [key])
    elif verb is Verb.BATCH:
        command = _parse_batch(spec, [key, first, *rest], extensions)
    else:
        assert_never(verb)
    if len(key) == 0 and isinstance(command, Command):
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
    command = Command(spec, key)
    command.version = parse_wire(rest[0])
    return StoreError.SYNTAX if command.version is None else command


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


def _parse_scan(
    spec: CommandSpec, count: i64, pattern: bytes, token: bytes, options: list[bytes]
) -> Command | StoreError:
    """Parse ``SCAN pattern [token [COUNT n]]``; an empty token is the first page."""
    command = Command(spec, pattern, token)
    if count > 3:
        if count != 5:
            return StoreError.ARITY
        digits = options[1]
        if options[0] not in _COUNT or not digits.isdigit() or len(digits) > 4:
            return StoreError.SYNTAX
        command.count = int(digits)
        if not 1 <= command.count <= MAX_SCAN_KEYS:
            return StoreError.SYNTAX
    if len(pattern) > MAX_PATTERN:
        return StoreError.SYNTAX
    return command


def _parse_keys(spec: CommandSpec, keys: list[bytes]) -> Command | StoreError:
    if len(keys) > MAX_KEYS_AT_ONCE:
        return StoreError.ARITY
    if not all(keys):
        return StoreError.KEY_EMPTY
    command = Command(spec, keys[0])
    command.keys = tuple(keys)
    return command


def _parse_batch(spec: CommandSpec, args: list[bytes], extensions: Extension) -> Command | StoreError:
    """Parse SETs, DELs and VDELs, each preceded by the number of its words.

    A syntax error in one of them is an error of the whole request.
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
        if found is None or found.verb not in _BATCH_VERBS:
            # Not "unknown command", which tells a client that the store does not support BATCH.
            return StoreError.SYNTAX
        write = parse(words, extensions)
        if isinstance(write, StoreError):
            return write
        writes.append(write)
    command = Command(spec, writes[0].key)
    command.writes = tuple(writes)
    return command


def ttl_of(digits: bytes) -> int:
    """Parse milliseconds from 1 to :data:`MAX_TTL_MS` in plain decimal; 0 for other texts."""
    if not digits.isdigit() or digits[0] == 0x30 or len(digits) > _MAX_TTL_DIGITS:
        return 0
    ttl_ms = int(digits)
    return ttl_ms if ttl_ms <= MAX_TTL_MS else 0


def _parse_set(spec: CommandSpec, key: bytes, value: bytes, options: list[bytes]) -> Command | StoreError:
    """``SET key value [NX | NEX [value]] [PX ms]``, condition and PX in either order.

    The SDKs send ``NEX`` without a value, which compares with the value to be set; the document has ``NEX <value>``.
    They are distinguished by the number of remaining arguments, and PX without a number is never used as a value, since
    this would silently create a lease that does not expire.
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


EXAMPLE_TIME_MS: Final = 1_696_374_425_000
"""Time of the first request of an example; each further request is a second later."""
_TOKEN: Final = f"{EXAMPLE_TIME_MS}:1:StateStore"
"""Version of the first SET of an example."""
_LOWER: Final = f"{EXAMPLE_TIME_MS}:0:StateStore"
_SET_KEY: Final = ("SET k v",)

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
            text="""
            Without `PX` the key does not expire, and an earlier expiry is removed. With `PX` it expires at most 1
            millisecond after that time, never before it. `NX` sets the key only if it does not exist; `NEX` also if the
            key has this value, or the value that follows `NEX`. Condition and `PX` may be in either order; `PX` is 1 to
            31,536,000,000,000 milliseconds (1,000 years) in plain decimal. A refused SET changes neither value, expiry
            nor fence. With `security.strict_read`, NX and NEX also require Read.

            The version is greater than the time stamp of the request and than every earlier version. With a fencing
            token the key is fenced: later SET, DEL and VDEL requests need the same or a greater token, and a greater
            one raises the fence. With the user property `aio-persistence` = `true` a store with durability `memory`
            writes this key to disk.

            If a quota of keys or bytes is reached, overwriting is still allowed, and expired keys do not count. With
            the user property `__fencePrefix` and a token (extension `prefix-fence`) the SET also sets a minimum token
            for every key with that prefix.
            """,
            examples=(
                Example("set", "SET k v"),
                Example("set again", "SET k w", _SET_KEY),
                Example("with an expiry of 5 s", "SET k v PX 5000"),
                Example("NX, the key does not exist", "SET k v NX"),
                Example("NX, the key exists", "SET k w NX", _SET_KEY),
                Example("NEX, the key does not exist", "SET k v NEX PX 5000"),
                Example("NEX, the key has this value (renewal of a lease)", "SET k v NEX PX 5000", _SET_KEY),
                Example("NEX, the key has another value (lease of another client)", "SET k w NEX PX 5000", _SET_KEY),
                Example("NEX with the expected value", "SET k w NEX v", _SET_KEY),
                Example("with a fencing token", "SET k v", token=_TOKEN),
                Example("with a lower token", "SET k w", _SET_KEY, fenced=True, token=_LOWER),
                Example(
                    "with a prefix fence, if the extension is enabled",
                    "SET k v",
                    token=_TOKEN,
                    fence_prefix="out/",
                    extension=Extension.PREFIX_FENCE,
                ),
            ),
            errors=(
                Example("unknown option", "SET k v XX"),
                Example("both conditions", "SET k v NX NEX"),
                Example("invalid expiry", "SET k v PX 0"),
                Example("quota", "SET other v", _SET_KEY, max_keys=1),
                Example("prefix fence without the extension", "SET k v", token=_TOKEN, fence_prefix="out/"),
                Example(
                    "prefix fence without a token", "SET k v", fence_prefix="out/", extension=Extension.PREFIX_FENCE
                ),
            ),
        ),
        CommandSpec(
            Verb.GET,
            2,
            4,
            Access.READ,
            "GET key [ASOF version]",
            "read a key",
            text="""
            The response has the version of the last SET. A missing key has no version: the Go SDK distinguishes a
            missing key from an empty value by the version.

            A GET that shows a change waits until that change is on disk. `ASOF` returns the value of the key at a
            version (extension `as-of`), as far as the history reaches.
            """,
            examples=(
                Example("the key exists", "GET k", _SET_KEY),
                Example("empty value", "GET k", ("SET k ''",)),
                Example("the key does not exist", "GET k"),
                Example(
                    "as of an older version, if the extension is enabled",
                    f"GET k ASOF {_TOKEN}",
                    ("SET k v", "SET k w"),
                    extension=Extension.AS_OF,
                ),
            ),
            errors=(
                Example("too many arguments", "GET k more"),
                Example("ASOF without the extension", f"GET k ASOF {_TOKEN}", _SET_KEY),
                Example("ASOF a version before the history", "GET k ASOF 1:0:x", _SET_KEY, extension=Extension.AS_OF),
            ),
        ),
        CommandSpec(
            Verb.DEL,
            2,
            2,
            Access.WRITE,
            "DEL key",
            "delete a key",
            checks_fence=True,
            text="""
            The response is the number of deleted keys. A delete has its own version, greater than the version of the
            value; notifications and a later SET are ordered by it. The SDK form returns this version, the published
            form the version of the deleted value. The fence is deleted with the key.
            """,
            examples=(
                Example("the key exists", "DEL k", _SET_KEY),
                Example("the key does not exist", "DEL k"),
                Example("fenced, with its token", "DEL k", _SET_KEY, fenced=True, token=_TOKEN),
                Example("fenced, with a lower token", "DEL k", _SET_KEY, fenced=True, token=_LOWER),
                Example("not fenced, with a token", "DEL k", _SET_KEY, token=_TOKEN),
            ),
        ),
        CommandSpec(
            Verb.VDEL,
            3,
            3,
            Access.WRITE,
            "VDEL key value",
            "delete a key that has a given value",
            checks_fence=True,
            text="""
            The response is the number of deleted keys; if the key has another value, the condition is not met. The SDKs
            release locks with VDEL: only the name of the holder deletes the key. For versions see [DEL](del.md). With
            `security.strict_read` it also requires Read.
            """,
            examples=(
                Example("the key has this value (release of a lock)", "VDEL k v", _SET_KEY),
                Example("the key has another value", "VDEL k w", _SET_KEY),
                Example("the key does not exist", "VDEL k v"),
                Example("fenced, with its token", "VDEL k v", _SET_KEY, fenced=True, token=_TOKEN),
                Example("fenced, with a lower token", "VDEL k v", _SET_KEY, fenced=True, token=_LOWER),
            ),
        ),
        CommandSpec(
            Verb.KEYNOTIFY,
            2,
            5,
            Access.READ,
            "KEYNOTIFY key [PREFIX] [GET | STOP | AFTER version]",
            "observe a key, or stop observing it with STOP",
            text="""
            The client is notified of every change of the key, including its own, in version order and exactly once, in
            the form of this request. A subscription to the notification topic is optional, because the store delivers
            notifications to the client's connection; if you subscribe, subscribe first.

            An observation belongs to the client and ends with its network connection, even if the session continues.
            `STOP` ends it earlier. The key is literal: `*` and `?` are not wildcards. `PREFIX` observes every key with
            this prefix (extension `prefix-observe`). `AFTER version` first delivers every change after that version
            (extension `resume`); its `+OK` has the version up to which the missed changes are complete.
            """,
            examples=(
                Example("observe", "KEYNOTIFY k"),
                Example("already observed", "KEYNOTIFY k", ("KEYNOTIFY k",)),
                Example("with the argument of early brokers", "KEYNOTIFY k GET"),
                Example("stop observing", "KEYNOTIFY k STOP", ("KEYNOTIFY k",)),
                Example("stop without an observation", "KEYNOTIFY k STOP"),
                Example(
                    "a prefix, if the extension is enabled",
                    "KEYNOTIFY line/ PREFIX",
                    _SET_KEY,
                    extension=Extension.PREFIX_OBSERVE,
                ),
                Example(
                    "resume, if the extension is enabled",
                    f"KEYNOTIFY k AFTER {_TOKEN}",
                    _SET_KEY,
                    extension=Extension.RESUME,
                ),
            ),
            errors=(
                Example("unknown option", "KEYNOTIFY k ONCE"),
                Example("too many options", "KEYNOTIFY k STOP STOP"),
                Example("PREFIX without the extension", "KEYNOTIFY line/ PREFIX"),
                Example(
                    "AFTER a version before the history",
                    "KEYNOTIFY k AFTER 1:0:x",
                    _SET_KEY,
                    extension=Extension.RESUME,
                ),
            ),
        ),
        CommandSpec(
            Verb.SCAN,
            2,
            5,
            Access.READ,
            "SCAN pattern [token [COUNT n]]",
            "list the keys that match a pattern, page by page",
            extension=Extension.SCAN,
            authorizes_each_key=True,
            text="""
            The response is an array. On the last page it has one element, the array of keys; otherwise two, the keys
            and a continuation token, which you send back unchanged with the same pattern. A page may be empty. Keys
            that exist during the whole scan are returned exactly once; other keys may or may not be returned.

            `COUNT n` limits a page to n keys, 1 to 1000 (an extension of penstock); the token before it is empty for
            the first page.

            In the pattern `*` matches any bytes, `?` one byte, `[ab]` and `[0-9]` one byte of a class, `[!ab]` one byte
            outside of it (`[^ab]` is a class that contains `^`), and `[*]` an asterisk; the whole key must match.
            Matching takes time proportional to pattern and key. Keys that the client may not read are omitted; if a
            page ends at such a key, its token is encrypted and valid until the store restarts.
            """,
            examples=(
                Example("matching keys", "SCAN line/*", ("SET line/1 v", "SET line/2 v", "SET other v")),
                Example("one byte, a class, a literal asterisk", "SCAN [a-c]?[*]", ("SET a1* v", "SET d1* v")),
                Example("no matching key", "SCAN line/*"),
                Example("pages of one key", "SCAN line/* '' COUNT 1", ("SET line/1 v", "SET line/2 v")),
            ),
            errors=(
                Example("incomplete COUNT", "SCAN * token more"),
                Example("COUNT out of range", "SCAN * '' COUNT 1001"),
                Example("invalid continuation token", "SCAN * 1;2;x"),
            ),
        ),
        CommandSpec(
            Verb.MGET,
            2,
            1 + MAX_KEYS_AT_ONCE,
            Access.READ,
            "MGET key [key ...]",
            "read several keys and their versions at one version of the store",
            extension=Extension.MGET,
            text="""
            All keys are read at one version of the store, which is the version of the response: every later change has
            a greater one. The array has two elements per key, its value and its version as
            `milliseconds:counter:node`, or two nulls. At most 10,000 keys; the client must be allowed to read each of
            them.
            """,
            examples=(Example("one key exists, one does not", "MGET k none", _SET_KEY),),
        ),
        CommandSpec(
            Verb.MVALUES,
            2,
            1 + MAX_KEYS_AT_ONCE,
            Access.READ,
            "MVALUES key [key ...]",
            "read the values of several keys at one version of the store",
            extension=Extension.MGET,
            text="""
            Like [MGET](mget.md), with one element per key: its value, or null. For clients that need no versions: it
            takes about half of the processing time of MGET.
            """,
            examples=(Example("one key exists, one does not", "MVALUES k none", _SET_KEY),),
        ),
        CommandSpec(
            Verb.PTTL,
            2,
            2,
            Access.READ,
            "PTTL key",
            "read the remaining lifetime of a key in milliseconds",
            extension=Extension.TTL,
            text="""
            The remaining lifetime of the key in milliseconds, `:-1` if it does not expire, `:-2` if it does not exist.
            The version is that of the value.
            """,
            examples=(
                Example("the key expires", "PTTL k", ("SET k v PX 5000",)),
                Example("the key does not expire", "PTTL k", _SET_KEY),
                Example("the key does not exist", "PTTL k"),
            ),
        ),
        CommandSpec(
            Verb.BATCH,
            4,
            1 + 8 * MAX_WRITES_AT_ONCE,
            Access.WRITE,
            "BATCH (words command) [(words command) ...]",
            "execute several SETs, DELs and VDELs with one token and one commit",
            needs_timestamp=True,
            checks_fence=True,
            extension=Extension.BATCH,
            authorizes_each_key=True,
            text="""
            Each command follows the number of its words, including the verb: `BATCH 3 SET k v 2 DEL l`. At most 1,000
            commands; their total size is limited by the packet size of the broker. Conditions and `PX` are as in
            [SET](set.md). The same key may occur several times.

            The commands are executed in order without other changes in between, each under its own rules:
            authorization, fences of key and prefixes, condition, quota, expiry, a version and a notification. Time
            stamp, fencing token and `aio-persistence` of the request apply to all of them. A refused command does not
            stop the others.

            The response is an array with one element per command, in their order and the same in every form: `+OK`, the
            number of deleted keys, `:-1` if a condition is not met, or `-ERR` with a reason. Its version is that of the
            last change; without a change there is none.

            All changes of a request are written with one commit before the response, so after a crash either all or
            none of them exist. The request is not a transaction otherwise: check each element. A request with an
            invalid time stamp, token or form is refused as a whole with one error and changes nothing. After a failed
            commit the response is that of a read-only store.
            """,
            examples=(
                Example("set two keys, delete a missing one", "BATCH 3 SET k v 5 SET l v PX 5000 2 DEL m"),
                Example("a condition is not met", "BATCH 4 SET k w NX 3 VDEL k x", _SET_KEY),
                Example(
                    "one key fenced with a higher token",
                    "BATCH 3 SET k w 3 SET l w",
                    _SET_KEY,
                    fenced=True,
                    token=_LOWER,
                ),
                Example("the same key twice", "BATCH 3 SET k w 2 DEL k", _SET_KEY),
            ),
            errors=(
                Example("too few arguments of one command", "BATCH 2 SET k 2 DEL k"),
                Example("wrong number of words", "BATCH 3 DEL k"),
                Example("a command that BATCH does not accept", "BATCH 2 GET k"),
                Example("empty key in one command", "BATCH 2 DEL k 2 DEL ''"),
                Example(
                    "a prefix fence, which BATCH does not support",
                    "BATCH 3 SET k v",
                    token=_TOKEN,
                    fence_prefix="out/",
                    extension=Extension.PREFIX_FENCE,
                ),
            ),
        ),
    )
}

OPTION_EXTENSIONS: Final[dict[Extension, ExtensionSpec]] = {
    Extension.AS_OF: ExtensionSpec("`GET key ASOF version`", "the value of the key at that version"),
    Extension.PREFIX_OBSERVE: ExtensionSpec(
        "`KEYNOTIFY prefix PREFIX [STOP]`",
        "notifications for every key with the prefix; a client receives each change once",
    ),
    Extension.RESUME: ExtensionSpec(
        "`KEYNOTIFY key [PREFIX] AFTER version`",
        "every change after that version, then new changes; `+OK` has the version up to which the missed changes are "
        "complete",
    ),
    Extension.PREFIX_FENCE: ExtensionSpec(
        "SET with `__ft` and the user property `__fencePrefix` = P",
        "set a minimum token for every key with the prefix P, including missing keys, for SET, DEL and VDEL",
    ),
}
"""Extensions that are options of a command; extensions that are commands are described by their rows."""

_BATCH_VERBS: Final = (Verb.SET, Verb.DEL, Verb.VDEL)
"""Verbs that BATCH accepts."""
_SIZES: Final = {b"%d" % words: words for words in range(1, 1 + COMMANDS[Verb.SET].max_args)}
"""Encoded numbers of words of a command in BATCH."""

_SPECS: Final[list[CommandSpec]] = list(COMMANDS.values())
_BY_NAME: Final[dict[bytes, CommandSpec]] = {name: spec for spec in _SPECS for name in (spec.upper, spec.lower)}
