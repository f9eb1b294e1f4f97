"""Hybrid logical clocks: the versions, time stamps and fencing tokens of the state store.

A clock value is ``{wall ms since the epoch}:{counter}:{node id}``. Values are ordered by wall clock, then counter, then
node id byte by byte. Nothing here reads a clock: the time comes in as an argument.

Source: state store protocol, "Versioning and hybrid logical clocks"; Kulkarni et al., "Logical Physical Clocks" (2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from mypy_extensions import mypyc_attr

from penstock.errors import RemoteProtocolError

if TYPE_CHECKING:
    from mypy_extensions import i64

__all__ = [
    "MAX_COUNTER",
    "MAX_DRIFT_MS",
    "MAX_LEAD_MS",
    "Hlc",
    "parse",
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
_SHORT_DIGITS: Final = 18
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

    def padded_pieces(self) -> tuple[bytes, bytes, bytes, bytes]:
        """The same in pieces, for a caller that joins more than them."""
        if self.wall_ms >= 10**15 or self.counter > 999:
            return b"%015d:%05d" % (self.wall_ms, self.counter), b"", b"", b":" + self.node.encode()
        wall: i64 = self.wall_ms
        counter: i64 = self.counter
        number = wall // 1000
        second = _last.second
        if number != second.number:
            second = _last.second = _PrintedSecond(number, b"%012d" % number)
        node = _last.node
        if node.text != self.node:
            node = _last.node = _PrintedNode(self.node, b":" + self.node.encode())
        return second.digits, _MILLISECONDS[wall - number * 1000], _COUNTERS[counter], node.wire

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

    def following(self, other: Hlc | None, now_ms: int) -> Hlc:
        """The next version of the store: greater than this one and than ``other``, never behind ``now_ms``.

        It holds for every ``other``, also one of the same node id. The counter is 1, as in the document's example,
        whether the request came within the millisecond of its time stamp or later: clients compare the counters of two
        renewals of a lease. So further versions within a millisecond take the next ones, as long as that leads the
        wall clock by at most ``MAX_LEAD_MS``; in a burst, and behind a clock that is ahead, the counter counts. Where
        it would overflow the wall clock moves on instead.
        """
        wall, counter = self.wall_ms, self.counter
        if other is not None and self.is_before(other):
            wall, counter = other.wall_ms, other.counter
        if now_ms > wall:
            return Hlc(now_ms, 1, self.node)
        if counter and (wall < now_ms + MAX_LEAD_MS or counter >= MAX_COUNTER):
            return Hlc(wall + 1, 1, self.node)
        return Hlc(wall, counter + 1, self.node)

    def raised_to(self, other: Hlc) -> Hlc:
        """This clock once it has seen ``other``, which is greater."""
        return Hlc(other.wall_ms, other.counter, self.node)

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
class _PrintedSecond:
    __slots__ = ("digits", "number")

    def __init__(self, number: int, digits: bytes) -> None:
        self.number: i64 = number
        self.digits = digits


@final
class _PrintedNode:
    __slots__ = ("text", "wire")

    def __init__(self, text: str, wire: bytes) -> None:
        self.text = text
        self.wire = wire


@final
class _LastPrinted:
    """Second and node id of the last printed value, as printed: the next value usually has the same.

    All threads share it, so each is one reference to values that never change.
    """

    __slots__ = ("node", "second")

    def __init__(self) -> None:
        self.second = _PrintedSecond(-1, b"")
        self.node = _PrintedNode("", b":")


_last: Final = _LastPrinted()
_MILLISECONDS: Final[list[bytes]] = [b"%03d" % number for number in range(1000)]
_COUNTERS: Final[list[bytes]] = [b":%05d" % number for number in range(1000)]


def parse(text: str) -> Hlc | None:
    """``text`` as a clock value, with any number of leading zeros; None where it is not one.

    Numbers are unsigned 64-bit, in ASCII digits; the node id is not empty and has no colon.
    """
    return parse_wire(text.encode("utf-8", "surrogatepass"))


def parse_wire(raw: bytes) -> Hlc | None:
    """:func:`parse` for text as it is sent, in UTF-8; None also where it is not UTF-8."""
    if not _COMPILED:
        return _parse_in_bulk(raw)
    size: i64 = len(raw)
    wall: i64 = 0
    at: i64 = 0
    end: i64 = min(size, _SHORT_DIGITS + 1)
    while at < end:
        digit: i64 = raw[at]
        digit -= 48
        if digit < 0 or digit > 9:
            break
        wall = wall * 10 + digit
        at += 1
    if at > _SHORT_DIGITS:
        return _parse_long(raw)
    if at == 0 or at >= size or raw[at] != 58:
        return None
    start = at + 1
    at = start
    counter: i64 = 0
    end = min(size, start + _SHORT_DIGITS + 1)
    while at < end:
        digit = raw[at]
        digit -= 48
        if digit < 0 or digit > 9:
            break
        counter = counter * 10 + digit
        at += 1
    if at - start > _SHORT_DIGITS:
        return _parse_long(raw)
    if at == start or at + 1 >= size or raw[at] != 58:
        return None
    node = raw[at + 1 :]
    at += 1
    while at < size:
        if raw[at] == 58:
            return None
        at += 1
    return _with_node(wall, counter, node)


def _parse_in_bulk(raw: bytes) -> Hlc | None:
    """The second form of :func:`parse_wire`: without loops over bytes, which cost the interpreter ten times as much."""
    first = raw.find(b":")
    second = raw.find(b":", first + 1)
    if 0 < first <= _SHORT_DIGITS and 1 < second - first <= _SHORT_DIGITS + 1:  # as every client writes it
        wall, counter, node = raw[:first], raw[first + 1 : second], raw[second + 1 :]
        if not wall.isdigit() or not counter.isdigit() or not node or b":" in node:
            return None
        return _with_node(int(wall), int(counter), node)
    return _parse_long(raw)


def _parse_long(raw: bytes) -> Hlc | None:
    """:func:`parse_wire` for numbers of any length."""
    parts = raw.split(b":", 3)
    if len(parts) != 3 or not parts[2]:
        return None
    wall, counter = _number(parts[0]), _number(parts[1])
    if wall is None or counter is None:
        return None
    return _with_node(wall, counter, parts[2])


def _with_node(wall_ms: int, counter: int, node: bytes) -> Hlc | None:
    try:
        return Hlc(wall_ms, counter, node.decode())
    except UnicodeDecodeError:
        return None


def _number(digits: bytes) -> int | None:
    if not digits.isdigit():
        return None
    significant = digits.lstrip(b"0")
    if len(significant) > _MAX_NUMBER_DIGITS:
        return None
    number = int(significant or b"0")
    return number if number <= _MAX_NUMBER else None
