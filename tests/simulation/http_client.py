"""An HTTP client: health, metrics, the list of MQTT clients, and the administration of TubeMQ's topics.

It sends one request at a time. A request whose connection was lost may have been carried out, may still be, or will
never be: ``TopicRegister`` holds every state that a topic can have, and each answer must fit at least one of them.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode

import h11

from tests.simulation.disk import SimulatedDisk
from tests.simulation.history import History, Violation
from tests.simulation.loop import VirtualLoop
from tests.simulation.mqtt_client import MqttClient
from tests.simulation.mqtt_history import AMPLE_MS, MqttHistory
from tests.simulation.network import NetworkEnd
from tests.simulation.node import HTTP, TOKEN
from tests.simulation.statestore_client import KEYS

__all__ = ["HttpClient", "HttpStep", "TopicRegister", "TopicState", "http_step"]

TOPICS = ("admin_0", "admin_1", "admin_2")
POLICIES = ("delete,24h", "delete,48h", "delete,72h")
PAGE_ROWS = 3
REQUEST_S = 30.0
PAUSE_S = 0.2
CLOSED_S = 60.0
"""Time in which the connection of a disconnected client ends."""
LASTING_S = 100_000
"""Session Expiry Interval of clients whose session never ends in a simulation."""


class HttpStep(NamedTuple):
    """One request. ``topic``, ``partitions`` and ``policy`` are those of an administration request."""

    kind: str
    topic: str = ""
    partitions: int = 1
    policy: str = POLICIES[0]
    client: int = 0


def http_step(random: Random) -> HttpStep:
    """A random request."""
    kinds = ("livez", "readyz", "metrics", "clients", "disconnect", "topics", "add", "policy", "grow", "cut", "end")
    kind = random.choices(kinds, (1, 2, 2, 3, 1, 4, 3, 4, 3, 1, 1))[0]
    return HttpStep(kind, random.choice(TOPICS), random.randrange(1, 5), random.choice(POLICIES), random.randrange(6))


class TopicState(NamedTuple):
    """Properties of a topic that exists."""

    partitions: int
    policy: str


State = TopicState | None
Change = tuple[str, TopicState]
"""Kind and arguments of a change: ``add`` both, ``policy`` and ``grow`` one of them."""
OK, UNCHANGED, EXISTS, STORING = 200, 201, 402, 512


def outcome(state: State, change: Change) -> tuple[int, State]:
    """Code and new state of a change."""
    kind, wanted = change
    if kind == "add":
        return (EXISTS, state) if state is not None else (OK, wanted)
    if state is None:
        return 401, None
    changed = state._replace(policy=wanted.policy) if kind == "policy" else state._replace(partitions=wanted.partitions)
    if changed.partitions < state.partitions:
        return 407, state
    return (UNCHANGED, state) if changed == state else (OK, changed)


class TopicRegister:
    """All states that a topic may have, each with the changes that may still be carried out."""

    def __init__(self) -> None:
        self._possible: set[tuple[State, frozenset[tuple[int, Change]]]] = {(None, frozenset())}
        self._numbers = 0

    def changed(self, change: Change, code: int) -> None:
        """A change was answered with ``code``."""
        found = set()
        for state, pending in self._reachable():
            expected, after = outcome(state, change)
            if code == expected:
                found.add((after, pending))
            elif code in {EXISTS, STORING} and pending:
                found.add((state, pending))  # one of them is being stored
        self._keep(found, f"{change} was answered with {code}")

    def unknown(self, change: Change) -> None:
        """A change was not answered."""
        self._numbers += 1
        self._possible = {(state, pending | {(self._numbers, change)}) for state, pending in self._possible}

    def seen(self, state: State) -> None:
        """A query returned ``state``."""
        self._keep({entry for entry in self._reachable() if entry[0] == state}, f"it was seen as {state}")

    def power_lost(self) -> None:
        """What was not carried out never will be."""
        self._possible = {(state, frozenset()) for state, _ in self._reachable()}

    def _reachable(self) -> set[tuple[State, frozenset[tuple[int, Change]]]]:
        found, left = set(self._possible), list(self._possible)
        while left:
            state, pending = left.pop()
            for entry in pending:
                after = outcome(state, entry[1])[1], pending - {entry}
                if after not in found:
                    found.add(after)
                    left.append(after)
        return found

    def _keep(self, found: set[tuple[State, frozenset[tuple[int, Change]]]], what: str) -> None:
        if not found:
            states = sorted({str(state) for state, _ in self._reachable()})
            raise Violation(f"{what}; it can only be {', '.join(states)}")
        self._possible = found


class Node(Protocol):
    @property
    def has_failed(self) -> bool: ...

    @property
    def is_stalled(self) -> bool: ...


class Simulation(Protocol):
    """What the client needs of the simulation."""

    history: History
    mqtt: MqttHistory
    loop: VirtualLoop
    disk: SimulatedDisk
    mqtt_clients: list[MqttClient]

    @property
    def node(self) -> Node: ...

    def check_done(self) -> None: ...

    def check_failed(self) -> None: ...


Done = Callable[[int, Any], None]
"""Gets status and body of a response; 0: there is none, and the request may have been carried out."""


class _Connection:
    """A connection, with one request at a time."""

    def __init__(self, client: HttpClient, loop: VirtualLoop) -> None:
        self._client = client
        self._http = h11.Connection(h11.CLIENT)
        self._status = 0
        self._body = b""
        self._has_ended = False
        self.end: NetworkEnd = loop.network.connect(HTTP, self)

    def is_ready(self) -> bool:
        """Whether it can be used for another request."""
        return not (self._has_ended or self.end.is_closing()) and self._http.our_state in {h11.IDLE, h11.DONE}

    def request(self, method: str, target: str, *, is_last: bool) -> None:
        """Send a request without a body; ``is_last``: and end this direction of the connection."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        self._status, self._body = 0, b""
        headers = [("Host", "node"), ("Authorization", f"Bearer {TOKEN}")]
        data = self._http.send(h11.Request(method=method, target=target, headers=headers)) or b""
        self.end.write(data + (self._http.send(h11.EndOfMessage()) or b""))
        if is_last:
            self._has_ended = True
            self.end.write_eof()

    def connection_made(self, _transport: asyncio.BaseTransport) -> None: ...

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise Violation(f"a response is not HTTP: {error}") from error
            if isinstance(event, h11.Response):
                self._status = event.status_code
            elif isinstance(event, h11.Data):
                self._body += bytes(event.data)
            else:
                break
        if isinstance(event, h11.EndOfMessage):
            self._client.response(self, self._status, self._body)

    def eof_received(self) -> None: ...

    def connection_lost(self, _exc: Exception | None) -> None:
        self._client.connection_lost(self)


