"""Hybrid logical clocks: the versions, time stamps and fencing tokens of the state store.

A clock value is ``{wall ms since the epoch}:{counter}:{node id}``. Values are ordered by wall clock, then counter, then
node id byte by byte. Nothing here reads a clock: the time comes in as an argument.

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
"""Largest lead of a value over the local clock; one millisecond more is refused."""

MAX_COUNTER: Final = 2**31 - 1
"""The largest counter ever made here: the .NET SDK reads a signed 32-bit number, the others 64 bits."""

MAX_LEAD_MS: Final = 8
"""Largest lead of the store's versions over its wall clock in a burst, so that each has a millisecond of its own."""

_MAX_NUMBER: Final = 2**64 - 1
_MAX_NUMBER_DIGITS: Final = 20
_PLAIN: Final = re.compile(rb"(\d{1,18}):(\d{1,18}):[\x00-9;-\x7f]+")
"""A clock value whose numbers are short and whose node id is ASCII, as nearly all are."""
_COUNTERS: Final = 256
"""Counters that are usual: those of versions rise in a burst only."""
_COMPILED: Final = not __file__.endswith(".py")


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Hlc:
    """One value of a hybrid logical clock: wall clock in ms since the epoch, counter, node id. Never changed.

    Values compare by wall clock, then counter, then node id; text compares by code point, which for UTF-8 is byte by
    byte. A class of its own, since compiled code makes and compares one in a tenth of the time of a named tuple.
    """

    __slots__ = ("counter", "node", "wall_ms")

    def __init__(self, wall_ms: int, counter: int, node: str) -> None:
        self.wall_ms = wall_ms
        self.counter = counter
        self.node = node

    def is_before(self, other: Hlc) -> bool:
        """``self < other``, as a method that compiled code calls directly."""
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
        """As the document prints it: ``1696374425000:1:StateStore``."""
        return f"{self.wall_ms}:{self.counter}:{self.node}"

    def padded(self) -> str:
        """As the SDKs print it, with 15 and 5 digits: ``001696374425000:00001:StateStore``."""
        return self.padded_wire().decode()

    def padded_wire(self) -> bytes:
        """The same as UTF-8, as it is sent."""
        return b"".join(self.padded_pieces())

    def padded_pieces(self) -> tuple[bytes, bytes, bytes]:
        """The same in pieces, for a caller that joins more than them."""
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
        """Its position among the versions of one store, which differ in wall clock and counter.

        The node id of who asks with a version does not matter.
        """
        return self.wall_ms, self.counter

    def drift_ms(self, now_ms: int) -> int:
        """Lead of this value over ``now_ms``; negative where it is behind."""
        return self.wall_ms - now_ms

    def is_too_far_ahead(self, now_ms: int) -> bool:
        """Whether it is more than a minute ahead of ``now_ms``."""
        return self.wall_ms - now_ms > MAX_DRIFT_MS

    def ticked(self, now_ms: int) -> Hlc:
        """This node's clock when it sends something: the rule of the clients for their time stamps."""
        if now_ms > self.wall_ms:
            return Hlc(now_ms, 0, self.node)
        return Hlc(self.wall_ms, self.counter + 1, self.node)

    def merged(self, other: Hlc, now_ms: int) -> Hlc:
        """This node's clock after it has seen ``other``: the rule of the clients.

        Raises:
            RemoteProtocolError: the winning wall clock is more than a minute ahead of ``now_ms``, or the counter
                would overflow.
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
                do="synchronize the system clocks (NTP)",
            )
        if winner.counter >= MAX_COUNTER:
            raise RemoteProtocolError(f"the counter of clock value {winner} would overflow")
        return Hlc(winner.wall_ms, winner.counter + 1, self.node)


@final
class StoreClock:
    """The clock of the store: gives versions, each greater than all before it and than every time stamp seen.

    Time stamps come in as wall clock and counter: their node id does not matter for the next version.
    """

    __slots__ = ("counter", "node", "wall_ms")

    def __init__(self, start: Hlc) -> None:
        self.wall_ms = start.wall_ms
        self.counter = start.counter
        self.node = start.node

    @property
    def value(self) -> Hlc:
        """The greatest value given or seen."""
        return Hlc(self.wall_ms, self.counter, self.node)

    def see(self, wall_ms: int, counter: int) -> None:
        """Raise the clock to a time stamp if that is greater."""
        if wall_ms > self.wall_ms:
            self.wall_ms = wall_ms
            self.counter = counter
        elif wall_ms == self.wall_ms and counter > self.counter:
            self.counter = counter

    def next(self, now_ms: int, seen_ms: int = -1, seen_counter: int = 0) -> Hlc:
        """The next version: greater than the time stamp ``seen_ms``, ``seen_counter`` too, and never behind ``now_ms``.

        The counter is 1, as in the document's example, whether the request came within the millisecond of its time
        stamp or later: clients compare the counters of two renewals of a lease. So further versions within a
        millisecond take the next ones, as long as that leads the wall clock by at most ``MAX_LEAD_MS``; in a burst, and
        behind a clock that is ahead, the counter counts. Where it would overflow the wall clock moves on instead.
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
    """A node id; ``after`` is what follows the wall clock, by counter, where it has been printed before."""

    __slots__ = ("after", "text", "wire")

    def __init__(self, text: str, wire: bytes) -> None:
        self.text = text
        self.wire = wire
        self.after: list[bytes | None] = [None] * _COUNTERS

    def print_after(self, counter: int) -> bytes:
        """Print what follows the wall clock with that counter."""
        after = self.after[counter] = b":%05d:%b" % (counter, self.wire)
        return after


