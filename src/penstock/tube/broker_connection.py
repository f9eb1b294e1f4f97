"""A client's connection to the broker: requests to the engine, its answers at once or after their commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import RemoteProtocolError
from penstock.tube.codec import exceptions
from penstock.tube.codec.envelope import decode_request, encode_error
from penstock.tube.rpc import ServerConnection

if TYPE_CHECKING:
    from penstock.tube.broker import TubeBroker

__all__ = ["BrokerConnection"]


class BrokerConnection(ServerConnection):
    """One client of a broker."""

    def __init__(self, broker: TubeBroker) -> None:
        super().__init__(broker.peers)
        self._broker = broker

    def now_ms(self) -> int:
        return self._broker.clock()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._broker.engine.gone(self)

    def data_received(self, data: bytes) -> None:
        self._broker.bytes_in += len(data)
        super().data_received(data)

    def receive(self, serial: int, body: bytes) -> None:
        broker = self._broker
        broker.requests += 1
        try:
            request = decode_request(serial, body)
        except RemoteProtocolError as error:
            self.put(serial, encode_error(exceptions.EXCEPTION, error.what, fatal=True))
            return
        broker.engine.peer = self.peer
        answer = broker.engine.receive(request, self.arrived_ms, broker.clock(), self)
        if answer is None:
            return
        if answer.wait:
            expires_ms = self.arrived_ms + request.timeout if request.timeout else 0
            broker.commits.wait(self, serial, request.method, answer.body, expires_ms)
        else:
            self.put(serial, answer.body)

    def turned(self) -> None:
        broker = self._broker
        broker.bytes_out += self.bytes_out
        self.bytes_out = 0
        engine = broker.engine
        if engine.dirty_stores or engine.offsets.dirty or engine.transactions.dirty:
            broker.commits.schedule()
        broker.arm()
