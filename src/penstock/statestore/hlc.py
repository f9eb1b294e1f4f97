"""Hybrid logical clocks: the versions, time stamps and fencing tokens of the state store.

A clock value is ``{wall ms since the epoch}:{counter}:{node id}``. Values are ordered by wall clock, then counter, then
node id byte by byte. This module reads no clock: the time is an argument.

Source: state store protocol, "Versioning and hybrid logical clocks"; Kulkarni et al., "Logical Physical Clocks" (2014).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, final

from librt.strings import read_i64_le
from mypy_extensions import mypyc_attr

from penstock.errors import RemoteProtocolError

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "MAX_COUNTER",
    "MAX_DRIFT_MS",
    "MAX_LEAD_MS",
    "Hlc",
    "StoreClock",
    "parse",
    "parse_position",
    "parse_wire",
]

MAX_DRIFT_MS: Final = 60_000
"""Maximum lead of a value over the local clock; larger values are rejected."""

MAX_COUNTER: Final = 2**31 - 1
"""Maximum counter that penstock generates: the .NET SDK reads a signed 32-bit number, the others 64 bits."""

MAX_LEAD_MS: Final = 8
"""Maximum lead of the store's versions over its wall clock in a burst, so that each has a different millisecond."""

_MAX_NUMBER: Final = 2**64 - 1
_MAX_NUMBER_DIGITS: Final = 20
_PLAIN: Final = re.compile(rb"(\d{1,18}):(\d{1,18}):[\x00-9;-\x7f]+")
"""Pattern of a clock value with short numbers and an ASCII node id, which nearly all values have."""
_COUNTERS: Final = 256
"""Number of cached counters: counters of versions are higher only in bursts."""
_COMPILED: Final = not __file__.endswith(".py")


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Hlc:
    """One value of a hybrid logical clock: wall clock in ms since the epoch, counter, node id. Immutable.

    Values compare by wall clock, then counter, then node id; text compares by code point, which for UTF-8 is byte by
    byte. It is not a named tuple, since compiled code creates and compares instances of a class ten times faster.
    """

    __slots__ = ("counter", "node", "wall_ms")

    def __init__(self, wall_ms: int, counter: int, node: str) -> None:
        self.wall_ms = wall_ms
        self.counter = counter
        self.node = node

    def is_before(self, other: Hlc) -> bool:
        """Return ``self < other``; a method, so that compiled code calls it directly."""
        if self.wall_ms != other.wall_ms:
            return self.wall_ms < other.wall_ms
        if self.counter != other.counter:
            return self.counter < other.counter
        return self.node < other.node

    def __lt__(self, other: Hlc) -> bool:
        return self.is_before(other)

    def __gt__(self, other: Hlc) -> bool:
        return other.is_before(self)

    def __le__(self, other: Hlc) -> bool:
        return not other.is_before(self)

    def __ge__(self, other: Hlc) -> bool:
        return not self.is_before(other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Hlc):
            return NotImplemented
        return self.wall_ms == other.wall_ms and self.counter == other.counter and self.node == other.node

    def __hash__(self) -> int:
        return hash((self.wall_ms, self.counter, self.node))

    def __reduce__(self) -> tuple[type[Hlc], tuple[int, int, str]]:
        return Hlc, (self.wall_ms, self.counter, self.node)

    def __repr__(self) -> str:
        return f"Hlc(wall_ms={self.wall_ms}, counter={self.counter}, node={self.node!r})"

    def __str__(self) -> str:
        """Return the format of the document: ``1696374425000:1:StateStore``."""
        return f"{self.wall_ms}:{self.counter}:{self.node}"

    def padded(self) -> str:
        """Return the format of the SDKs, with 15 and 5 digits: ``001696374425000:00001:StateStore``."""
        return self.padded_wire().decode()

    def padded_wire(self) -> bytes:
        """Return :meth:`padded` as UTF-8."""
        return b"".join(self.padded_pieces())

    def padded_pieces(self) -> tuple[bytes, bytes, bytes]:
        """Return :meth:`padded_wire` as parts, for a caller that joins them with other bytes."""
        if self.wall_ms >= 10**15 or self.counter >= _COUNTERS:
            return b"%015d:%05d" % (self.wall_ms, self.counter), b"", b":" + self.node.encode()
        wall: i64 = self.wall_ms
        counter: i64 = self.counter
        number = wall // 1000
        second = _last.second
        if number != second.number:
            second = _last.second = _PrintedSecond(number, b"%012d" % number)
        node = _last.node
        if node.text != self.node:
            node = _last.node = _printed_node(self.node)
        after = node.after[counter]
        if after is None:
            after = node.print_after(counter)
        return second.digits, _MILLISECONDS[wall - number * 1000], after

    @property
    def position(self) -> tuple[int, int]:
        """Return the sort key among the versions of one store, which differ in wall clock and counter.

        The node id of a version in a request is ignored.
        """
        return self.wall_ms, self.counter

    def drift_ms(self, now_ms: int) -> int:
        """Return the lead of this value over ``now_ms``; negative if it is behind."""
        return self.wall_ms - now_ms

    def is_too_far_ahead(self, now_ms: int) -> bool:
        """Return True if it is more than a minute ahead of ``now_ms``."""
        return self.wall_ms - now_ms > MAX_DRIFT_MS

    def ticked(self, now_ms: int) -> Hlc:
        """Return this node's clock after sending a message: the rule of clients for timestamps."""
        if now_ms > self.wall_ms:
            return Hlc(now_ms, 0, self.node)
        return Hlc(self.wall_ms, self.counter + 1, self.node)

    def merged(self, other: Hlc, now_ms: int) -> Hlc:
        """Return this node's clock after receiving ``other``: the rule of clients.

        Raises:
            RemoteProtocolError: the greater wall clock is more than a minute ahead of ``now_ms``, or the counter would
                overflow.
        """
        if other.node == self.node:
            return self
        if now_ms > self.wall_ms and now_ms > other.wall_ms:
            return Hlc(now_ms, 0, self.node)
        winner = other if self.is_before(other) else self
        if winner.is_too_far_ahead(now_ms):
            raise RemoteProtocolError(
                f"clock value {winner} is {winner.drift_ms(now_ms)} ms ahead of the local clock",
                why=f"at most {MAX_DRIFT_MS} ms are allowed between the clocks of a client and the store",
                hint="synchronize the system clocks (NTP)",
            )
        if winner.counter >= MAX_COUNTER:
            raise RemoteProtocolError(f"the counter of clock value {winner} would overflow")
        return Hlc(winner.wall_ms, winner.counter + 1, self.node)


