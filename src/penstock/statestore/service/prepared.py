"""The quick way of a request: a plain GET or SET of a client whose requests look alike.

What a client's requests have in common (who asks, on which topic and in which form the answer goes, which properties it
has) is read once, when one of them went the full way. The next ones come as the bytes of correlation data, time stamp,
key and value alone; the answer is put together from cached parts. One of two ways, with the same results: whatever is
out of the ordinary (another command, an option, an error, a fence, an expiry, a clock that is off) is left to the full
way of :class:`~penstock.statestore.service.service.StateStoreService`, before anything was done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import LocalProtocolError
from penstock.mqtt.codec.encoder import publish_head
from penstock.mqtt.codec.primitives import encode_string, encode_varint
from penstock.mqtt.codec.properties import LikeProperties
from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.codec.shapes import Form, LikePublish, Shape
from penstock.mqtt.codec.topics import validate_topic_name
from penstock.mqtt.service import Encoded, Inbound, Later, Outlet, Requester
from penstock.statestore.binding import Ask, answer_parts
from penstock.statestore.codec.commands import Access
from penstock.statestore.codec.errors import StoreError
from penstock.statestore.codec.resp3 import MISSING, OK, Pieces, bulk_pieces, encode_error, plain_places
from penstock.statestore.engine.answer import Context
from penstock.statestore.engine.record import Change
from penstock.statestore.engine.store import UNUSUAL
from penstock.statestore.hlc import PADDED, PLAIN, Hlc, StampReader, StampWriter, parse

if TYPE_CHECKING:
    from penstock.statestore.engine.store import Engine
    from penstock.statestore.service.ports import Policy, Stats
    from penstock.statestore.service.recent import RecentWrites
    from penstock.statestore.service.waiting import Waiting
    from penstock.statestore.service.writer import ChangeWriter

__all__ = ["PreparedRequests", "QuickWay"]

_READ: Final = Access.READ
_WRITE: Final = Access.WRITE
_CORRELATION_DATA: Final = 0x09
_KEY_AT: Final = 9
_VALUE_AT: Final = 11
_OK: Final = (OK, b"", b"")
_MISSING: Final = (MISSING, b"", b"")


class QuickWay:
    """What the quick ways of all clients share: the parts of the service.

    ``serving``: requests may go this way; ``outlet`` is where the answers go that waited, None where there is none.
    """

    __slots__ = (
        "clock",
        "engine",
        "max_waiting",
        "notify",
        "outlet",
        "padded",
        "plain",
        "policy",
        "recent",
        "serving",
        "stats",
        "unanswered",
        "waiting",
        "writer",
    )

    def __init__(
        self,
        *,
        engine: Engine,
        writer: ChangeWriter,
        waiting: Waiting,
        recent: RecentWrites,
        stats: Stats,
        policy: Policy | None,
        clock: Callable[[], int],
        notify: Callable[[Sequence[Change], int], None],
        unanswered: Callable[[str, str], str],
        max_waiting: int,
    ) -> None:
        self.engine = engine
        self.writer = writer
        self.waiting = waiting
        self.recent = recent
        self.stats = stats
        self.policy = policy
        self.clock = clock
        self.notify = notify
        self.unanswered = unanswered
        self.max_waiting = max_waiting
        self.padded = StampWriter(PADDED, engine.clock.node)
        self.plain = StampWriter(PLAIN, engine.clock.node)
        self.outlet: Outlet | None = None
        self.serving = False

    def prepare(self, message: Inbound, ask: Ask, asks_to_keep: Callable[[Ask], bool]) -> None:
        """Take the requests that look like ``message``, which was read as ``ask``, unless they need the full way.

        Nothing happens where others do not look like it yet, or are taken already. ``asks_to_keep``: whether a request
        wants its key to be kept.
        """
        properties = message.publish.optional_properties
        if type(properties) is not LikeProperties or properties.shape.taker is not None:
            return
        shape = properties.shape
        model, context = shape.model, ask.context
        stamp_name = ask.dialect.timestamp_property
        if (
            message.connection is None
            or not shape.changing_names <= {stamp_name}
            or context.fencing_token is not None
            or "__fencePrefix" in context.user
            or [name for name, _ in model.user_properties].count(stamp_name) != 1
            or model.payload_format_indicator
            or model.topic_alias is not None
            or model.message_expiry_interval == 0
        ):
            return
        stamp = parse(context.timestamp or "")
        if stamp is None:
            return
        try:
            validate_topic_name(ask.response_topic)
            topic_wire = encode_string(ask.response_topic, "the response topic")
        except LocalProtocolError:
            return
        shape.taker = PreparedRequests(self, shape, context, ask, stamp, topic_wire, asked=asks_to_keep(ask))


class PreparedRequests:
    """The requests of one client's network connection that look alike; a :data:`~penstock.mqtt.service.Taker`."""

    __slots__ = (
        "_asked",
        "_client_id",
        "_context",
        "_correlation_at",
        "_expiry_s",
        "_heads",
        "_places",
        "_stamp_at",
        "_stamp_place",
        "_stamp_writer",
        "_stamps",
        "_topic",
        "_topic_wire",
        "_way",
    )

    def __init__(
        self,
        way: QuickWay,
        shape: Shape,
        context: Context,
        ask: Ask,
        stamp: Hlc,
        topic_wire: bytes,
        *,
        asked: bool,
    ) -> None:
        self._way = way
        self._context = context
        self._client_id = context.client_id
        self._topic = ask.response_topic
        self._topic_wire = topic_wire
        self._stamps = StampReader(stamp.node)
        self._expiry_s = shape.model.message_expiry_interval
        self._stamp_writer = way.padded if context.dialect.padded_versions else way.plain
        self._asked = asked
        self._heads: dict[tuple[int, int, int | None], tuple[bytes, bytes, bytes, int]] = {}
        """What stands around what changes in an answer and how long it is, by what its length depends on."""
        users = shape.model.user_properties
        for identifier, start, end, index in shape.values:
            if identifier == _CORRELATION_DATA:
                correlation = (start, end)
            elif users[index][0] == ask.dialect.timestamp_property:
                self._stamp_place = (start, end)
        first = correlation < self._stamp_place
        self._correlation_at, self._stamp_at = (3, 5) if first else (7, 3)
        """Which of a request's parts they are: packet identifier, correlation data and stamp, key, value."""
        start, _ = self._stamp_place
        digits = [(start, start + 15), (start + 16, start + 21)]
        self._places = [correlation, *digits] if first else [*digits, correlation]

    @property
    def client_id(self) -> str:
        """Whose requests these are."""
        return self._client_id

    def __call__(self, publish: LikePublish, requester: Requester, now: int, _wall_ms: int) -> bool:
        """Carry out a plain GET or SET, and have the next ones of its form cut up; False: go the full way."""
        wire = publish.wire
        form = requester.form(wire[:3])
        if form is None or not form.fits(wire):
            body, size = publish.body, publish.shape.size
            places = plain_places(body[size:])
            start, end = self._stamp_place
            if not places or not self._stamps.fits(body[start:end]):
                return False
            take = self.set if len(places) == 2 else self.get
            form = Form(publish, [*self._places, *[(size + start, size + end) for start, end in places]], take)
            requester.expect(form)
        return form.take(form.cut(wire, 0), requester, now)

    def get(self, parts: tuple[Any, ...], requester: Requester, now: int) -> bool:
        """Carry out a plain GET, of which these are the parts; False: go the full way."""
        way, key = self._way, parts[_KEY_AT]
        if not way.serving or way.waiting.count >= way.max_waiting:
            return False
        now_ms = way.clock()
        stamp = self._stamps.read(parts[self._stamp_at], parts[self._stamp_at + 2], now_ms)
        if stamp is None or (way.policy is not None and not self._may(way.policy, requester, key, _READ)):
            return False
        record = way.engine.get_plainly(key, stamp)
        if record is UNUSUAL:
            return False
        if record is None:
            payload, version = _MISSING, None
        else:
            payload, version = bulk_pieces(record.value), record.version
        uncommitted = way.writer.uncommitted
        self._answer(parts, requester, payload, version, uncommitted.get(key, 0) if uncommitted else 0, now_ms, now)
        return True

    def set(self, parts: tuple[Any, ...], requester: Requester, now: int) -> bool:
        """The same with a plain SET."""
        way, key = self._way, parts[_KEY_AT]
        if not way.serving or way.waiting.count >= way.max_waiting:
            return False
        now_ms = way.clock()
        stamp = self._stamps.read(parts[self._stamp_at], parts[self._stamp_at + 2], now_ms)
        if stamp is None or (way.policy is not None and not self._may(way.policy, requester, key, _WRITE)):
            return False
        change = way.engine.set_plainly(key, parts[_VALUE_AT], stamp, now_ms, self._client_id, self._context.owner)
        if change is None:
            return False
        way.recent.note(self._client_id, parts[self._correlation_at], stamp)
        number = way.writer.submit((change,), asked=self._asked)
        self._answer(parts, requester, _OK, change.version, number, now_ms, now)
        if change.observers:
            way.notify((change,), number)
        return True

    def _may(self, policy: Policy, requester: Requester, key: bytes, access: Access) -> bool:
        """Whether the policies, as they are now and to whoever the client is by now, allow this one."""
        context = self._context
        return (
            requester.principal is context.principal
            and policy.may_answer_on(context, self._topic)
            and policy.may_access(context, access, key)
        )

    def _answer(
        self,
        parts: tuple[Any, ...],
        requester: Requester,
        payload: Pieces,
        version: Hlc | None,
        wait_for: int,
        now_ms: int,
        now: int,
    ) -> None:
        """Answer the request now, or with the commit ``wait_for``, never before an earlier one of the client."""
        stats = self._way.stats
        stats.requests += 1
        correlation = parts[self._correlation_at]
        waiting = self._way.waiting
        if waiting.count:
            wait_for = waiting.behind(self._client_id, wait_for)
        if wait_for:
            expires_at = 0 if self._expiry_s is None else now_ms + self._expiry_s * 1000
            later = requester.accept_later(parts[1])
            waiting.add(wait_for, self._client_id, self._let_go, (later, correlation, payload, version, expires_at))
        elif requester.answer(parts[1], self.encode(correlation, payload, version, self._expiry_s), now):
            stats.responses += 1
        else:
            later = requester.accept_later(parts[1])
            later.settle(ReasonCode.NO_MATCHING_SUBSCRIBERS, self._way.unanswered(self._client_id, self._topic))

    def encode(self, correlation: bytes, payload: Pieces, version: Hlc | None, left_s: int | None) -> Encoded:
        """The answer as it is written; the same bytes as :func:`~penstock.statestore.binding.response` gives."""
        stamp = b"" if version is None else self._stamp_writer.write(version)
        first, value, last = payload
        shape = (len(stamp), len(first) + len(value) + len(last), left_s)
        around = self._heads.get(shape)
        if around is None:
            around = self._head(shape, len(correlation))
        head, before, after, size = around
        return self._topic, head, (before, correlation, after, stamp, first, value, last), left_s, size

    def _head(self, shape: tuple[int, int, int | None], correlation_size: int) -> tuple[bytes, bytes, bytes, int]:
        stamp_size, payload_size, left_s = shape
        before, after = answer_parts(self._context.dialect, left_s, correlation_size, stamp_size)
        block = len(before) + correlation_size + len(after) + stamp_size
        length = encode_varint(block)
        remaining = len(self._topic_wire) + 2 + len(length) + block + payload_size
        head = publish_head(0x32, remaining)
        if len(self._heads) >= _HEADS_KEPT:
            self._heads.clear()
        around = self._heads[shape] = (head + self._topic_wire, length + before, after, len(head) + remaining)
        return around

    def _let_go(self, answer: _Later, *, committed: bool) -> None:
        """An answer that waited may go; where nothing will be committed any more it says that instead."""
        way = self._way
        later, correlation, payload, version, expires_at = answer
        acknowledge: Callable[[], None] | None = later.settle
        if not committed:
            later.settle(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, StoreError.READ_ONLY)
            payload, version = (encode_error(StoreError.READ_ONLY), b"", b""), None
            acknowledge = None
        left_s = None
        if expires_at:
            left_s = (expires_at - way.clock() + 999) // 1000
        if way.outlet is None or (left_s is not None and left_s <= 0):
            if acknowledge is not None:
                acknowledge()
        elif way.outlet.respond_encoded(
            self._client_id, self.encode(correlation, payload, version, left_s), acknowledge
        ):
            way.stats.responses += 1
        else:
            why = way.unanswered(self._client_id, self._topic)
            if acknowledge is not None:
                later.settle(ReasonCode.NO_MATCHING_SUBSCRIBERS, why)


_HEADS_KEPT: Final = 64

_Later = tuple[Later, bytes, Pieces, Hlc | None, int]
"""An answer that waits for its commit: the acknowledgement, correlation data, payload, version, and the wall clock in
ms at which nobody wants it any more (0: never)."""
