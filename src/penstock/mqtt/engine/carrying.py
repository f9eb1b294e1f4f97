"""The packets at the front of a read that need not be decoded: PUBACKs, messages that go the way of those before, and
messages of a form that a service expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import RemoteProtocolError
from penstock.mqtt.codec.runs import puback_run

if TYPE_CHECKING:
    from penstock.mqtt.engine.connection import BrokerConnection
    from penstock.mqtt.engine.session import Session

__all__ = ["carry"]


def carry(connection: BrokerConnection, data: bytes, now: int) -> int:
    """Handle those packets; how many bytes they took.

    Runs of messages are left: they have a better way. So is whatever is not whole, or not well formed. What is left is
    for :meth:`BrokerConnection.receive`, which by itself does the same in more time.
    """
    session = connection.session
    if session is None or connection.decoder.buffered:
        return 0
    try:
        position = _carry(connection, session, data, now)
    except RemoteProtocolError as e:
        connection.fail(e, now)
        position = len(data)
    if position:
        connection.last_received = now
        connection.stats.bytes_received += position
    outbound = connection.broker.outbound
    if outbound.reading is connection:
        outbound.end_read()
    return position


def _carry(connection: BrokerConnection, session: Session, data: bytes, now: int) -> int:
    """:func:`carry` without what follows it; what messages of a form cause collects for its end.

    Raises:
        RemoteProtocolError: an acknowledgement that cannot be, or more messages open than allowed.
    """
    stats = connection.stats
    ways = connection.ways
    forms = connection.forms
    size = len(data)
    position = messages = 0
    while size - position >= 4 and not connection.closing:
        first = data[position]
        if first == 0x40:
            packet_id = data[position + 2] << 8 | data[position + 3]
            if data[position + 1] != 2 or not packet_id:
                break
            if size - position > 4 and data[position + 4] == 0x40:
                packet_ids = puback_run(data, position)
                stats.packets_received += len(packet_ids)
                position += 4 * len(packet_ids)
                session.acknowledge_run(packet_ids, now)
                continue
            session.acknowledge(packet_id, now)
            stats.packets_received += 1
            position += 4
            continue
        if first == 0x32 and forms:
            expected = forms.get(data[position : position + 3])
            if expected is not None and (end := expected.take(connection, session, data, position, now)):
                messages += 1
                position = end
                continue
        if not ways:
            break
        length = data[position + 1]
        start = position + 2
        if length > 127:
            high = data[start]
            if not 0 < high < 128:
                break
            length += (high << 7) - 128
            start += 1
        end = start + length
        if end > size:
            break
        at = start + 2 + (data[start] << 8 | data[start + 1])
        topic = data[start:at]
        way = ways.get(topic)
        if way is None or way.first != first or end - position > connection.decoder.max_packet_size:
            break
        next_topic = end + start - position
        if end < size and data[end] == first and way.shape is None and data.startswith(topic, next_topic):
            break
        alone = end == size and not messages
        if not way.take(connection, session, data, position, at, end, now, alone=alone):
            break
        messages += 1
        stats.packets_received += 1
        position = end
    return position