@final
class StoreClock:
    """The clock of the store: assigns versions, each greater than all earlier versions and received timestamps.

    Timestamps are passed as wall clock and counter: their node id does not affect the next version.
    """

    __slots__ = ("counter", "node", "wall_ms")

    def __init__(self, start: Hlc) -> None:
        self.wall_ms = start.wall_ms
        self.counter = start.counter
        self.node = start.node

    @property
    def value(self) -> Hlc:
        """The greatest assigned version or received timestamp."""
        return Hlc(self.wall_ms, self.counter, self.node)

    def see(self, wall_ms: int, counter: int) -> None:
        """Advance the clock to a timestamp if the timestamp is greater."""
        if wall_ms > self.wall_ms:
            self.wall_ms = wall_ms
            self.counter = counter
        elif wall_ms == self.wall_ms and counter > self.counter:
            self.counter = counter

    def next(self, now_ms: int, seen_ms: int = -1, seen_counter: int = 0) -> Hlc:
        """Return the next version: greater than the timestamp ``seen_ms``, ``seen_counter``, and at least ``now_ms``.

        The counter is 1, as in the document's example, whether or not the request arrived in the millisecond of its
        timestamp: clients compare the counters of two renewals of a lease. Therefore further versions within a
        millisecond use the next milliseconds, up to ``MAX_LEAD_MS`` ahead of the wall clock; beyond that, the counter
        is incremented. If it would overflow, the wall clock part is incremented instead.
        """
        self.see(seen_ms, seen_counter)
        wall, counter = self.wall_ms, self.counter
        if now_ms > wall:
            wall, counter = now_ms, 1
        elif counter and (wall < now_ms + MAX_LEAD_MS or counter >= MAX_COUNTER):
            wall, counter = wall + 1, 1
        else:
            counter += 1
        self.wall_ms = wall
        self.counter = counter
        return Hlc(wall, counter, self.node)


@final
class _PrintedSecond:
    __slots__ = ("digits", "number")

    def __init__(self, number: int, digits: bytes) -> None:
        self.number: i64 = number
        self.digits = digits


@final
class _PrintedNode:
    """A node id; ``after`` caches the text after the wall clock, by counter."""

    __slots__ = ("after", "text", "wire")

    def __init__(self, text: str, wire: bytes) -> None:
        self.text = text
        self.wire = wire
        self.after: list[bytes | None] = [None] * _COUNTERS

    def print_after(self, counter: int) -> bytes:
        """Format the text after the wall clock with that counter."""
        after = self.after[counter] = b":%05d:%b" % (counter, self.wire)
        return after


@final
class _LastPrinted:
    """Formatted second and node id of the last value; the next value usually has the same second and node id.

    Shared by all threads, so each attribute is one reference to immutable values; cached counters are only added.
    """

    __slots__ = ("node", "second")

    def __init__(self) -> None:
        self.second = _PrintedSecond(-1, b"")
        self.node = _PrintedNode("", b"")


