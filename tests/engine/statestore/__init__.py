"""The state store's service without sockets: a fake broker, a commit queue whose commits end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import StorageError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.topics import validate_topic_name
from penstock.mqtt.service import Inbound, Outlet
from penstock.runtime.io.commit_queue import CommitClient, CommitQueue, CommitWaiter
from penstock.runtime.io.files import Durability
from penstock.statestore.binding import INVOKE, response
from penstock.statestore.codec.resp3 import encode_array
from penstock.statestore.engine.record import Change
from penstock.statestore.hlc import Hlc, parse
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.interfaces import StoreAuthorizer
from penstock.statestore.service.service import StateStoreService

__all__ = ["NOW", "Delivery", "FakeOutlet", "ManualClock", "ManualQueue", "Peer", "open_service"]

NOW = 1_700_000_000_000

SDK_FORM = (("__protVer", "1.0"),)


class ManualClock:
    """Milliseconds that pass when told."""

    def __init__(self, now_ms: int = NOW) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class Delivery(NamedTuple):
    """A message straight into the session of ``client_id``, or, where None, to the subscriptions of ``asked_by``."""

    client_id: str | None
    publish: Publish
    asked_by: str | None = None

    @property
    def payload(self) -> bytes:
        return self.publish.payload

    @property
    def correlation(self) -> bytes | None:
        return self.publish.properties.correlation_data

    @property
    def version(self) -> Hlc | None:
        properties = self.publish.properties
        return parse(properties.user_property("__ts") or properties.user_property("Timestamp") or "")

    def user(self, name: str) -> str | None:
        return self.publish.properties.user_property(name)


class FakeOutlet(Outlet):
    """What the broker was asked to do, in order. Clients in ``gone`` have no session; topics are checked as it does."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.disconnects: list[tuple[int, str]] = []
        self.settled: list[tuple[bytes | None, int, str]] = []
        self.gone: set[str] = set()
        self.requests_observed: list[tuple[str, str]] = []

    def publish(self, message: Publish) -> None:
        raise AssertionError(f"the store publishes nothing for everybody: {message}")

    def respond(
        self,
        client_id: str,
        topic: str,
        payload: bytes,
        properties_wire: bytes,
        expiry_s: int,
        request: Inbound | None = None,
    ) -> bool:
        validate_topic_name(topic)
        message = response(topic, payload, properties_wire)
        assert (message.properties.message_expiry_interval or 0) == expiry_s
        if client_id in self.gone:
            return False
        if request is not None:
            request.settle()
        self.deliveries.append(Delivery(None, message, client_id))
        return True

    def undelivered_reason(self, client_id: str, topic: str) -> str:
        return f"{client_id} does not hear {topic}"

    def deliver(self, client_id: str, message: Publish, *, deletes: bool = False) -> bool:
        self.deliveries.append(Delivery(client_id, message))
        return client_id not in self.gone

    def copy_to_subscribers(self, client_id: str, message: Publish) -> None:
        self.requests_observed.append((client_id, message.topic))

    def disconnect(self, client_id: str, reason_code: int, reason_string: str = "") -> None:
        raise AssertionError(f"{client_id}: by its id, whichever connection that has: {reason_code} {reason_string}")

    def taken(self) -> list[Delivery]:
        """What was published or delivered since the last call."""
        taken, self.deliveries = self.deliveries, []
        return taken


class FakeConnection:
    """The network connection of a peer; it stays usable, so that tests can go on after its end."""

    def __init__(self, outlet: FakeOutlet) -> None:
        self.outlet = outlet
        self.closing = False
        self.resumed = True

    def disconnect_client(self, reason_code: int, reason_string: str) -> None:
        self.outlet.disconnects.append((reason_code, reason_string))

    def hold(self) -> None: ...

    def release(self) -> None: ...


