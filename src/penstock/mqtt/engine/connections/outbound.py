"""What leaves the broker: collected over a loop turn, one piece a connection, held back until its commit is done.

Source: MQTT 5.0 section 4.3; a PUBACK that promises durability leaves after the commit of what it promises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.mqtt.codec.reasons import ReasonCode
from penstock.mqtt.engine.connections.uncommitted_output import UncommittedOutput

if TYPE_CHECKING:
    from penstock.mqtt.engine.broker import Broker
    from penstock.mqtt.engine.connections.connection import BrokerConnection

__all__ = ["Outbound", "PendingWrite"]

PendingWrite = tuple["BrokerConnection", bytes, bool]
"""Write the bytes to the connection, then close it if the flag says so."""


class Outbound:
    """The output of all connections. ``wake`` is called when there is some and there was none before."""

    def __init__(self, broker: Broker, wake: Callable[[], None]) -> None:
        self._broker = broker
        self._stats = broker.stats
        self._limits = broker.limits
        self._wake = wake
        self._dirty: list[BrokerConnection] = []
        self._throttled: list[BrokerConnection] = []
        self.ended: list[BrokerConnection] = []
        """Connections that a service ended since the last flush."""
        self._unpromised: dict[BrokerConnection, None] = {}
        """Connections with output that waits for a commit."""
        self._committed = 0
        self.reading: BrokerConnection | None = None
        """The connection whose bytes are being handled: what it has to say leaves with :meth:`end_read`."""

    def end_read(self) -> None:
        """The bytes that one connection brought are handled: send what it has to say at once, where it may leave so.

        One write for all that a read brought, and none of the work of :meth:`flush`.
        """
        connection, self.reading = self.reading, None
        if connection is None or not connection.dirty:
            return
        out, sink = connection.out, connection.sink
        if not out and not connection.closing:
            connection.dirty = False
        elif (
            sink is None
            or connection.closing
            or connection.throttled
            or connection.unpromised is not None
            or connection.gate > self._broker.journal.committed
        ):
            self.mark(connection)
        else:
            data = b"".join(out)
            out.clear()
            connection.out_bytes = 0
            connection.dirty = False
            self._stats.bytes_sent += len(data)
            sink.send_now(data)

    def flush(self, now: int) -> list[PendingWrite]:
        """What is to be written, one piece a connection [Broker.flush]."""
        if self.ended:
            ended, self.ended = self.ended, []
            for connection in ended:
                self._broker.lifecycle.connection_ended(connection, now)
        throttled = self._throttled
        if throttled:
            self._throttled = []
            for connection in throttled:
                connection.end_throttle(now)
        dirty = self._dirty
        self._dirty = []
        outputs: list[PendingWrite] = []
        committed = self._broker.journal.committed
        if committed != self._committed:
            self._committed = committed
            self._keep_promises(outputs)
        for connection in dirty:
            data = b"".join(connection.out)
            connection.out.clear()
            connection.out_bytes = 0
            connection.dirty = False
            self._stats.bytes_sent += len(data)
            if connection.gate > committed or connection.unpromised is not None:
                self._hold_back(connection, data, now)
                continue
            connection.gate = 0
            if connection.throttled:
                self._throttled.append(connection)
            outputs.append((connection, data, connection.closing))
        if self._throttled:
            self._wake()
        return outputs

    def storage_failed(self, now: int) -> None:
        """No commit will be done any more: end the connections whose output waits for one."""
        for connection in list(self._unpromised):
            self._give_up(connection, now)

    def _hold_back(self, connection: BrokerConnection, data: bytes, now: int) -> None:
        """The output waits for the commit of what it promises, and what is larger than one turn's for its end."""
        unpromised = connection.unpromised
        if unpromised is None:
            unpromised = connection.unpromised = UncommittedOutput()
            self._unpromised[connection] = None
        unpromised.add(connection.gate, data)
        if self._broker.journal.failure:
            self._give_up(connection, now)
        elif unpromised.bytes > self._limits.max_output_bytes:
            connection.throttled = True
            connection.writable = False
        elif connection.throttled:
            self._throttled.append(connection)

    def _keep_promises(self, outputs: list[PendingWrite]) -> None:
        """A commit is done: what waited for it leaves."""
        for connection in list(self._unpromised):
            unpromised = connection.unpromised
            assert unpromised is not None
            data = unpromised.take(self._committed)
            done = not unpromised
            if done:
                connection.unpromised = None
                del self._unpromised[connection]
                if connection.gate <= self._committed:
                    connection.gate = 0
            if connection.throttled and unpromised.bytes <= self._limits.max_output_bytes:
                self._throttled.append(connection)
            if data or done:
                outputs.append((connection, data, connection.closing and done and not connection.dirty))

    def _give_up(self, connection: BrokerConnection, now: int) -> None:
        """What the output promises will never be durable: say nothing of it, so that the client keeps its messages."""
        self._unpromised.pop(connection, None)
        unpromised, connection.unpromised = connection.unpromised, None
        connection.out.clear()
        connection.gate = 0
        if connection.closing:
            connection.mark()
        elif unpromised is not None and unpromised.first_is_connack:
            connection.close()
            self._broker.lifecycle.connection_ended(connection, now)
        else:
            connection.disconnect(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, now, "the broker's disk failed")

    def mark(self, connection: BrokerConnection) -> None:
        """Called by a connection that has output for the first time since it was flushed."""
        if connection is self.reading:
            return
        self._dirty.append(connection)
        if len(self._dirty) == 1:
            self._wake()

    def forget(self, connection: BrokerConnection) -> None:
        """The connection is gone: nothing of it waits."""
        self._unpromised.pop(connection, None)