_last: Final = _LastPrinted()
_MAX_NODES: Final = 16
_nodes: Final[dict[str, _PrintedNode]] = {}
"""Formatted node ids; cleared at :data:`_MAX_NODES` entries."""


def _printed_node(text: str) -> _PrintedNode:
    node = _nodes.get(text)
    if node is None:
        if len(_nodes) >= _MAX_NODES:
            _nodes.clear()
        node = _nodes[text] = _PrintedNode(text, text.encode())
    return node


_MILLISECONDS: Final[list[bytes]] = [b"%03d" % number for number in range(1000)]


def parse(text: str) -> Hlc | None:
    """Parse a clock value, with any number of leading zeros; None if ``text`` is not one.

    Numbers are unsigned 64-bit, in ASCII digits; the node id is not empty and has no colon.
    """
    return parse_wire(text.encode("utf-8", "surrogatepass"))


def parse_wire(raw: bytes) -> Hlc | None:
    """Like :func:`parse`, for UTF-8 bytes; None also for invalid UTF-8."""
    wall, counter, node_at = _read(raw) if _COMPILED else _read_in_bulk(raw)
    return Hlc(wall, counter, raw[node_at:].decode()) if node_at else None


def parse_position(raw: bytes) -> tuple[int, int]:
    """Parse wall clock and counter of a clock value in UTF-8; -1 and 0 if it is not one."""
    wall, counter, _ = _read(raw) if _COMPILED else _read_in_bulk(raw)
    return wall, counter


def _read(raw: bytes) -> tuple[int, int, int]:
    """Fast variant of :func:`_read_in_bulk`: eight bytes at once, for numbers of 15 and 5 digits, as in the SDKs."""
    size: i64 = len(raw)
    if size < _NODE_AT + 1 or raw[15] != 0x3A or raw[21] != 0x3A:
        return _read_in_bulk(raw)
    high = _eight_digits(read_i64_le(raw, 0))
    low = _eight_digits(read_i64_le(raw, 7))
    # The three bytes before the counter are read as zeros.
    counter = _eight_digits(read_i64_le(raw, 13) & -0x1000000 | 0x303030)
    if high < 0 or low < 0 or counter < 0:
        return -1, 0, 0
    at: i64 = _NODE_AT
    while at + 8 <= size:
        if _has_colon_or_no_ascii(read_i64_le(raw, at)):
            return _read_in_bulk(raw)
        at += 8
    if at < size and _has_colon_or_no_ascii(read_i64_le(raw, size - 8) >> (8 - size + at) * 8):
        return _read_in_bulk(raw)
    return high // 10 * 100_000_000 + low, counter, _NODE_AT


_NODE_AT: Final = 22
_ONES: Final = 0x0101010101010101


def _eight_digits(word: i64) -> i64:
    """Parse eight ASCII digits, the first one in the lowest byte; -1 if they are not digits."""
    digits = word ^ 0x3030303030303030
    if (digits | digits + 0x0606060606060606) >> 4 & 0x0F0F0F0F0F0F0F0F:
        return -1
    pairs = digits * 10 + (digits >> 8)  # the results are in every second byte
    mask: i64 = 0x000000FF000000FF
    return ((pairs & mask) * 0x000F424000000064 + (pairs >> 16 & mask) * 0x0000271000000001) >> 32 & 0xFFFFFFFF


def _has_colon_or_no_ascii(word: i64) -> bool:
    """Return True if one of eight bytes is a colon or greater than 127."""
    ones: i64 = _ONES
    return ((word ^ 0x3A3A3A3A3A3A3A3A) - ones | word) >> 7 & ones != 0


def _read_in_bulk(raw: bytes) -> tuple[int, int, int]:
    """Parse wall clock, counter and offset of the node id; -1, 0, 0 if ``raw`` is not a clock value in UTF-8."""
    found = _PLAIN.fullmatch(raw)
    if found is None:
        return _read_long(raw)
    return int(found[1]), int(found[2]), found.end(2) + 1


def _read_long(raw: bytes) -> tuple[int, int, int]:
    """Like :func:`_read_in_bulk`, for numbers of any length and node ids that are not ASCII."""
    parts = raw.split(b":", 2)
    if len(parts) != 3 or not _is_node(parts[2]):
        return -1, 0, 0
    wall, counter = _number(parts[0]), _number(parts[1])
    if wall is None or counter is None:
        return -1, 0, 0
    return wall, counter, len(raw) - len(parts[2])


def _is_node(node: bytes) -> bool:
    if not node or b":" in node:
        return False
    if not node.isascii():
        try:
            node.decode()
        except UnicodeDecodeError:
            return False
    return True


def _number(digits: bytes) -> int | None:
    if not digits.isdigit():
        return None
    significant = digits.lstrip(b"0")
    if len(significant) > _MAX_NUMBER_DIGITS:
        return None
    number = int(significant or b"0")
    return number if number <= _MAX_NUMBER else None