class ManualQueue(CommitQueue[Any]):
    """A commit queue whose commits end when the test says so.

    Each request is a commit of its own, so that tests can have one end before the next; with ``groups`` what comes
    before the next one ends goes with it, as in earnest.
    """

    def __init__(self) -> None:
        super().__init__("manual", CommitClient())
        self.groups = False
        self._service: StateStoreService | None = None
        self._collects = False
        self._begun: list[Any] = []
        self._by_number: dict[int, list[CommitWaiter]] = {}

    @property
    def pending(self) -> int:
        """Commits that have not ended."""
        return len(self._begun) + self._collects

    def collected(self) -> list[Change]:
        """The changes of the only commit that has not ended."""
        self._begin_next()
        (commit,) = self._begun
        return list(commit.changes)

    def attach(self, service: StateStoreService) -> None:
        """Commit the changes of ``service``."""
        self._service = service
        service._writer.queue = self

    @property
    def is_started(self) -> bool:
        return True

    def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        self.finish()

    def fail_soon(self, failure: StorageError) -> None:
        """Nothing fails but what the test lets fail."""
        raise failure

    def request(self) -> int:
        if not self.groups:
            self._begin_next()
        self._collects = True
        return self.number

    def request_within(self, seconds: float) -> None:
        """Nothing is written behind before the test requests it."""

    def wait(self, number: int, waiter: CommitWaiter) -> None:
        assert number > self.ended
        self._by_number.setdefault(number, []).append(waiter)

    wait_also = wait

    def _begin_next(self) -> None:
        if self._collects:
            self._collects = False
            self.number += 1
            assert self._service is not None
            self._begun.append(self._service._writer.begin_commit())

    def finish(self, count: int | None = None, failure: StorageError | None = None) -> None:
        """End the first ``count`` commits, or all."""
        self._begin_next()
        batch = self._begun[:count]
        del self._begun[:count]
        for commit in batch:
            self.ended += 1
            assert self._service is not None
            self._service._writer.end_commit(commit, failure)
            for waiter in self._by_number.pop(self.ended, []):
                waiter.commit_ended(failure)

    def fail(self) -> None:
        """The commit of everything that waits fails."""
        self.failure = StorageError("disk full")
        assert self._service is not None
        self._service._failed(self.failure)
        self.finish(failure=self.failure)


class Peer:
    """One client of the service; requests are written as words, in the SDK form unless ``form`` says otherwise."""

    def __init__(
        self,
        service: StateStoreService,
        outlet: FakeOutlet,
        clock: ManualClock,
        client_id: str = "client-id1",
        *,
        topic: str = INVOKE,
        form: Sequence[tuple[str, str]] = SDK_FORM,
        timestamp_property: str = "__ts",
    ) -> None:
        self.service = service
        self.outlet = outlet
        self.clock = clock
        self.client_id = client_id
        self.response_topic = f"clients/{client_id}/response"
        self.topic = topic
        self.form = form
        self.timestamp_property = timestamp_property
        self.connection: FakeConnection | None = FakeConnection(outlet)
        self.sent = 0

    def send(
        self,
        words: str | bytes | Sequence[bytes],
        *,
        ts: str | None = "now",
        ft: Hlc | str | None = None,
        qos: int = 1,
        response_topic: str | None = "own",
        correlation: bytes | None = b"",
        expiry: int | None = None,
        extra: Sequence[tuple[str, str]] = (),
        protocol_version: int = 5,
        dup: bool = False,
    ) -> bytes:
        """Send one request; gives its correlation data (a running number unless told)."""
        self.sent += 1
        if correlation == b"":
            correlation = b"%s-%d" % (self.client_id.encode(), self.sent)
        if isinstance(words, str):
            words = encode_array([word.encode() for word in words.split(" ")])
        elif not isinstance(words, bytes):
            words = encode_array(words)
        user = [*self.form, *extra]
        if ts is not None:
            user.append((self.timestamp_property, f"{self.clock.now_ms}:0:c" if ts == "now" else ts))
        if ft is not None:
            user.append(("__ft" if self.timestamp_property == "__ts" else "FencingToken", str(ft)))
        properties = Properties(
            response_topic=self.response_topic if response_topic == "own" else response_topic,
            correlation_data=correlation,
            message_expiry_interval=expiry,
            user_properties=user,
        )
        settled = self.outlet.settled
        inbound = Inbound(
            Publish(self.topic, words, qos, dup=dup, packet_id=1 if qos else 0, properties=properties),
            self.client_id,
            self.clock.now_ms,
            protocol_version=protocol_version,
            connection=self.connection,
            settle=lambda code, reason: settled.append((correlation, code, reason)),
        )
        self.service.receive(inbound)
        return correlation or b""

    def ask(
        self, words: str | bytes | Sequence[bytes], *, ts: str | None = "now", ft: Hlc | str | None = None
    ) -> Delivery:
        """Send one request and give its answer, which must be there at once."""
        correlation = self.send(words, ts=ts, ft=ft)
        found = [d for d in self.outlet.deliveries if d.correlation == correlation]
        assert len(found) == 1, self.outlet.deliveries
        assert (found[0].asked_by, found[0].publish.topic) == (self.client_id, self.response_topic)
        self.outlet.deliveries.remove(found[0])
        return found[0]


async def open_service(
    path: Path,
    outlet: FakeOutlet,
    clock: ManualClock,
    *,
    durability: Durability = Durability.MEMORY,
    queue: ManualQueue | None = None,
    dialect: str = "auto",
    policy: StoreAuthorizer | None = None,
    options: StoreOptions | None = None,
) -> StateStoreService:
    """A started service; with ``memory`` answers leave at once, which spares most tests the waiting."""
    service = StateStoreService(
        path, durability, clock, options=options or StoreOptions(dialect=dialect), policy=policy
    )
    if queue is not None:
        queue.attach(service)
    await service.start(outlet)
    return service
