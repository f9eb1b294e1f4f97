"""The broker as a state machine: registrations, fetches, produce requests and transactions.

    answer = broker.receive(request, context, arrived_ms)     # a BrokerResponse, or None: send nothing yet
    deadline = broker.next_deadline()                         # ms or None; then broker.tick(now_ms)

A response with ``wait`` may be sent after the commit of all messages appended and offsets changed so far, other
responses immediately. The shell commits stores with unwritten messages (`dirty_stores`) and changed offsets
(`offsets.take_dirty`). A get that waits for messages is answered later: `readable` and `tick` append to `ready`. A
commit of staged rows is answered through `transactions`.

Differences from the reference, which its clients do not notice: messages are readable as soon as their commit returned,
also with filters (its filtered consumers wait for its flush); a get skips any number of records of other partitions at
once; a get without messages is answered by a running commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.errors import PenstockError, RemoteProtocolError
from penstock.tube.codec import exceptions
from penstock.tube.codec.envelope import Request, encode_error
from penstock.tube.codec.methods import METHODS, RESERVED, MethodId, PeerRole, ServiceType
from penstock.tube.codec.proto import broker_pb2 as pb
from penstock.tube.engine.broker.fetch_handler import DelayedAnswer, FetchHandler
from penstock.tube.engine.broker.group_offsets import GroupOffsets
from penstock.tube.engine.broker.produce_handler import AppendResult, ProduceHandler
from penstock.tube.engine.broker.registrations import Registrations
from penstock.tube.engine.broker.request_checks import LATER, BrokerResponse, RequestChecks
from penstock.tube.engine.broker.send_decoder import SendFields
from penstock.tube.engine.broker.topics import (
    Topics,
)
from penstock.tube.engine.interfaces import LogStore
from penstock.tube.engine.limits import DEFAULT_LIMITS, TubeLimits
from penstock.tube.engine.sessions import RequestContext
from penstock.tube.engine.transactions.handler import TransactionHandler
from penstock.tube.engine.transactions.staging import Staging

__all__ = ["AppendResult", "BrokerEngine", "BrokerResponse"]


class BrokerEngine:
    """One broker; not thread-safe.

    ``session_ms``: a partition without gets and heartbeats for this long becomes free (reference: 30 s). ``last_time``:
    newest append time in the stores; message ids continue after it, even if the clock was set back. ``staging``: staged
    rows (`engine.transactions`); None: rows cannot be staged.
    """

    def __init__(
        self,
        topics: Topics,
        offsets: GroupOffsets,
        *,
        session_ms: int = 30_000,
        limits: TubeLimits = DEFAULT_LIMITS,
        last_time: int = 0,
        staging: Staging | None = None,
    ) -> None:
        self.checks = RequestChecks()
        self.topics = topics
        self.offsets = offsets
        self.dropped_late = 0
        self.produce = ProduceHandler(self.checks, topics, limits, last_time)
        self.transactions = TransactionHandler(self.checks, topics, self.produce, staging)
        self.produce.transactions = self.transactions.receive
        self.registrations = Registrations(
            self.checks,
            topics,
            offsets,
            limits,
            session_ms=session_ms,
        )
        self.fetch = FetchHandler(self.checks, topics, offsets, self.registrations, limits)
        self.dirty_stores = self.produce.dirty_stores
        self.append = self.produce.append
        self._handlers: dict[int, Callable[[bytes, RequestContext], BrokerResponse]] = {
            MethodId.SEND_MESSAGE: self.produce.send,
            MethodId.PARTITION_REGISTER: self.registrations.register,
            MethodId.PARTITION_HEARTBEAT: self.registrations.heartbeat,
            MethodId.COMMIT_OFFSET: self.fetch.commit,
        }

    @property
    def gets(self) -> int:
        """Number of get requests."""
        return self.fetch.gets

    @property
    def ready(self) -> list[DelayedAnswer]:
        """Responses to gets that waited; the shell sends them and clears the list."""
        return self.fetch.ready

    def receive(self, request: Request, context: RequestContext, arrived_ms: int) -> BrokerResponse | None:
        """Handle ``request``, which arrived at ``arrived_ms``. None: send nothing yet.

        None is returned if the request's timeout has passed, or if the response is sent later: of a get that waits for
        messages in `ready`, of a commit of staged rows in `transactions.answered`. Both have the connection and the
        serial of ``context``; a get without a connection does not wait.
        """
        if request.timeout and context.now_ms - arrived_ms > request.timeout:
            self.dropped_late += 1
            return None
        method = request.method
        try:
            if method == MethodId.GET_MESSAGES and request.service in METHODS[method].services:
                return self.fetch.get(request, context)
            handler = self._handlers.get(method)
            if handler is None or request.service not in METHODS[method].services:
                return self._unknown(request)
            answer = handler(request.payload, context)
        except RemoteProtocolError as error:
            self.checks.refused += 1
            text = f"{error.what} {error.why or ''}".strip()
            return BrokerResponse(encode_error(exceptions.EXCEPTION, text, version=request.version, fatal=True))
        except (OSError, PenstockError) as error:
            self.checks.refused += 1
            return BrokerResponse(encode_error(exceptions.EXCEPTION, str(error), version=request.version))
        return None if answer is LATER else answer

    def send_of(self, request: Request, body: bytes) -> tuple[SendFields, bytes] | None:
        """Return fields and data of the message that ``request``, decoded from ``body``, sends.

        None unless it sends one message that `receive_sends` can store.
        """
        if request.method != MethodId.SEND_MESSAGE or request.service not in METHODS[MethodId.SEND_MESSAGE].services:
            return None
        try:
            found = self.produce.reader.read_request(request, body)
        except RemoteProtocolError:
            return None  # the request is passed to `receive`, which reports the error
        return None if isinstance(found, pb.SendMessageRequestP2B) else found

    def receive_sends(
        self, sends: list[SendFields], datas: list[bytes], context: RequestContext
    ) -> tuple[list[bytes], bool]:
        """Store the messages of requests for one partition (`send_of`), in order.

        Returns the responses, and whether they wait for the commit of all earlier changes. It takes a third of the time
        of handling the requests one by one.
        """
        try:
            return self.produce.send_all(sends, datas, context)
        except (OSError, PenstockError) as error:
            self.checks.refused += len(sends)
            text = str(error)
            return [encode_error(exceptions.EXCEPTION, text, version=send.version) for send in sends], False

    def _unknown(self, request: Request) -> BrokerResponse:
        self.checks.refused += 1
        method = METHODS.get(request.method)
        if method is None and request.method not in RESERVED:
            # The C++ client sends method 0 when it closes; the connection stays open.
            text = f"method {request.method} does not exist"
            return BrokerResponse(encode_error(exceptions.UNKNOWN_PROTOCOL, text, version=request.version, fatal=True))
        if request.service not in set(ServiceType):
            text = f"service type {request.service} does not exist"
        elif method is not None and method.answers is PeerRole.BROKER:
            text = f"{method.name} is not a method of service type {request.service}"
        elif method is not None:
            text = f"{method.name} is answered by a master, this is a broker"
        else:
            text = f"method {request.method} is reserved and not implemented"
        return BrokerResponse(encode_error(exceptions.EXCEPTION, text, version=request.version))

    def next_deadline(self) -> int | None:
        """Return the time at which `tick` must be called: the next end of a session or of the wait of a get."""
        return self.registrations.next_check

    def tick(self, now_ms: int) -> None:
        """End expired sessions; answer gets whose waiting time has passed."""
        if self.registrations.next_check is None or now_ms < self.registrations.next_check:
            return
        self.registrations.tick(now_ms)
        self.fetch.tick(now_ms)

    def readable(self, stores: Iterable[LogStore], now_ms: int) -> None:
        """Answer the gets that wait for messages of ``stores``, which have new readable messages."""
        if self.fetch.waiting_count:
            for store in stores:
                self.fetch.wake(store, now_ms)

    def connection_closed(self, connection: object) -> None:
        """Handle the end of a connection. Its sessions continue until they expire, so that clients can reconnect."""
        self.checks.origins.connection_closed(connection)
        if self.fetch.waiting_count:
            self.fetch.forget(connection)

    def remove_topic(self, name: str, now_ms: int = 0) -> list[LogStore]:
        """Remove a topic, its registrations and offsets; returns its open stores, which the shell deletes."""
        self.registrations.forget([key for key, _ in self.registrations if key[1] == name])
        self.offsets.forget_topic(name)
        self.produce.producers.forget_topic(name)
        stores = self.topics.remove(name)
        for store in stores:
            self.dirty_stores.pop(store, None)
            self.fetch.release(store, now_ms)
        return stores
