"""A client's connection to the broker: passes requests to the engine and sends the responses, some after a commit.

The messages that one turn brings are stored together per partition: storing each alone costs three times as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import RemoteProtocolError
from penstock.tube.codec import exceptions
from penstock.tube.codec.envelope import Request, decode_request, encode_error
from penstock.tube.codec.methods import MethodId
from penstock.tube.engine.broker.send_decoder import Send
from penstock.tube.engine.sessions import RequestContext
from penstock.tube.rpc import ServerConnection

if TYPE_CHECKING:
    from penstock.tube.broker.broker import TubeBroker

__all__ = ["BrokerConnection"]


class _Run:
    """Sends to one partition, in the order of their arrival."""

    __slots__ = ("datas", "sends", "serials")

    def __init__(self) -> None:
        self.serials: list[int] = []
        self.sends: list[Send] = []
        self.datas: list[bytes] = []


class BrokerConnection(ServerConnection):
    """One client of a broker."""

    def __init__(self, broker: TubeBroker) -> None:
        super().__init__(broker.peers)
        self._broker = broker
        self._recognise = broker.engine.produce.reader.recognise
        self._runs: dict[tuple[str, int], _Run] = {}
        """Messages of consecutive requests by partition, not stored yet."""
        self._timeout: int | None = None
        """Timeout of these requests."""

    def now_ms(self) -> int:
        return self._broker.clock()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._broker.engine.gone(self)

    def data_received(self, data: bytes) -> None:
        self._broker.look()
        self._broker.bytes_in += len(data)
        super().data_received(data)

    def receive(self, serial: int, body: bytes) -> None:
        broker = self._broker
        broker.requests += 1
        found = self._recognise(body)
        if found is None:
            try:
                request = decode_request(serial, body)
            except RemoteProtocolError as error:
                self.put(serial, encode_error(exceptions.EXCEPTION, error.what, fatal=True))
                return
            found = broker.engine.send_of(request, body)
            if found is None:
                self._answer(request)
                return
        send, data = found
        if send.timeout != self._timeout:
            self.settle()
            self._timeout = send.timeout
        run = self._runs.get(send.place)
        if run is None:
            run = self._runs[send.place] = _Run()
        run.serials.append(serial)
        run.sends.append(send)
        run.datas.append(data)

    def _answer(self, request: Request) -> None:
        """Answer a request that is not the sending of one message."""
        broker, serial = self._broker, request.serial
        self.settle()  # requests are answered in their order
        context = RequestContext(broker.clock(), self.peer, self, serial)
        answer = broker.engine.receive(request, context, self.arrived_ms)
        if answer is None:
            return
        if answer.wait:
            broker.commits.wait(self, [serial], request.method, [answer.body], self._expires_ms(request.timeout))
        else:
            self.put(serial, answer.body, one_block=answer.one_block)

    def _expires_ms(self, timeout: int | None) -> int:
        return self.arrived_ms + timeout if timeout else 0

    def settle(self) -> None:
        if not self._runs:
            return
        runs, self._runs = self._runs, {}
        broker = self._broker
        engine, expires_ms = broker.engine, self._expires_ms(self._timeout)
        context = RequestContext(broker.clock(), self.peer, self)
        for run in runs.values():
            if expires_ms and context.now_ms > expires_ms:
                engine.dropped_late += len(run.serials)
                continue
            bodies, wait = engine.receive_sends(run.sends, run.datas, context)
            if wait:
                broker.commits.wait(self, run.serials, MethodId.SEND_MESSAGE, bodies, expires_ms)
            else:
                self.put_all(run.serials, bodies)

    def turned(self) -> None:
        broker = self._broker
        broker.bytes_out += self.bytes_out
        self.bytes_out = 0
        broker.commits.changed()
        broker.arm()