class HttpClient:
    """Carries out its steps in order, with a pause before each."""

    name = "http"

    def __init__(self, simulation: Simulation) -> None:
        self.steps: deque[HttpStep] = deque()
        self.answered = 0
        self._simulation = simulation
        self._registers = {name: TopicRegister() for name in TOPICS}
        self._connection: _Connection | None = None
        self._ends = False
        """Whether the connection's direction ends after the next request."""
        self._done: Done | None = None
        self._sent = 0
        self._counters: dict[str, float] = {}
        self._acknowledged = 0
        """Messages that were acknowledged before this life of the node."""

    @property
    def is_done(self) -> bool:
        return not self.steps and self._done is None

    def start(self) -> None:
        """Begin in a new life of the node: what was answered before is there."""
        self._counters = {}
        self._acknowledged = self._simulation.mqtt.acknowledged
        self.steps.appendleft(HttpStep("topics"))
        self._pause()

    def power_lost(self) -> None:
        """The node has ended."""
        self._connection = None
        self._answer(0, b"", goes_on=False)
        for register in self._registers.values():
            register.power_lost()

    # The connection

    def response(self, connection: _Connection, status: int, body: bytes) -> None:
        """A response has arrived."""
        if connection is self._connection:
            self._answer(status, body)

    def connection_lost(self, connection: _Connection) -> None:
        """A connection has ended."""
        if connection is self._connection:
            self._connection = None
            self._answer(0, b"")

    def _request(self, method: str, target: str, done: Done) -> None:
        loop = self._simulation.loop
        if self._connection is None or not self._connection.is_ready():
            self._connection = _Connection(self, loop)
        self._done = done
        self._sent += 1
        self._simulation.history.note(f"{loop.true_ms()} http {method} {target}")
        is_last, self._ends = self._ends, False
        self._connection.request(method, target, is_last=is_last)
        loop.call_later(REQUEST_S, self._give_up, self._sent)

    def _give_up(self, sent: int) -> None:
        if self._done is not None and self._sent == sent and self._connection is not None:
            self._connection.end.abort()

    def _answer(self, status: int, body: bytes, *, goes_on: bool = True) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self.answered += status > 0
        if status == 500 and not self._simulation.disk.was_at_fault:
            raise Violation(f"an HTTP request failed: {body!r}")
        done(status, body)
        if goes_on and self._done is None:
            self._pause()

    def _pause(self) -> None:
        self._simulation.check_done()
        if self.steps:
            self._simulation.loop.soon(PAUSE_S, self._next)

    def _next(self) -> None:
        if not self.steps or self._done is not None:
            return
        self._simulation.check_failed()
        step = self.steps.popleft()
        if step.kind == "cut":
            if self._connection is not None:
                self._connection.end.abort()
            self._pause()
        elif step.kind == "end":
            self._ends = True
            self._pause()
        elif step.kind in {"add", "policy", "grow"}:
            self._change(step)
        else:
            getattr(self, f"_{step.kind}")(step)

    # Health and metrics

    def _livez(self, _step: HttpStep) -> None:
        def done(status: int, body: bytes) -> None:
            if status and (status, body) != (200, b"ok\n"):
                raise Violation(f"/livez answered {status}: {body!r}")

        self._request("GET", "/livez", done)

    def _readyz(self, _step: HttpStep) -> None:
        node = self._simulation.node
        unready = node.has_failed or node.is_stalled

        def done(status: int, body: bytes) -> None:
            if status == 200 and unready and (node.has_failed or node.is_stalled):
                raise Violation("/readyz answered 200 while a part of the node had failed or waited for disk space")
            if status == 503 and not self._simulation.disk.was_at_fault:
                raise Violation(f"/readyz answered 503 on a sound disk: {body!r}")

        self._request("GET", "/readyz", done)

    def _metrics(self, _step: HttpStep) -> None:
        acknowledged = self._simulation.mqtt.acknowledged - self._acknowledged

        def done(status: int, body: bytes) -> None:
            if not status:
                return
            found = _samples(body.decode())
            for name, value in self._counters.items():
                if found.get(name, -1.0) < value:
                    raise Violation(f"the counter {name} fell from {value} to {found.get(name)}")
            self._counters = {name: value for name, value in found.items() if name.endswith("_total")}
            if found["penstock_mqtt_publishes_received_total"] < acknowledged:
                raise Violation(f"metrics have fewer messages than the {acknowledged} that were acknowledged")
            if found["penstock_statestore_keys"] > len(KEYS):
                raise Violation(f"metrics have {found['penstock_statestore_keys']} keys of {len(KEYS)}")

        self._request("GET", "/metrics", done)

    # MQTT clients

    def _clients(self, _step: HttpStep) -> None:
        clients = self._simulation.mqtt_clients
        before = {client.name: client.attachment for client in clients if client.is_connected}
        lasting = {client.name for client in clients if client.expiry_s == LASTING_S and client.windows}
        rows: dict[str, bool] = {}

        def page(after: str | None) -> None:
            query = {"limit": PAGE_ROWS, "after": after} if after is not None else {"limit": PAGE_ROWS}
            self._request("GET", f"/api/v1/clients?{urlencode(query)}", done)

        def done(status: int, body: bytes) -> None:
            if not status:
                return
            found = _object(status, body)
            for row in found["rows"]:
                if row["client_id"] <= max(rows, default=""):
                    raise Violation(f"the list of clients has {row['client_id']} after {max(rows)}")
                rows[row["client_id"]] = row["connected"]
            if found["next"] is not None:
                page(found["next"])
                return
            for client in clients:
                attachment = before.get(client.name)
                if attachment is not None and client.attachment is attachment and client.is_connected:
                    if not rows.get(client.name):
                        raise Violation(f"{client.name} is connected, and not in the list of clients as such")
                elif client.name in lasting and client.name not in rows:
                    raise Violation(f"the session of {client.name} is not in the list of clients")

        page(None)

    def _disconnect(self, step: HttpStep) -> None:
        client = self._simulation.mqtt_clients[step.client]
        attachment, was_connected = client.attachment, client.is_connected
        if attachment is not None and attachment.unwanted_ms is None:
            attachment.unwanted_ms = self._simulation.loop.true_ms()
        until_ms, client.unwanted_until_ms = client.unwanted_until_ms, math.inf

        def is_open() -> bool:
            return client.attachment is attachment and attachment is not None and attachment.connection.ended_ms is None

        def done(status: int, body: bytes) -> None:
            # Without a response the request may be handled later.
            client.unwanted_until_ms = until_ms if status else self._simulation.loop.true_ms() + AMPLE_MS
            if status and was_connected and is_open():
                if not _object(status, body)["disconnected"]:
                    raise Violation(f"{client.name} is connected, and was not disconnected")
                self._simulation.loop.call_later(CLOSED_S, after_pause)

        def after_pause() -> None:
            # If the process was suspended until now, its timers are due in the same turn of the loop.
            if is_open():
                self._simulation.loop.call_later(1.0, check)

        def check() -> None:
            if is_open():
                raise Violation(f"{client.name} was disconnected, and its connection is open")

        self._request("DELETE", f"/api/v1/clients/{client.name}", done)

    # Topics

    def _topics(self, _step: HttpStep) -> None:
        self._request("GET", "/webapi.htm?method=admin_query_topic_info", self._topics_seen)

    def _topics_seen(self, status: int, body: bytes) -> None:
        if not status:
            return
        found = {row["topicName"]: row["topicInfo"] for row in _object(status, body)["data"]}
        for name, register in self._registers.items():
            rows = found.get(name)
            state = None if rows is None else TopicState(rows[0]["numPartitions"], rows[0]["deletePolicy"])
            _named(name, partial(register.seen, state))

    def _change(self, step: HttpStep) -> None:
        register = self._registers[step.topic]
        change = step.kind, TopicState(step.partitions, step.policy)
        method = "admin_add_new_topic_record" if step.kind == "add" else "admin_modify_topic_info"
        query: dict[str, object] = {"type": "op_modify", "method": method, "topicName": step.topic}
        query |= {"createUser" if step.kind == "add" else "modifyUser": "simulation"}
        query |= {"numPartitions": step.partitions} if step.kind != "policy" else {}
        query |= {"deletePolicy": step.policy} if step.kind != "grow" else {}

        def done(status: int, body: bytes) -> None:
            if status in {0, 500}:
                register.unknown(change)
                return
            (row,) = _object(status, body)["data"]
            _named(step.topic, lambda: register.changed(change, row["errCode"]))

        self._request("POST", f"/webapi.htm?{urlencode(query)}", done)


def _object(status: int, body: bytes) -> Any:
    try:
        found = json.loads(body)
    except ValueError as error:
        raise Violation(f"an HTTP response with status {status} is no object: {body!r}") from error
    if not found.get("result", status == 200):
        raise Violation(f"an HTTP request was refused with status {status}: {body!r}")
    return found


def _named(topic: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Violation as violation:
        raise Violation(f"topic {topic}: {violation}") from None


def _samples(text: str) -> Mapping[str, float]:
    """Metrics in the text format, by name and labels."""
    rows = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}
