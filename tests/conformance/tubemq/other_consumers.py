"""How consumers of Apache's Go and C++ clients go about a group: orders, what they report, what they confirm."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.tube.codec.proto import broker_pb2 as broker
from penstock.tube.codec.proto import master_pb2 as master
from penstock.tube.codec.proto import shared_pb2 as shared
from tests.conformance.tubemq.other_clients import (
    CPP,
    GO,
    MOST_FAILURES,
    Client,
    Kind,
    Place,
    RefusedRequest,
    masters_in_order,
)

__all__ = ["BoundConsumption", "Consumer"]

CONNECT = {1, 10}
DISCONNECT = {2, 20}
NO_RULES = -2


class BoundConsumption(NamedTuple):
    """Bound consumption: members of one session start together, at the offsets by partition key."""

    session: str
    total: int
    offsets: Mapping[str, int]


@dataclass
class Held:
    """A partition that it reads: the last verdict, and offsets of what it was given."""

    place: Place
    last_consumed: bool = False


@dataclass
class Rules:
    """Flow control rules: what is told under the version held is not looked at, other text has to be a JSON array."""

    version: int = NO_RULES
    text: str = ""

    def told(self, version: int, text: str) -> None:
        if version != self.version:
            assert isinstance(json.loads(text), list), "the rules held would stay for good"
            self.version, self.text = version, text


@dataclass
class Consumer:
    """Heartbeats by hand: each call is one of its timers' turns. ``masters``: addresses with commas between."""

    kind: Kind
    masters: str
    group: str
    topics: list[str]
    filters: Mapping[str, list[str]] = field(default_factory=dict)
    from_start: bool = True
    bound: BoundConsumption | None = None
    signs: bool = False
    """Told to authenticate itself: both clients then send an empty token, as neither has got the signature."""

    def __post_init__(self) -> None:
        self.client = Client(self.kind, self.masters, self.group)
        self.master, *self.next_masters = masters_in_order(self.kind, self.masters)
        self.misses = 0
        self.failures = 0
        self.active = False
        self.default_rules, self.group_rules = Rules(), Rules()
        self.not_allocated = self.first_order = True
        self.id = self.client.id
        self.held: dict[str, Held] = {}
        self.finished: list[shared.EventProto] = []
        self.registered: set[str] = set()
        self.token = NO_RULES
        self.unreported = 0

    async def register(self) -> Any:
        # Go names a topic without filters as well, with nothing behind the separator.
        conditions = [f"{topic}#{','.join(items)}" for topic, items in self.filters.items()]
        request = master.RegisterRequestC2M(
            clientId=self.id, groupName=self.group, hostName="192.0.2.2", topicList=self.topics,
            requireBound=self.bound is not None, subscribeInfo=self._subscribed(), topicCondition=conditions,
            sessionTime=1795251044909, groupFlowCheckId=self.group_rules.version,
            defFlowCheckId=self.default_rules.version, qryPriorityId=NO_RULES,
        )  # fmt: skip
        if self.bound is not None:
            request.sessionKey, request.totalCount, request.selectBig = self.bound.session, self.bound.total, True
            request.requiredPartition = ",".join(f"{key}={offset}" for key, offset in self.bound.offsets.items())
            request.notAllocated = self.not_allocated
        try:
            answer = await self.client.ask(self.master, 4, request)
        except ConnectionError:
            self._next_master()
            raise
        if answer.success:
            self.misses = 0
            self._told(answer)
        return answer

    async def start(self, *, change: bool = False) -> None:
        """As C++ registers: once at each master, first at the current one or (``change``) at the next."""
        if change:
            self._next_master()
        self.active = False
        for _ in range(1 + len(self.next_masters)):
            try:
                assert (await self.register()).success
            except RefusedRequest:
                self._next_master()
            except ConnectionError:
                continue  # the next one already
            else:
                self.active, self.failures = True, 0
                return

    async def tick(self) -> None:
        """One turn of C++'s timer of heartbeats: it changes its master when that is a standby, or does not answer."""
        if not self.active:
            await self.start()
            return
        try:
            await self.heartbeat()
        except RefusedRequest as refusal:
            self.failures += 1
            if "StandbyException" in refusal.text:
                await self.start(change=True)
        except ConnectionError:
            self.failures += 1
            if self.failures >= MOST_FAILURES:
                self.failures = 0
                await self.start(change=True)
        else:
            self.failures = 0

    async def heartbeat(self) -> Any:
        """Reports the last event, if one was carried out; carries out the one that the answer brings."""
        if self.kind.misses and self.misses >= self.kind.misses:
            self._next_master()
            await self.register()
        self.misses += 1
        self.unreported += 1
        request = master.HeartRequestC2M(
            clientId=self.id, groupName=self.group, reportSubscribeInfo=False, qryPriorityId=NO_RULES,
            defFlowCheckId=self.default_rules.version, groupFlowCheckId=self.group_rules.version,
        )  # fmt: skip
        if self.finished or self.unreported > 6:
            self.unreported = 0
            request.reportSubscribeInfo = True
            request.subscribeInfo.extend(self._subscribed())
            if self.finished:
                request.event.CopyFrom(self.finished.pop(0))
        answer = await self.client.ask(self.master, 5, request)
        if answer.success:
            self.misses = 0
            self._told(answer)
            if answer.HasField("event"):  # Go takes any for an order
                await self._carry_out(answer.event)
        elif answer.errCode == 411 and not self.kind.misses:
            await self.register()
        return answer

    async def broker_heartbeats(self) -> None:
        for address in {self._address(held.place) for held in self.held.values()}:
            places = [held.place for held in self.held.values() if self._address(held.place) == address]
            request = broker.HeartBeatRequestC2B(
                clientId=self.id, groupName=self.group, readStatus=0, partitionInfo=map(str, places),
                qryPriorityId=NO_RULES, authInfo=self._auth(),
            )  # fmt: skip
            answer = await self.client.ask(address, 16, request, service=2)
            assert answer.success
            for failure in answer.failureInfo:
                self.held.pop(str(Place.parse(failure.partition(":")[2])), None)

    async def get(self, held: Held) -> tuple[int, list[bytes]]:
        """Code and bodies; a partition that is another's, or nobody's, is dropped."""
        place = held.place
        request = broker.GetMessageRequestC2B(
            clientId=self.id, groupName=self.group, topicName=place.topic, partitionId=place.partition,
            lastPackConsumed=held.last_consumed, manualCommitOffset=False, escFlowCtrl=self.kind is GO,
        )  # fmt: skip
        answer = await self.client.ask(self._address(place), 17, request, service=2)
        held.last_consumed = False
        if answer.errCode in {411, 412, 415}:
            del self.held[str(place)]
        return int(answer.errCode), [body for message in answer.messages for body in self._bodies(place, message)]

    async def confirm(self, held: Held, *, consumed: bool = True) -> Any:
        place = held.place
        request = broker.CommitOffsetRequestC2B(
            clientId=self.id, groupName=self.group, topicName=place.topic, partitionId=place.partition,
            lastPackConsumed=consumed,
        )  # fmt: skip
        answer = await self.client.ask(self._address(place), 18, request, service=2, flag=self.kind.commit_flag)
        held.last_consumed = consumed
        return answer

    async def drain(self) -> list[bytes]:
        """Everything there is on what it holds, confirmed batch by batch."""
        found = []
        for held in list(self.held.values()):
            code = 200
            while code == 200:
                code, bodies = await self.get(held)
                if code == 200:
                    found += bodies
                    assert (await self.confirm(held)).success
            assert code == 404
        return found

    async def close(self) -> None:
        """First the master, then each partition: what was not confirmed is not consumed."""
        request = master.CloseRequestC2M(clientId=self.id, groupName=self.group)
        if self.kind is GO:
            request.authInfo.SetInParent()
        assert (await self.client.ask(self.master, 6, request)).success
        for held in self.held.values():
            assert (await self.registration(held.place, 32, 1)).success
        await self.client.disconnect()

    async def leave(self) -> None:
        """As C++ shuts down: the same requests, of which it waits for none, and its connections end behind them."""
        await self.client.tell(self.master, 6, master.CloseRequestC2M(clientId=self.id, groupName=self.group))
        for held in self.held.values():
            request = self._registration(held.place, 32, 1)
            await self.client.tell(self._address(held.place), 15, request, service=2)
        await self.client.disconnect()

    async def _carry_out(self, event: Any) -> None:
        assert event.rebalanceId > 0
        assert event.opType in CONNECT | DISCONNECT, "neither client ever answers another order"
        done = shared.EventProto(rebalanceId=event.rebalanceId, opType=event.opType, status=2)
        done.subscribeInfo.extend(event.subscribeInfo)
        for text in event.subscribeInfo:
            who, _, where = text.partition("#")
            assert who == f"{self.id}@{self.group}"
            place = Place.parse(where)
            if event.opType in DISCONNECT:
                if self.held.pop(str(place), None) is not None:
                    await self.registration(place, 32, 1)
            elif str(place) not in self.held:
                # C++ means to say only the first time that it starts at the end, and says it each time.
                first = self.kind is CPP or str(place) not in self.registered
                self.registered.add(str(place))
                try:
                    answer = await self.registration(place, 31, 1 if first and not self.from_start else 0)
                except ConnectionError:
                    continue  # reported as done all the same, only that what is held lacks it
                if answer.success:
                    self.held[str(place)] = Held(place)
                elif self.kind.stops_at_refusal:
                    done.status = 0
                    break
        if done.status == 2 and event.opType in CONNECT:
            self.first_order = False
        self.finished.append(done)

    async def registration(self, place: Place, operation: int, status: int) -> Any:
        request = self._registration(place, operation, status)
        return await self.client.ask(self._address(place), 15, request, service=2)

    def _registration(self, place: Place, operation: int, status: int) -> broker.RegisterRequestC2B:
        request = broker.RegisterRequestC2B(
            opType=operation, clientId=self.id, groupName=self.group, topicName=place.topic,
            partitionId=place.partition, readStatus=status, authInfo=self._auth(),
        )  # fmt: skip
        if operation == 31:
            request.qryPriorityId = NO_RULES
            request.filterCondStr.extend(self.filters.get(place.topic, ()))
            if self.bound is not None and self.first_order and self.not_allocated and place.key in self.bound.offsets:
                request.currOffset = self.bound.offsets[place.key]
        return request

    def _next_master(self) -> None:
        self.next_masters.append(self.master)
        self.master = self.next_masters.pop(0)

    def _told(self, answer: Any) -> None:
        if answer.HasField("authorizedInfo"):
            self.token = answer.authorizedInfo.visitAuthorizedToken
        self.not_allocated = self.not_allocated and answer.notAllocated
        self.default_rules.told(answer.defFlowCheckId, answer.defFlowControlInfo)
        self.group_rules.told(answer.groupFlowCheckId, answer.groupFlowControlInfo)

    def _bodies(self, place: Place, message: Any) -> list[bytes]:
        data = bytes(message.payLoadData)
        assert zlib.crc32(data) & 0x7FFFFFFF == message.checkSum, "a message that is dropped without a word"
        if not message.flag & 1:
            return [data]
        (size,) = struct.unpack(">I", data[:4])
        pairs = dict(pair.split("=", 1) for pair in data[4 : 4 + size].decode().split(","))
        wanted = self.filters.get(place.topic)
        # A message without a type passes a filter, in both.
        if wanted and "$msgType$" in pairs and pairs["$msgType$"] not in wanted:
            return []
        return [data[4 + size :]]

    def _auth(self) -> shared.AuthorizedInfo:
        return shared.AuthorizedInfo(visitAuthorizedToken=self.token, authAuthorizedToken="" if self.signs else None)

    def _subscribed(self) -> list[str]:
        return [f"{self.id}@{self.group}#{held.place}" for held in self.held.values()]

    @staticmethod
    def _address(place: Place) -> str:
        return f"{place.host}:{place.port}"