@final
class _LastPrinted:
    """Second and node id of the last printed value, as printed: the next value usually has the same.

    All threads share it, so each is one reference to values that never change; printed counters are only added.
    """

    __slots__ = ("node", "second")

    def __init__(self) -> None:
        self.second = _PrintedSecond(-1, b"")
        self.node = _PrintedNode("", b"")


_last: Final = _LastPrinted()
_MAX_NODES: Final = 16
_nodes: Final[dict[str, _PrintedNode]] = {}
"""Node ids that were printed; emptied at :data:`_MAX_NODES`."""


def _printed_node(text: str) -> _PrintedNode:
    node = _nodes.get(text)
    if node is None:
        if len(_nodes) >= _MAX_NODES:
            _nodes.clear()
        node = _nodes[text] = _PrintedNode(text, text.encode())
    return node


_MILLISECONDS: Final[list[bytes]] = [b"%03d" % number for number in range(1000)]


def parse(text: str) -> Hlc | None:
    """``text`` as a clock value, with any number of leading zeros; None where it is not one.

    Numbers are unsigned 64-bit, in ASCII digits; the node id is not empty and has no colon.
    """
    return parse_wire(text.encode("utf-8", "surrogatepass"))


def parse_wire(raw: bytes) -> Hlc | None:
    """:func:`parse` for text as it is sent, in UTF-8; None also where it is not UTF-8."""
    wall, counter, node_at = _read(raw) if _COMPILED else _read_in_bulk(raw)
    return Hlc(wall, counter, raw[node_at:].decode()) if node_at else None


def parse_position(raw: bytes) -> tuple[int, int]:
    """Wall clock and counter of a clock value as it is sent; -1 and 0 where it is not one."""
    wall, counter, _ = _read(raw) if _COMPILED else _read_in_bulk(raw)
    return wall, counter


def _read(raw: bytes) -> tuple[int, int, int]:
    """The second form of :func:`_read_in_bulk`: eight bytes at once, for numbers of 15 and 5 digits as the SDKs write
    them.
    """
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
    """The number in eight ASCII digits, the first one in the lowest byte; -1 where they are not digits."""
    digits = word ^ 0x3030303030303030
    if (digits | digits + 0x0606060606060606) >> 4 & 0x0F0F0F0F0F0F0F0F:
        return -1
    pairs = digits * 10 + (digits >> 8)  # in every second byte
    mask: i64 = 0x000000FF000000FF
    return ((pairs & mask) * 0x000F424000000064 + (pairs >> 16 & mask) * 0x0000271000000001) >> 32 & 0xFFFFFFFF


def _has_colon_or_no_ascii(word: i64) -> bool:
    """Whether one of eight bytes is a colon or above 127."""
    ones: i64 = _ONES
    return ((word ^ 0x3A3A3A3A3A3A3A3A) - ones | word) >> 7 & ones != 0


def _read_in_bulk(raw: bytes) -> tuple[int, int, int]:
    """Wall clock, counter and where the node id begins; -1, 0, 0 where ``raw`` is not a clock value in UTF-8."""
    found = _PLAIN.fullmatch(raw)
    if found is None:
        return _read_long(raw)
    return int(found[1]), int(found[2]), found.end(2) + 1


def _read_long(raw: bytes) -> tuple[int, int, int]:
    """:func:`_read_in_bulk` for numbers of any length and for node ids that are not ASCII."""
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
