"""A model of etcd with three members, behind gRPC channels of which ``EtcdClient`` knows nothing.

All members share one state, because etcd is linearizable: a request is executed at one instant after it has arrived, or
never, and later than its deadline at times. What differs between members is the way to them. Modelled are keys with
revisions, transactions, leases, compaction, the quota of the database, watches that lose events, elections (which
give each lease its full time again), and the restore of a backup.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import grpc

from penstock.cluster.proto import etcd_pb2 as pb
from tests.simulation.cluster.threads import Process, Simulator, Thread
from tests.simulation.loop import WALL_MS

__all__ = ["MEMBERS", "Channel", "Etcd", "Link"]

MEMBERS: Final = ("192.0.2.1:2379", "192.0.2.2:2379", "192.0.2.3:2379")
EXPIRY_CHECK_S: Final = 0.5
"""Longest interval in which etcd looks for leases that have expired."""
ELECTION_S: Final = 1.0, 2.0
_FULL: Final = "etcdserver: mvcc: database space exceeded"
LOST_EVENTS: Final = 0.1
"""Share of the events that a watch loses."""


class Pair(NamedTuple):
    """A key's value, with its revisions and its lease (0: none)."""

    value: bytes
    created: int
    modified: int
    lease: int


class RefusedCallError(Exception):
    """etcd rejects a request, which has no effect."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class RpcFailure(grpc.RpcError):
    """What gRPC raises."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__(f"{code.name} {details}")
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@dataclass
class Lease:
    ttl_s: int
    end_s: float


@dataclass
class Link:
    """The network between one node and all members, with the longest delay of requests and of answers."""

    loses_requests: bool = False
    loses_answers: bool = False
    request_s: float = 0.002
    answer_s: float = 0.002

    def cut(self, *, requests: bool = True, answers: bool = True) -> None:
        """Lose everything in one direction or both."""
        self.loses_requests, self.loses_answers = requests, answers

    def heal(self) -> None:
        """End all faults."""
        self.loses_requests = self.loses_answers = False
        self.request_s = self.answer_s = 0.002


@dataclass
class Call:
    """A call in progress. ``answer``: its result, once it has arrived at the client."""

    link: Link
    member: int
    method: str
    request: bytes
    thread: Thread
    life: int
    answer: bytes | RpcFailure | None = None


