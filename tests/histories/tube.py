"""Record what producers and consumers of TubeMQ send and read, and check it by the published delivery rules.

The format is in README.md. The rules need no model of the broker:

* A read returns a message that was sent before, in the partition to which it was sent.
* An offset of a partition holds one message for ever, over restarts too; an acknowledged message is at the offset that
  its producer was told.
* Acknowledged is a subset of read: every reader reads every acknowledged message up to its end.
* Each producer's messages are in the order in which it sent them, and each is stored once, unless its producer repeats
  messages whose answer did not come.
* A reader gets the messages of a partition in the order of offsets. It goes back only when it resumes, to the offset
  that it has confirmed, and never over a message. A reader that stores its offset with its results gets none twice.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.history import Violation

__all__ = ["Sent", "TubeHistory", "TubeRecorder", "check"]

Place = tuple[str, int]
"""Partition and offset."""
Sent = tuple[str, int]
"""Producer, and the number of its message."""


class _Events:
    """The events of the clients of one test, in the order in which they happen."""

    def apply(self, event: dict[str, Any]) -> None:
        raise NotImplementedError

    def send(self, producer: str, number: int, partition: int | str | None = None, *, repeats: bool = False) -> None:
        """A message is about to be sent; ``repeats``: the producer may send it again, and it may be stored twice."""
        self._note("send", producer=producer, number=number, partition=partition, repeats=repeats)

    def acknowledge(
        self, producer: str, number: int, partition: int | str | None = None, offset: int | None = None
    ) -> None:
        """A message was acknowledged; without an offset if the producer did not report it."""
        self._note("acknowledge", producer=producer, number=number, partition=partition, offset=offset)

    def read(self, reader: str, partition: int | str, offset: int, producer: str, number: int) -> None:
        """A message was read."""
        self._note("read", reader=reader, partition=partition, offset=offset, producer=producer, number=number)

    def confirm(self, reader: str, partition: int | str, offset: int | None = None, *, asked: bool = False) -> None:
        """A reader has confirmed a partition up to ``offset``, or (``asked``) is about to; None: all that it has read.

        The offset is needed if other members may continue before the answer: what they read was not confirmed.
        """
        self._note("confirm", reader=reader, partition=partition, offset=offset, asked=asked)

    def resume(self, reader: str, partition: int | str | None = None) -> None:
        """A reader starts again, in all partitions or one: unconfirmed messages come again."""
        self._note("resume", reader=reader, partition=partition)

    def _note(self, event: str, **fields: Any) -> None:
        present = {name: value for name, value in fields.items() if value is not None and value is not False}
        self.apply({"event": event, **present})


class TubeRecorder(_Events):
    """Writes a line for each event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def apply(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")

    def close(self) -> None:
        """Close the file; the history can be checked then."""
        self._file.close()


@dataclass
class _Reading:
    """What a reader has read of a partition. ``last``: the offset of its last message, -1: none since it resumed."""

    offsets: set[int] = field(default_factory=set)
    last: int = -1
    confirmed: int = -1
    asked: list[int] = field(default_factory=list)
    """Offsets whose confirmation was sent, in that order, and may have been stored or not."""
    resumed: bool = False
    steps: list[tuple[set[int], int]] = field(default_factory=list)
    """Offsets of messages after which one may be read, and the offset of the one that was."""


class TubeHistory(_Events):
    """Checks events while they happen, and with `check_end` and `check_complete`."""

    def __init__(self) -> None:
        self.sent: dict[Sent, dict[str, Any]] = {}
        self.acknowledged: set[Sent] = set()
        self.stored: dict[Place, Sent] = {}
        self.readings: defaultdict[str, defaultdict[str, _Reading]] = defaultdict(lambda: defaultdict(_Reading))
        self.reads = 0

    def apply(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        partition = str(event["partition"]) if "partition" in event else None
        if kind in {"send", "acknowledge", "read"}:
            message = event["producer"], event["number"]
        if kind == "send":
            self.sent[message] = event
        elif kind == "acknowledge":
            self._require_sent(message, partition)
            self.acknowledged.add(message)
            if partition is not None and "offset" in event:
                self._store((partition, event["offset"]), message)
        elif kind == "read":
            assert partition is not None
            self._require_sent(message, partition)
            self._store((partition, event["offset"]), message)
            self._read(event["reader"], partition, event["offset"])
        elif kind == "confirm":
            assert partition is not None
            reading = self.readings[event["reader"]][partition]
            offset = event.get("offset", reading.last)
            if event.get("asked"):
                reading.asked.append(offset)
            else:
                reading.confirmed = max(reading.confirmed, offset)
                # Those asked later, by a member that has continued meanwhile, are still without an answer.
                answered = reading.asked.index(offset) + 1 if offset in reading.asked else len(reading.asked)
                del reading.asked[:answered]
        elif kind == "resume":
            partitions = self.readings[event["reader"]]
            for reading in list(partitions.values()) if partition is None else [partitions[partition]]:
                reading.last, reading.resumed = -1, True
        else:
            raise Violation(f"event {kind!r} is not known")

    def _require_sent(self, message: Sent, partition: str | None) -> None:
        event = self.sent.get(message)
        if event is None:
            raise Violation(f"{message} was not sent")
        if partition is not None and str(event.get("partition", partition)) != partition:
            raise Violation(f"{message}, sent to partition {event['partition']}, is in partition {partition}")

    def _store(self, place: Place, message: Sent) -> None:
        other = self.stored.setdefault(place, message)
        if other != message:
            raise Violation(f"partition {place[0]}, offset {place[1]} had {other}, and has {message}")

    def _read(self, reader: str, partition: str, offset: int) -> None:
        self.reads += 1
        reading = self.readings[reader][partition]
        before = max(reading.last, reading.confirmed)
        if offset <= before:
            raise Violation(f"{reader} read offset {offset} of partition {partition} after offset {before}")
        if not reading.resumed and offset in reading.offsets:
            raise Violation(f"{reader} read offset {offset} of partition {partition} twice")
        may_follow = {asked for asked in reading.asked if before < asked < offset} if reading.last < 0 else set()
        reading.steps.append(({before, *may_follow}, offset))
        reading.offsets.add(offset)
        reading.last = offset

    def check_end(self) -> None:
        by_partition: defaultdict[str, list[int]] = defaultdict(list)
        for partition, offset in self.stored:
            by_partition[partition].append(offset)
        times: defaultdict[Sent, int] = defaultdict(int)
        for partition, offsets in by_partition.items():
            offsets.sort()
            self._check_order(partition, offsets, times)
            for reader, partitions in self.readings.items():
                for before, offset in partitions[partition].steps:
                    following = offsets[bisect_right(offsets, max(before))]
                    if following < offset:
                        raise Violation(
                            f"{reader} read offset {offset} of partition {partition} after {max(before)}, without"
                            f" offset {following}: {self.stored[partition, following]}"
                        )
        for message, count in times.items():
            if count > 1 and not self.sent[message].get("repeats"):
                raise Violation(f"{message} is stored {count} times")

    def _check_order(self, partition: str, offsets: list[int], times: defaultdict[Sent, int]) -> None:
        last: dict[str, int] = {}
        for offset in offsets:
            producer, number = message = self.stored[partition, offset]
            times[message] += 1
            if self.sent[message].get("repeats"):
                continue
            if number < last.get(producer, number):
                raise Violation(f"{message} is in partition {partition} after {(producer, last[producer])}")
            last[producer] = number

    def check_complete(self, readers: list[str]) -> None:
        for reader in readers:
            read = {
                self.stored[partition, offset]
                for partition, reading in self.readings[reader].items()
                for offset in reading.offsets
            }
            missing = self.acknowledged - read
            if missing:
                raise Violation(f"{reader} never read {min(missing)}, which was acknowledged")


def check(path: Path, *complete: str) -> str:
    """Check a history; one line about it. The readers ``complete`` have read everything.

    Raises:
        Violation: a rule was broken.
    """
    history = TubeHistory()
    for line in path.read_text(encoding="utf-8").splitlines():
        history.apply(json.loads(line))
    history.check_end()
    history.check_complete(list(complete))
    return f"ok sent={len(history.sent)} acknowledged={len(history.acknowledged)} read={history.reads}"
