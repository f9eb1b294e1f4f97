"""Each dead letter of a step that several sinks have is written by one of them, whatever fails."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.pipelines.state_dir.checkpoint import Offsets
from penstock.pipelines.state_dir.layout import write_text
from penstock.pipelines.state_dir.letter_writers import (
    LetterRange,
    LetterWriter,
    LetterWriters,
    SinkEnds,
    assigned,
    ranges_of,
)

SINKS = ("a", "b", "c")
TOKENS = [f"{n:015}:00001:node" for n in (1, 2, 3)]


def at(*offsets: int) -> Offsets:
    return {"t": {f"1:{n}": offset for n, offset in enumerate(offsets)}}


def first(sink: str = "a") -> list[LetterWriter]:
    return [LetterWriter(sink, {})]


def test_a_sink_that_is_ahead_takes_over_after_everything_that_was_begun() -> None:
    ends = {"a": SinkEnds(at(5), at(9)), "b": SinkEnds(at(9)), "c": SinkEnds(at(9), at(12))}
    assert assigned(first(), SINKS, ends, [("b", "c")], stopped=["a"]) == [*first(), LetterWriter("b", at(9))]
    assert assigned(first(), SINKS, ends, [("c",)], stopped=["a"]) == [*first(), LetterWriter("c", at(12))]
    # All queries are built, for example at the start of a run.
    assert assigned(first(), SINKS, ends, [("a",), ("b",), ("c",)]) == [*first(), LetterWriter("b", at(9))]


def test_a_sink_that_had_not_reached_its_own_start_is_followed_from_there() -> None:
    writers = [*first(), LetterWriter("b", at(9))]
    ends = {"a": SinkEnds(at(3), at(9)), "b": SinkEnds(at(5)), "c": SinkEnds(at(7))}
    assert assigned(writers, SINKS, ends, [("c",)], stopped=["b"]) == [*writers, LetterWriter("c", at(9))]


def test_nothing_changes_while_the_first_sink_has_a_query_or_no_other_is_ahead() -> None:
    ends = {"a": SinkEnds(at(5), at(9)), "b": SinkEnds(at(9)), "c": SinkEnds(at(5))}
    assert assigned(first(), SINKS, ends, [("b", "c")]) == first()
    assert assigned(first(), SINKS, ends, [("a", "b", "c")]) == first()
    assert assigned(first(), SINKS, ends, [("c",)], stopped=["a"]) == first()
    # Ahead in one partition only.
    ends = {"a": SinkEnds(at(5, 5)), "b": SinkEnds(at(9, 4))}
    assert assigned(first(), "ab", ends, [("b",)], stopped=["a"]) == first()


def test_the_list_is_short_again_when_all_sinks_have_passed_the_start() -> None:
    writers = [*first(), LetterWriter("b", at(9))]
    ends = {"a": SinkEnds(at(8)), "b": SinkEnds(at(12)), "c": SinkEnds(at(12))}
    assert assigned(writers, SINKS, ends, [("a",)]) == writers
    assert assigned(writers, SINKS, ends | {"a": SinkEnds(at(9))}, [("a", "b", "c")]) == first("b")
    # A new sink, which reads everything, writes no letters again.
    assert assigned(first("b"), ("new", "b"), {"new": SinkEnds({}), "b": SinkEnds(at(9))}, [("new",)]) == first("b")


def test_a_sink_that_was_removed_from_the_file_is_replaced() -> None:
    ends = {"b": SinkEnds(at(5), at(8)), "c": SinkEnds(at(5))}
    removed = assigned(first(), "bc", ends | {"a": SinkEnds(at(11))}, [("b", "c")])
    assert removed == [*first(), LetterWriter("b", at(11))]
    # Without a checkpoint of it.
    assert assigned(first(), "bc", ends, [("b", "c")]) == [*first(), LetterWriter("b", at(8))]


def test_marks_of_brokers_are_no_offsets() -> None:
    marked = {"t": {"1:0": 5, "1:0@data": 700}}
    ends = {"a": SinkEnds(marked), "b": SinkEnds({"t": {"1:0": 9, "1:0@data": 100}})}
    assert assigned(first(), "ab", ends, [("b",)], stopped=["a"]) == [*first(), LetterWriter("b", at(9))]


def test_the_file_keeps_the_lists_and_refuses_a_run_without_its_lease(tmp_path: Path) -> None:
    path = tmp_path / "letter_writers.json"
    old, new = LetterWriters(path, TOKENS[0]), LetterWriters(path, TOKENS[1])
    assert old.of("parsed", "a") == first()
    taken = [*first(), LetterWriter("b", at(9))]
    new.assign({"parsed": taken})
    assert not path.exists()
    new.store()
    assert LetterWriters(path, TOKENS[2]).of("parsed", "a") == taken
    old.assign({"parsed": [*first(), LetterWriter("c", at(7))]})
    with pytest.raises(StorageError, match="another run decides which sink writes dead letters") as caught:
        old.store()
    assert TOKENS[1] in str(caught.value.why)
    assert LetterWriters(path, TOKENS[2]).of("parsed", "a") == taken


@pytest.mark.parametrize("text", ["{}", '{"steps": {"parsed": [{"name": "a"}]}}', '{"steps": []}'])
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str) -> None:
    write_text(tmp_path / "letter_writers.json", text)
    with pytest.raises(StorageError, match="has no sinks that write dead letters"):
        LetterWriters(tmp_path / "letter_writers.json", TOKENS[0])


@dataclass
class Sink:
    finished: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] | None = None
    batch: int = 0


@dataclass
class Query:
    sinks: tuple[str, ...]
    ranges: dict[str, tuple[LetterRange, ...]]


def offsets(places: dict[int, int]) -> Offsets:
    return {"t": {f"1:{n}": offset for n, offset in places.items()}} if places else {}


def is_before(at: Offsets, partition: int, offset: int) -> bool:
    return offset < at.get("t", {}).get(f"1:{partition}", -1)


class Run:
    """Sinks of one query, each with its own batches, in a log of two partitions; all records are dead."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.path = path
        self.log = {0: 5}
        self.sinks = {name: Sink() for name in SINKS}
        self.letters: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self.starts = 0
        self.restart()

    def restart(self) -> None:
        """As after a kill -9."""
        self.starts += 1
        self.writers = LetterWriters(self.path, f"{self.starts:015}:00001:node")
        self.queries: list[Query] = []
        self.build(list(SINKS))

    def build(self, names: Sequence[str], stopped: Sequence[str] = ()) -> None:
        groups: dict[str, list[str]] = {}
        for name in names:
            sink = self.sinks[name]
            groups.setdefault(repr((sink.finished, sink.begun)), []).append(name)
        ends = {
            name: SinkEnds(offsets(sink.finished), None if sink.begun is None else offsets(sink.begun))
            for name, sink in self.sinks.items()
        }
        found = assigned(self.writers.of("parsed", "a"), SINKS, ends, list(groups.values()), stopped)
        self.writers.assign({"parsed": found})
        self.writers.store()
        if self.random.random() < 0.02:
            self.restart()
            return
        self.queries += [
            Query(tuple(group), {name: ranges_of(found, name) for name in group}) for group in groups.values()
        ]

    def batch(self, query: Query, failing: float) -> None:
        sinks = [self.sinks[name] for name in query.sinks]
        start = dict(sinks[0].finished)
        planned = {
            n: self.random.randint(start.get(n, 0), size) for n, size in self.log.items() if self.random.random() < 0.9
        }
        begun = sinks[0].begun
        end = start | planned if begun is None else begun
        for sink in sinks:
            sink.begun = end
            if self.random.random() < failing / 10:
                self.restart()
                return
        records = [(n, offset) for n, last in end.items() for offset in range(start.get(n, 0), last)]
        unfinished = []
        for name, sink in zip(query.sinks, sinks, strict=True):
            is_down = self.random.random() < failing * (3 if name == "a" else 1)
            # A target that does not answer, or the ledger after the letters.
            if not is_down or self.random.random() < 0.3:
                own = [at for at in records if any(self.is_in(each, *at) for each in query.ranges[name])]
                self.letters.setdefault((name, sink.batch), own)
            if is_down:
                unfinished.append(name)
                continue
            if self.random.random() < failing / 10:
                self.restart()
                return
            sink.finished, sink.begun, sink.batch = end, None, sink.batch + 1
        if unfinished:
            self.queries.remove(query)
            starts = self.starts
            others = [name for name in query.sinks if name not in unfinished]
            if others:
                self.build(others, unfinished)
            if self.starts == starts:
                self.build(unfinished)

    @staticmethod
    def is_in(given: LetterRange, partition: int, offset: int) -> bool:
        return not is_before(given.start, partition, offset) and (
            given.end is None or is_before(given.end, partition, offset)
        )

    def step(self, failing: float) -> None:
        for n in self.log:
            self.log[n] += self.random.randint(0, 3)
        if self.random.random() < 0.1:
            self.log.setdefault(1, 2)
        self.batch(self.random.choice(self.queries), failing)
        at_rest = [query for query in self.queries if self.sinks[query.sinks[0]].begun is None]
        for one in at_rest:
            for other in at_rest:
                if one is not other and self.sinks[one.sinks[0]].finished == self.sinks[other.sinks[0]].finished:
                    self.queries = [query for query in self.queries if query not in (one, other)]
                    self.build([*one.sinks, *other.sinks])
                    return


@pytest.mark.parametrize("seed", range(5))
def test_each_letter_is_written_once_whatever_fails(tmp_path: Path, seed: int) -> None:
    changes = 0
    for n in range(40):
        run = Run(tmp_path / f"{n}.json", 100 * seed + n)
        for _ in range(60):
            run.step(failing=0.2)
            changes += len(run.writers.of("parsed", "a")) > 1
        run.restart()
        while any(sink.finished != run.log for sink in run.sinks.values()):
            for query in list(run.queries):
                if query in run.queries:
                    run.batch(query, failing=0.0)
        written = Counter(at for own in run.letters.values() for at in own)
        assert written == Counter((n, offset) for n, size in run.log.items() for offset in range(size)), n
    assert changes > 100