class Etcd:
    """The cluster. ``quota_bytes``: size of the database above which puts and leases are refused."""

    def __init__(self, simulator: Simulator, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.is_full = False
        """The alarm NOSPACE, which remains until an operator ends it."""
        self.on_change: Callable[[bytes, bytes | None], None] = lambda _key, _value: None
        """Called for every key that is put (with its value) or deleted (None)."""
        self.pairs: dict[bytes, Pair] = {}
        self.revision = 1
        self.life = 0
        """Number of restored backups."""
        self._simulator = simulator
        self._keys: list[bytes] = []
        self._compacted = 0
        self._leases: dict[int, Lease] = {}
        self._leader = 0
        self._elected_s = 0.0
        self._down: set[int] = set()
        self._paused_s = [0.0] * len(MEMBERS)
        self._used_bytes = 0
        self._next_lease = 1
        self._streams: list[WatchStream] = []
        simulator.later(EXPIRY_CHECK_S, self._expire)

    def true_ms(self) -> int:
        """The true time in ms."""
        return WALL_MS + int(self._simulator.now_s * 1000)

    # Faults

    def kill(self, member: int, seconds: float) -> None:
        """End a member, which is back after ``seconds``; if it leads, another one is elected."""
        self._down.add(member)
        for stream in self._streams:
            if stream.member == member:
                stream.end(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if member == self._leader:
            self._elect()
        self._simulator.later(seconds, self._return, member)

    def pause(self, member: int, seconds: float) -> None:
        """Let a member stand still, with its connections open; if it leads, another one is elected."""
        self._paused_s[member] = self._simulator.now_s + seconds
        if member == self._leader:
            self._elect()

    def _return(self, member: int) -> None:
        had_majority = self._has_majority
        self._down.discard(member)
        if not had_majority and self._has_majority:
            self._elect()

    def _elect(self) -> None:
        """Elect a leader, which gives each lease its full time again."""
        simulator = self._simulator
        self._elected_s = simulator.now_s + simulator.random.uniform(*ELECTION_S)
        able = [m for m in range(len(MEMBERS)) if m not in self._down and self._paused_s[m] <= simulator.now_s]
        self._leader = simulator.random.choice(able) if able else self._leader
        for lease in self._leases.values():
            lease.end_s = self._elected_s + lease.ttl_s

    @property
    def _has_majority(self) -> bool:
        return len(self._down) <= 1

    @property
    def is_available(self) -> bool:
        """Whether requests are executed at present."""
        return self._has_majority and self._elected_s <= self._simulator.now_s

    def values(self) -> dict[bytes, bytes]:
        """Return the value of each key."""
        return {key: pair.value for key, pair in self.pairs.items()}

    def back_up(self) -> tuple[Any, ...]:
        """Return a backup for :meth:`restore`."""
        ttls = {number: lease.ttl_s for number, lease in self._leases.items()}
        return dict(self.pairs), [*self._keys], self.revision, ttls

    def restore(self, backup: tuple[Any, ...]) -> None:
        """Continue with a backup, on members that are started with it."""
        pairs, keys, self.revision, ttls = backup
        self.life += 1
        self.pairs, self._keys, self._compacted = dict(pairs), [*keys], 0
        self._leases = {number: Lease(ttl, 0.0) for number, ttl in ttls.items()}
        self._count()
        self.is_full = False
        for stream in self._streams:
            stream.end(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        self._elect()

    def delete_all(self) -> None:
        """Delete all keys, as an operator does before a new log begins."""
        for key in [*self._keys]:
            self._delete(key, self.revision + 1)
        self._count()

    def fill(self) -> None:
        """Let the database reach its quota."""
        self.is_full = True

    def end_alarm(self) -> None:
        """What an operator does who has made space."""
        self.is_full = False

    # The state

    def holder(self, key: bytes) -> int:
        """The revision of ``key``; 0 if it does not exist."""
        pair = self.pairs.get(key)
        return 0 if pair is None else pair.modified

    def execute(self, method: str, data: bytes) -> bytes:
        """Execute a request."""
        match method:
            case "KV/Txn":
                answer: Any = self._transact(pb.TxnRequest.FromString(data))
            case "KV/Range":
                answer = self._range(pb.RangeRequest.FromString(data))
            case "KV/Compact":
                answer = self._compact(pb.CompactionRequest.FromString(data))
            case "Lease/LeaseGrant":
                answer = self._grant(pb.LeaseGrantRequest.FromString(data))
            case "Lease/LeaseRevoke":
                lease = pb.LeaseRevokeRequest.FromString(data).ID
                if lease not in self._leases:
                    raise RefusedCallError(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
                self._end_lease(lease)
                answer = pb.LeaseRevokeResponse()
            case "Lease/LeaseKeepAlive":
                answer = self._keep_alive(pb.LeaseKeepAliveRequest.FromString(data).ID)
            case "Maintenance/Status":
                answer = pb.StatusResponse(dbSize=self._used_bytes, leader=self._leader + 1)
            case _:
                raise AssertionError(method)
        answer.header.revision = self.revision
        return bytes(answer.SerializeToString())

    def _transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        puts = [op.request_put for op in (*request.success, *request.failure) if op.HasField("request_put")]
        if puts and self.is_full:
            raise RefusedCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL)
        if any(put.lease and put.lease not in self._leases for put in puts):
            raise RefusedCallError(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        succeeded = all(map(self._holds, request.compare))
        answer = pb.TxnResponse(succeeded=succeeded)
        revision = self.revision + 1
        for op in request.success if succeeded else request.failure:
            found = answer.responses.add()
            if op.HasField("request_put"):
                self._put(op.request_put, revision)
                found.response_put.SetInParent()
            elif op.HasField("request_delete_range"):
                keys = self._between(op.request_delete_range.key, op.request_delete_range.range_end)
                for key in keys:
                    self._delete(key, revision)
                found.response_delete_range.deleted = len(keys)
            else:
                found.response_range.CopyFrom(self._range(op.request_range))
        if puts and succeeded and self.is_full:  # this transaction has filled the database, and is refused as well
            raise RefusedCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL)
        return answer

    def _holds(self, compare: pb.Compare) -> bool:
        pair = self.pairs.get(compare.key)
        assert compare.result == pb.Compare.EQUAL
        if compare.target == pb.Compare.CREATE:
            return (0 if pair is None else pair.created) == compare.create_revision
        assert compare.target == pb.Compare.MOD
        return (0 if pair is None else pair.modified) == compare.mod_revision

    def _between(self, key: bytes, end: bytes) -> list[bytes]:
        if not end:
            return [key] if key in self.pairs else []
        return self._keys[bisect_left(self._keys, key) : bisect_left(self._keys, end)]

    def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        answer = pb.RangeResponse()
        keys = self._between(request.key, request.range_end)
        for key in keys[: request.limit] if request.limit else keys:
            pair = self.pairs[key]
            answer.kvs.add(
                key=key,
                value=b"" if request.keys_only else pair.value,
                create_revision=pair.created,
                mod_revision=pair.modified,
                lease=pair.lease,
            )
        return answer

    def _put(self, put: pb.PutRequest, revision: int) -> None:
        before = self.pairs.get(put.key)
        if before is None:
            insort(self._keys, put.key)
        created = revision if before is None else before.created
        self.pairs[put.key] = Pair(put.value, created, revision, put.lease)
        self.revision = revision
        self._used_bytes += len(put.key) + len(put.value)
        if self._used_bytes > self.quota_bytes:
            self.is_full = True
        self._changed(put.key, put.value)

    def _delete(self, key: bytes, revision: int) -> None:
        del self.pairs[key]
        del self._keys[bisect_left(self._keys, key)]
        self.revision = revision
        self._changed(key, None)

    def _changed(self, key: bytes, value: bytes | None) -> None:
        self.on_change(key, value)
        for stream in self._streams:
            if key in stream.keys:
                stream.changed(key, value)

    def _compact(self, request: pb.CompactionRequest) -> pb.CompactionResponse:
        if not self._compacted < request.revision <= self.revision:
            text = "required revision has been compacted" if request.revision <= self._compacted else "future revision"
            raise RefusedCallError(grpc.StatusCode.OUT_OF_RANGE, f"etcdserver: mvcc: {text}")
        self._compacted = request.revision
        self._count()
        return pb.CompactionResponse()

    def _count(self) -> None:
        self._used_bytes = sum(len(key) + len(pair.value) for key, pair in self.pairs.items())

    def _grant(self, request: pb.LeaseGrantRequest) -> pb.LeaseGrantResponse:
        if self.is_full:
            raise RefusedCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL)
        number = self._next_lease
        self._next_lease += 1
        self._leases[number] = Lease(request.TTL, self._simulator.now_s + request.TTL)
        return pb.LeaseGrantResponse(ID=number, TTL=request.TTL)

    def _keep_alive(self, number: int) -> pb.LeaseKeepAliveResponse:
        lease = self._leases.get(number)
        if lease is None:
            return pb.LeaseKeepAliveResponse(ID=number, TTL=0)
        lease.end_s = self._simulator.now_s + lease.ttl_s
        return pb.LeaseKeepAliveResponse(ID=number, TTL=lease.ttl_s)

    def _expire(self) -> None:
        now_s = self._simulator.now_s
        if self.is_available:
            for number in [number for number, lease in self._leases.items() if lease.end_s <= now_s]:
                self._end_lease(number)
        self._simulator.later(EXPIRY_CHECK_S * self._simulator.random.random() ** 3, self._expire)

    def _end_lease(self, number: int) -> None:
        del self._leases[number]
        revision = self.revision + 1
        for key in [key for key, pair in self.pairs.items() if pair.lease == number]:
            self._delete(key, revision)

    # The way to it

    def call(self, link: Link, member: int, method: str, request: bytes, deadline_s: float) -> bytes:
        """Call ``method`` at a member, from a thread of a node. Raises RpcFailure."""
        simulator = self._simulator
        assert simulator.thread is not None
        call = Call(link, member, method, request, simulator.thread, self.life)
        simulator.later(self._delay_s(link.request_s), self._arrive, call)
        end_s = simulator.now_s + deadline_s
        while call.answer is None and simulator.now_s < end_s:
            simulator.wait(end_s - simulator.now_s)
        # After a pause of the process both are due, the answer and the deadline.
        late = simulator.now_s > end_s + 0.001 and simulator.random.random() < 0.5
        if call.answer is None or late:
            raise RpcFailure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if isinstance(call.answer, RpcFailure):
            raise call.answer
        return call.answer

    def _delay_s(self, most_s: float) -> float:
        return 0.0001 + most_s * (1 - self._simulator.random.random() ** 2)

    def _arrive(self, call: Call) -> None:
        simulator = self._simulator
        if call.link.loses_requests or call.life != self.life:
            return
        if call.member in self._down:
            self._answer(call, RpcFailure(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"))
        elif (left_s := self._paused_s[call.member] - simulator.now_s) > 0:
            simulator.later(left_s + 0.001, self._arrive, call)
        elif self.is_available:
            simulator.later(0.0002 + 0.002 * simulator.random.random(), self._execute, call)
        elif simulator.random.random() < 0.5:
            self._answer(call, RpcFailure(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader"))
        else:  # it stays in the log of a member, which may execute it after an election
            simulator.later(0.2, self._arrive, call)

    def _execute(self, call: Call) -> None:
        if call.life != self.life or not self.is_available:
            return
        try:
            answer: bytes | RpcFailure = self.execute(call.method, call.request)
        except RefusedCallError as refused:
            answer = RpcFailure(refused.code, str(refused))
        self._answer(call, answer)

    def _answer(self, call: Call, answer: bytes | RpcFailure) -> None:
        self._simulator.later(self._delay_s(call.link.answer_s), self._arrive_back, call, answer)

    def _arrive_back(self, call: Call, answer: bytes | RpcFailure) -> None:
        lost = call.link.loses_answers or self._paused_s[call.member] > self._simulator.now_s
        if not lost and call.answer is None:
            call.answer = answer
            self._simulator.wake(call.thread)

    def watch(self, process: Process, link: Link, member: int, requests: Iterator[pb.WatchRequest]) -> WatchStream:
        """Open a watch at a member."""
        self._streams = [stream for stream in self._streams if stream.is_open]
        stream = WatchStream(self, process, link, member)
        self._streams.append(stream)
        if member in self._down:
            stream.end(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
        process.start_thread(stream.create, requests)
        return stream

    def reaches(self, link: Link, member: int) -> bool:
        """Whether an event of a watch arrives now."""
        return not (link.loses_answers or self._paused_s[member] > self._simulator.now_s)


class WatchStream:
    """A watch, and the iterator of its responses."""

    def __init__(self, etcd: Etcd, process: Process, link: Link, member: int) -> None:
        self.member = member
        self.keys: set[bytes] = set()
        self._etcd, self._process, self._link = etcd, process, link
        self._simulator = Simulator.running
        self._responses: deque[pb.WatchResponse] = deque()
        self._failure: RpcFailure | None = None
        self._waiting: Thread | None = None

    @property
    def is_open(self) -> bool:
        return self._failure is None and self._process.is_alive

    def create(self, requests: Iterator[pb.WatchRequest]) -> None:
        """Read the client's requests; runs in a thread."""
        for request in requests:
            self.keys.add(request.create_request.key)
            self._later(pb.WatchResponse(created=True))

    def changed(self, key: bytes, value: bytes | None) -> None:
        """Send an event, which may be lost."""
        if self.is_open and self._simulator.random.random() >= LOST_EVENTS:
            response = pb.WatchResponse()
            response.events.add(type=pb.Event.PUT if value is not None else pb.Event.DELETE).kv.key = key
            self._later(response)

    def _later(self, response: pb.WatchResponse) -> None:
        self._simulator.later(0.0001 + self._link.answer_s * self._simulator.random.random(), self._arrive, response)

    def _arrive(self, response: pb.WatchResponse) -> None:
        if self.is_open and self._etcd.reaches(self._link, self.member):
            self._responses.append(response)
            self._wake()

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """End the stream with an error."""
        if self._failure is None:
            self._failure = RpcFailure(code, details)
            self._wake()

    def cancel(self) -> None:
        """End the stream, by the client [grpc.RpcContext]."""
        self.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")

    def _wake(self) -> None:
        if self._waiting is not None:
            self._simulator.wake(self._waiting)

    def __iter__(self) -> WatchStream:
        return self

    def __next__(self) -> pb.WatchResponse:
        while not self._responses:
            if self._failure is not None:
                raise self._failure
            self._waiting = self._simulator.thread
            self._simulator.wait(None)
        return self._responses.popleft()


class Channel:
    """A channel of a process to a member [grpc.Channel]."""

    def __init__(self, etcd: Etcd, process: Process, link: Link, endpoint: str) -> None:
        self._etcd, self._process, self._link = etcd, process, link
        self._member = MEMBERS.index(endpoint)

    def unary_unary(
        self, path: str, request_serializer: Callable[[Any], bytes], response_deserializer: Callable[[bytes], Any]
    ) -> Callable[..., Any]:
        method = path.removeprefix("/etcdserverpb.")

        def call(request: Any, *, timeout: float, **_: Any) -> Any:
            data = request_serializer(request)
            return response_deserializer(self._etcd.call(self._link, self._member, method, data, timeout))

        return call

    def stream_stream(
        self, path: str, request_serializer: Callable[[Any], bytes], response_deserializer: Callable[[bytes], Any]
    ) -> Callable[..., Any]:
        method = path.removeprefix("/etcdserverpb.")

        def watch(requests: Iterator[pb.WatchRequest], **_: Any) -> WatchStream:
            return self._etcd.watch(self._process, self._link, self._member, requests)

        def answers(requests: Iterator[Any], *, timeout: float, **_: Any) -> Iterator[Any]:
            for request in requests:
                data = request_serializer(request)
                yield response_deserializer(self._etcd.call(self._link, self._member, method, data, timeout))

        return watch if method == "Watch/Watch" else answers

    def close(self) -> None:
        """Nothing is open."""
