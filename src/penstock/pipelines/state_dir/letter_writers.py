"""Assignment of dead letters to sinks: which of several sinks behind a step writes those of the step.

All these sinks find the same dead rows, and one of them writes the letters: the first one in the file
(``spec.pipeline.plan``). If its target does not answer, it stays behind, and another sink, which is ahead, takes over:
otherwise letters would be missing until the target answers again.

``<state>/letter_writers.json`` has for each step the sinks that have written its letters, each with the offsets from
which it does. A letter is written by the last of them that starts at or before its record: by one sink, whatever fails,
and also if a batch is repeated. A sink therefore takes over from offsets that neither it nor the one before has reached
or begun a batch with, and only while the one before has no running query, which would not know of it. The file is
replaced durably before a query of the new one starts: queries that are built, but never started, change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import StorageError
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.layout import is_newer, read_json, update_json
from penstock.spark.files.object_storage import StoragePath
from penstock.spark.tube.offsets import MARK

__all__ = [
    "LetterRange",
    "LetterWriter",
    "LetterWriters",
    "SinkEnds",
    "assigned",
    "furthest",
    "letter_sinks",
    "ranges_of",
]


class LetterWriter(NamedTuple):
    """A sink, and the offsets from which it writes the letters of a step; a partition that they lack: from its
    start."""

    sink: str
    start: Offsets


class LetterRange(NamedTuple):
    """Records whose letters a sink writes: in ``[start, end)`` of each partition; None: without an end."""

    start: Offsets
    end: Offsets | None


def ranges_of(writers: Sequence[LetterWriter], sink: str) -> tuple[LetterRange, ...]:
    """Return the ranges of ``sink`` in the list of a step."""
    ends = [*(writer.start for writer in writers[1:]), None]
    return tuple(
        LetterRange(writer.start, end) for writer, end in zip(writers, ends, strict=True) if writer.sink == sink
    )


def furthest(offsets: Iterable[Offsets]) -> Offsets:
    """Return the last one of ``offsets`` for each partition, without marks."""
    found: Offsets = {}
    for each in offsets:
        for stream, named in each.items():
            places = found.setdefault(stream, {})
            for name, offset in named.items():
                if not name.endswith(MARK):
                    places[name] = max(offset, places.get(name, offset))
    return found


def _is_reached(start: Offsets, end: Offsets) -> bool:
    """Return True if ``end`` is at or after ``start`` in all partitions."""
    return all(
        offset <= end.get(stream, {}).get(name, -1) for stream, at in start.items() for name, offset in at.items()
    )


class SinkEnds(NamedTuple):
    """Ends of the last batch that a sink has finished, or its start, and of the one that it has begun, if any."""

    finished: Offsets
    begun: Offsets | None = None


def assigned(
    writers: Sequence[LetterWriter],
    sinks: Sequence[str],
    ends: Mapping[str, SinkEnds],
    groups: Sequence[Sequence[str]],
    stopped: Collection[str] = (),
) -> list[LetterWriter]:
    """Return the list ``writers`` of a step after a sink has taken over, if the last one in the list is behind it.

    ``sinks`` have the step, the first one in the file first; ``ends`` are theirs, and those of the last one in the
    list, if it was removed from the file and its checkpoint exists. ``groups`` are the sinks of the queries that are
    built now, and ``stopped`` others that have no query.
    """
    found = list(writers)
    last = found[-1]
    if last.sink not in sinks:
        # What it has not written is lost with it: the others have passed these records.
        last = LetterWriter(sinks[0], _start(last, ends.get(last.sink), ends[sinks[0]]))
        found.append(last)
    own = next((group for group in groups if last.sink in group), ())
    if own or last.sink in stopped:
        behind = furthest([ends[last.sink].finished])
        for name in (name for group in groups if group is not own for name in group if name in sinks):
            end = furthest([ends[name].finished])
            if end != behind and _is_reached(behind, end):
                found.append(LetterWriter(name, _start(last, ends[last.sink], ends[name])))
                break
    while len(found) > 1 and all(_is_reached(found[1].start, ends[name].finished) for name in sinks):
        del found[0]
    # No sink will write letters before the start of the first one.
    return [found[0]._replace(start={}), *found[1:]]


def letter_sinks(path: StoragePath) -> dict[str, str]:
    """Return the sink that writes the dead letters of each shared step, as the last run has stored it in ``path``.

    Raises:
        StorageError: it cannot be read.
    """
    return LetterWriters(path, "").sinks


def _start(last: LetterWriter, *ends: SinkEnds | None) -> Offsets:
    """Return the first offsets after the start of ``last`` that no sink with ``ends`` has reached, or begun a batch
    with."""
    known = [each for end in ends if end is not None for each in (end.finished, end.begun) if each is not None]
    return furthest([last.start, *known])


class LetterWriters:
    """The file ``path``, written by the run with the fencing token ``token``.

    Raises:
        StorageError: it cannot be read.
    """

    def __init__(self, path: StoragePath, token: str) -> None:
        self._path = path
        self._token = token
        self._by_step: dict[str, list[LetterWriter]] = {}
        try:
            found = read_json(path)
            self._by_step = {step: [LetterWriter(**each) for each in made] for step, made in found["steps"].items()}
        except FileNotFoundError:
            pass
        except (KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{path} has no sinks that write dead letters: {error!r}", path=str(path)) from error
        self._stored = self._by_step

    @property
    def sinks(self) -> dict[str, str]:
        """The sink that writes the dead letters of each step at present."""
        return {step: writers[-1].sink for step, writers in self._by_step.items()}

    def of(self, step: str, first: str) -> list[LetterWriter]:
        """Return the list of ``step``; without one, the sink ``first`` writes its letters from the start."""
        return self._by_step.get(step) or [LetterWriter(first, {})]

    def assign(self, changed: Mapping[str, Sequence[LetterWriter]]) -> None:
        """Replace the lists of some steps, for queries that were built; see :meth:`store`."""
        self._by_step = self._by_step | {step: list(writers) for step, writers in changed.items()}

    def store(self) -> None:
        """Store the lists durably; nothing is written if they are the same.

        Raises:
            StorageError: a later run has stored them: this run was paused and has lost its lease.
        """
        if self._by_step == self._stored:
            return
        data = {step: [each._asdict() for each in writers] for step, writers in self._by_step.items()}

        def replaced(before: dict[str, Any] | None) -> dict[str, Any]:
            if before is not None and is_newer(before.get("fencing_token"), self._token):
                raise StorageError(
                    "another run decides which sink writes dead letters",
                    path=str(self._path),
                    why=f"it has the fencing token {before['fencing_token']}: this run ({self._token}) has lost its "
                    "lease",
                    hint="check which run holds the lease (penstock pipeline status)",
                )
            return {"fencing_token": self._token, "steps": data}

        update_json(self._path, replaced)
        self._stored = self._by_step
