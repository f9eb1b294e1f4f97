"""Births of Sparkplug edge nodes and devices that a sink has read: what aliases in later messages mean.

<checkpoint>/births/<partition of the log>/<last offset>-<digest>.json     births and deaths of a part of a batch
<checkpoint>/births/<partition of the log>/<offset>-<digest>.snapshot.json births that apply at an offset

A birth is a fact about the log: it has an offset, and a DATA message is read with the last birth before its own offset.
So a repeated batch finds the births that it found before, whatever a later batch has written, and writing a birth again
changes nothing. No batch number is needed. The files are in the checkpoint of the sink, because they are complete for
exactly the offsets that the checkpoint says the sink has read.

Workers write the files while they read the partition, before the batch is finished. One task reads a partition at a
time, in order.

A snapshot replaces the files before its offset, including those that a worker has not deleted because it ended:
otherwise a birth would apply again if the file with its death was deleted first.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from penstock.errors import StorageError
from penstock.pipelines.state_dir.layout import create_text, listed, sync_names
from penstock.spark.files.object_storage import StoragePath, absolute_path

__all__ = ["Birth", "BirthLog", "MetricDefinition", "birth_directory"]

_DIGITS = 20
_FILE = re.compile(rf"\d{{{_DIGITS}}}-[0-9a-f]{{16}}(\.snapshot)?\.json")
_SNAPSHOT = ".snapshot"
_MOST_FILES = 64
"""Files of a partition that may be replaced by a snapshot; more are."""


def birth_directory(checkpoint: StoragePath) -> StoragePath:
    """Return the directory of the births that the sink with ``checkpoint`` has read.

    It is absolute, because workers may have another working directory.
    """
    found = checkpoint / "births"
    return absolute_path(found)


class MetricDefinition(NamedTuple):
    """A metric of a birth; ``datatype`` is a number of Sparkplug."""

    name: str
    alias: int | None
    datatype: int


@dataclass(frozen=True, slots=True)
class Birth:
    """A birth at ``offset`` of an edge node, or of one of its devices; without ``metrics``, its death.

    ``timestamp_ms``: that of the message. ``bd_seq``: number of the session of the edge node, in its own births.
    """

    offset: int
    group: str
    edge_node: str
    device: str | None
    timestamp_ms: int | None
    bd_seq: int | None
    metrics: tuple[MetricDefinition, ...] | None
    by_name: dict[str, MetricDefinition] = field(init=False, compare=False, repr=False)
    by_alias: dict[int, MetricDefinition] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Index the metrics."""
        metrics = self.metrics or ()
        object.__setattr__(self, "by_name", {each.name: each for each in metrics})
        object.__setattr__(self, "by_alias", {each.alias: each for each in metrics if each.alias is not None})

    @property
    def is_death(self) -> bool:
        """True for a death."""
        return self.metrics is None

    def as_data(self) -> list[Any]:
        """Return what a file has of it."""
        return [self.offset, self.group, self.edge_node, self.device, self.timestamp_ms, self.bd_seq, self.metrics]

    @classmethod
    def from_data(cls, data: list[Any]) -> Birth:
        """Return the birth that :meth:`as_data` wrote."""
        offset, group, edge_node, device, timestamp_ms, bd_seq, metrics = data
        definitions = None if metrics is None else tuple(MetricDefinition(*each) for each in metrics)
        return cls(offset, group, edge_node, device, timestamp_ms, bd_seq, definitions)


_Devices = dict[str | None, list[Birth]]
"""Births of an edge node (None) and of its devices, each in the order of offsets."""


