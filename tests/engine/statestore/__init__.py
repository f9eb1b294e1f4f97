"""The state store's service without sockets: a fake broker, a committer that commits when told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from penstock.errors import StorageError
from penstock.mqtt.codec.packets import Publish
from penstock.mqtt.codec.properties import Properties
from penstock.mqtt.codec.topics import validate_topic_name
from penstock.mqtt.service import Inbound
from penstock.runtime.io.committer import GroupCommitter
from penstock.runtime.io.files import Durability
from penstock.statestore.binding import INVOKE
from penstock.statestore.codec.resp3 import encode_array
from penstock.statestore.engine.record import Change
from penstock.statestore.hlc import Hlc, parse
from penstock.statestore.options import StoreOptions
from penstock.statestore.service.interfaces import Policy
from penstock.statestore.service.service import StateStoreService

__all__ = ["NOW", "Delivery", "FakeOutlet", "ManualClock", "ManualCommitter", "Peer", "open_service"]

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


class FakeOutlet:
    """What the broker was asked to do, in order. Clients in ``gone`` have no session; topics are checked as it does."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.disconnects: list[tuple[int, str]] = []
        self.settled: list[tuple[bytes | None, int, str]] = []
        self.gone: set[str] = set()
        self.overheard: list[tuple[str, str]] = []

    def publish(self, message: Publish) -> None:
        raise AssertionError(f"the store publishes nothing for everybody: {message}")

    def respond(self, client_id: str, message: Publish, acknowledge: Callable[[], None] | None = None) -> bool:
        validate_topic_name(message.topic)
        if client_id in self.gone:
            return False
        if acknowledge is not None:
            acknowledge()
        self.deliveries.append(Delivery(None, message, client_id))
        return True

    def unheard(self, client_id: str, topic: str) -> str:
        return f"{client_id} does not hear {topic}"

    def deliver(self, client_id: str, message: Publish, *, deletes: bool) -> bool:
        self.deliveries.append(Delivery(client_id, message))
        return client_id not in self.gone

    def overhear(self, client_id: str, message: Publish) -> None:
        self.overheard.append((client_id, message.topic))

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

    def end(self, reason_code: int, reason_string: str) -> None:
        self.outlet.disconnects.append((reason_code, reason_string))

    def hold(self) -> None: ...

    def release(self) -> None: ...


class ManualCommitter:
    """A committer whose commits finish when the test says so.

    Each operation is a commit of its own, so that tests can have one finish before the next; with ``groups`` what comes
    before the next one finishes goes with it, as in earnest.
    """

    def __init__(self, *, groups: bool = False) -> None:
        self.groups = groups
        self.waiting: list[tuple[Sequence[Change], Callable[[StorageError | None], None]]] = []
        self._started = 0
        self.failure: StorageError | None = None
        self.on_failure: Callable[[StorageError], None] = lambda _: None

    @property
    def pending(self) -> int:
        return len(self.waiting)

    @property
    def started(self) -> int:
        if not self.groups:
            self._started += 1
        return self._started

    def start(self) -> None:
        """Nothing to start."""

    def fail_soon(self, failure: StorageError) -> None:
        """Nothing fails but what the test lets fail."""
        raise failure

    async def close(self) -> None:
        self.finish()

    def submit(self, op: Sequence[Change], done: Callable[[StorageError | None], None]) -> None:
        self.waiting.append((op, done))

    def finish(self, count: int | None = None) -> None:
        """Commit the first ``count`` of what waits, or all of it."""
        self._started += 1
        batch = self.waiting[:count]
        del self.waiting[:count]
        for _, done in batch:
            done(None)

    def fail(self) -> None:
        """The commit of everything that waits fails."""
        self.failure = StorageError("disk full")
        self.on_failure(self.failure)
        batch, self.waiting = self.waiting, []
        for _, done in batch:
            done(self.failure)


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
    committer: ManualCommitter | None = None,
    dialect: str = "auto",
    policy: Policy | None = None,
    options: StoreOptions | None = None,
) -> StateStoreService:
    """A started service; with ``memory`` answers leave at once, which spares most tests the waiting."""
    service = StateStoreService(
        path, durability, clock, options=options or StoreOptions(dialect=dialect), policy=policy
    )
    if committer is not None:
        committer.on_failure = service._failed
        service._writer.committer = cast("GroupCommitter[Sequence[Change]]", committer)
    await service.start(outlet)
    return service