class BirthLog:
    """The births of one partition of the log, in ``directories``: those of the sinks of a query.

    Sinks of one query are at the same offset of the log, so each may use what another has read. All of them store what
    is read now, since one may have a query of its own later.
    """

    def __init__(self, directories: Sequence[StoragePath]) -> None:
        self._directories = {directory: _Directory(directory) for directory in directories}
        self._nodes: dict[tuple[str, str], _Devices] = {}

    @classmethod
    def of_partition(cls, births: Iterable[StoragePath], partition: str) -> BirthLog:
        """Return the log of ``partition``, any text that names it, in the directories ``births``."""
        name = quote(partition, safe="").replace(".", "%2E")
        return cls([directory / name for directory in births])

    def refresh(self) -> None:
        """Read the files that another process has written since.

        Raises:
            StorageError: one is not readable.
        """
        for directory in self._directories.values():
            try:
                for birth in directory.new_births():
                    self.add(birth)
            except FileNotFoundError:
                # A snapshot has replaced files, or the checkpoint was deleted.
                self._forget()
                self.refresh()
                return

    def _forget(self) -> None:
        self._nodes = {}
        for directory in self._directories.values():
            directory.forget()

    def add(self, birth: Birth) -> None:
        """Add ``birth`` in memory; :meth:`write` stores it."""
        found = self._nodes.setdefault((birth.group, birth.edge_node), {}).setdefault(birth.device, [])
        place = bisect_left(found, birth.offset, key=lambda each: each.offset)
        if place == len(found) or found[place].offset != birth.offset:
            found.insert(place, birth)

    def last(self, group: str, edge_node: str, device: str | None, offset: int) -> Birth | None:
        """Return the birth that applies before ``offset``; None after a death, and if there is none.

        A birth or death of an edge node ends the births of its devices.
        """
        devices = self._nodes.get((group, edge_node), {})
        found = _before(devices.get(device, ()), offset)
        if found is None or found.is_death:
            return None
        node = found if device is None else _before(devices.get(None, ()), offset)
        return found if node is None or node.offset <= found.offset else None

    def alive(self, group: str, edge_node: str, offset: int) -> list[Birth]:
        """Return the births before ``offset`` of an edge node and of those of its devices that have not died."""
        devices = self._nodes.get((group, edge_node), {})
        found = [self.last(group, edge_node, device, offset) for device in devices]
        return sorted((each for each in found if each is not None), key=lambda each: each.device or "")

    def write(self, births: Iterable[Birth], batch_start: int) -> None:
        """Store ``births`` durably. Messages before ``batch_start``, the start of this batch, are not read again.

        Raises:
            StorageError: they cannot be written.
        """
        in_order = sorted(births, key=lambda each: each.offset)
        has_many = False
        for directory in self._directories.values():
            directory.write([birth for birth in in_order if birth.offset not in directory.offsets])
            has_many = has_many or len(directory.before(batch_start)) >= _MOST_FILES
        if has_many:
            self._compact(batch_start)

    def _compact(self, offset: int) -> None:
        """Replace the files with births before ``offset`` only by one with those that apply there."""
        applying = [birth for group, edge_node in self._nodes for birth in self.alive(group, edge_node, offset)]
        for directory in self._directories.values():
            directory.replace(offset, sorted(applying, key=lambda each: each.offset))
        # So that memory has no more than the files, which are read again at the next refresh.
        self._forget()


class _Directory:
    """The files of one directory; ``offsets`` are those of the births in the files that were read or written.

    ``_replaced``: files that the newest snapshot replaces, which are to be deleted.
    """

    def __init__(self, path: StoragePath) -> None:
        self._path = path
        self._files: set[str] = set()
        self._replaced: set[str] = set()
        self.offsets: set[int] = set()

    def forget(self) -> None:
        """Read all files again the next time."""
        self._files, self.offsets = set(), set()

    def new_births(self) -> Iterator[Birth]:
        """Yield the births in files that were not read before, and that no snapshot has replaced.

        Raises:
            FileNotFoundError: a file that was read does not exist any more.
            StorageError: a file is not readable.
        """
        names = {match[0] for match in listed(self._path, _FILE)}
        if not self._files <= names:
            raise FileNotFoundError(str(self._path))
        newest = max((_offset(name) for name in names if _SNAPSHOT in name), default=0)
        self._replaced = {name for name in names if _offset(name) < newest}
        if new := sorted(names - self._replaced - self._files):
            # Also those of a process that was killed: `write` leaves them out.
            sync_names(self._path)
        for name in new:
            births = self._read(name)
            yield from births
            self._files.add(name)
            self.offsets.update(birth.offset for birth in births)

    def _read(self, name: str) -> list[Birth]:
        path = self._path / name
        try:
            return [Birth.from_data(each) for each in json.loads(path.read_bytes())["births"]]
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"births of Sparkplug are not readable: {error}",
                path=str(path),
                hint="restore the file; or run again with a new state directory and new tables",
            ) from error

    def before(self, offset: int) -> list[str]:
        """Return the files with births before ``offset`` only."""
        return [name for name in self._files if _offset(name) < offset]

    def write(self, births: list[Birth]) -> None:
        """Write a file with ``births``, which are in order; none without births."""
        if births:
            self._create(births[-1].offset, births, "")

    def replace(self, offset: int, births: list[Birth]) -> None:
        """Write a file with ``births``, those that apply at ``offset``, and delete the files before it."""
        old = self._replaced.union(self.before(offset))
        self._create(offset, births, _SNAPSHOT)
        for name in sorted(old):
            (self._path / name).unlink(missing_ok=True)

    def _create(self, offset: int, births: list[Birth], kind: str) -> None:
        text = json.dumps({"births": [birth.as_data() for birth in births]}, separators=(",", ":")) + "\n"
        name = f"{offset:0{_DIGITS}d}-{hashlib.sha256(text.encode()).hexdigest()[:16]}{kind}.json"
        create_text(self._path / name, text)
        self._files.add(name)
        self.offsets.update(birth.offset for birth in births)


def _offset(name: str) -> int:
    """Return the offset in the name of a file."""
    return int(name[:_DIGITS])


def _before(births: Sequence[Birth], offset: int) -> Birth | None:
    """Return the last of ``births``, which are in order, before ``offset``."""
    place = bisect_left(births, offset, key=lambda each: each.offset)
    return births[place - 1] if place else None
