"""What the batches of as-of joins know, with a topic in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DataLossError, StorageError
from penstock.pipelines.sources import changes
from penstock.pipelines.sources.changes import AsOfJoins
from penstock.pipelines.spec import loader
from penstock.pipelines.spec.pipeline import plan
from penstock.pipelines.spec.steps import Enrich
from penstock.pipelines.state_dir import layout
from penstock.pipelines.state_dir.changes import KNOWN_CHANGES, Change, ChangeFiles, history_of
from penstock.pipelines.state_dir.checkpoint import Checkpoint
from penstock.spark.statestore.rows import ChangeAt
from penstock.spark.tube.offsets import Bounds, Epochs, PartitionOffsets, Slice, TopicPartition
from penstock.spark.tube.tube_client import TubeClient

FILE = """\
name: p
source: {topics: [t], master: "h:1"}
steps:
  - name: parsed
    parse: {schema: "line STRING, at TIMESTAMP"}
  - name: made
    enrich: {key: "recipe/{line}", as: recipe, schema: id INT, as_of: {time: at, topic: changes}}
  - name: shift
    enrich: {key: "shift/{line}", as: shift, schema: id INT, as_of: {time: at, topic: changes}}
sinks: [{name: rows, console: {}}, {name: others, console: {}}]
"""
SIZE = 28


class Topic:
    """A topic of one partition, in the place of its client."""

    def __init__(self) -> None:
        self.oldest = 0
        self.keys: list[bytes] = []
        self.epoch: int | None = 7

    def __enter__(self) -> Topic:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def partitions(self, topics: Sequence[str]) -> list[TopicPartition]:
        return [TopicPartition(topic, 1, 0) for topic in topics]

    def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        return dict.fromkeys(partitions, Bounds(self.oldest, SIZE * len(self.keys), epoch=self.epoch))

    def replaced(
        self, offsets: PartitionOffsets, epochs: Epochs, bounds: dict[TopicPartition, Bounds]
    ) -> PartitionOffsets:
        return {p: 0 for p, epoch in epochs.items() if epoch != bounds[p].epoch and offsets[p] > 0}

    def read(self, piece: Slice, *, epoch: int | None) -> Iterator[ChangeAt]:
        assert epoch == self.epoch
        for number in range(piece.start // SIZE, piece.end // SIZE):
            yield ChangeAt(SIZE * number, self.keys[number], number, b"%d" % number, None)


class Jobs:
    """Spark's session and context: the property of the last job."""

    @property
    def sparkContext(self) -> Jobs:  # noqa: N802 - a name of Spark
        return self

    def setLocalProperty(self, name: str, value: str) -> None:  # noqa: N802 - a name of Spark
        assert name == KNOWN_CHANGES
        self.known = {key: found["ends"]["1:0"] for key, found in json.loads(value).items()}


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    made = Topic()

    def matching(_topic: str, found: Iterator[ChangeAt], keys: str) -> Iterator[ChangeAt]:
        return (each for each in found if each.key.startswith(keys.rstrip("*").encode()))

    def stored(_self: AsOfJoins, _join: object) -> Iterator[Change]:
        return iter(())

    monkeypatch.setattr(TubeClient, "from_options", lambda *_, **__: made)
    monkeypatch.setattr(changes, "changes_at", matching)
    monkeypatch.setattr(AsOfJoins, "_stored_keys", stored)
    return made


def joins() -> dict[str, Enrich]:
    return plan(loader.parse(FILE, name="p.yaml"))[0].as_of_joins


def opened(state: Path) -> tuple[AsOfJoins, list[Checkpoint]]:
    """A run's joins, and the checkpoints of its sinks."""
    checkpoints = [Checkpoint(layout.checkpoint(state, name)) for name in ("rows", "others")]
    return AsOfJoins(loader.parse(FILE, name="p.yaml"), state, checkpoints, lambda: 0), checkpoints


def known(state: Path, batches: dict[int, int], steps: Sequence[str] = ("made", "shift")) -> dict[str, int]:
    """What a new run decides, or has decided, for ``batches`` of sinks, by step."""
    as_of, checkpoints = opened(state)
    jobs: Any = Jobs()
    found = {step: join for step, join in joins().items() if step in steps}
    as_of.begin(jobs, found, [(checkpoints[sink], batch) for sink, batch in batches.items()])
    return {step: jobs.known[history_of(step, found[step])] for step in steps}


def test_a_restart_reads_on_if_retention_deleted_changes_of_other_keys_that_were_read(
    topic: Topic, tmp_path: Path
) -> None:
    topic.keys = [b"recipe/a"] * 2
    as_of, _ = opened(tmp_path)
    files = ChangeFiles(layout.changes(tmp_path, history_of("made", joins()["made"])))
    for _ in range(80):
        as_of.newest(joins())
        topic.keys.append(b"other")
        topic.oldest = SIZE * max(0, len(topic.keys) - 20)
    assert len(files.names()) < 15, "ends were stored more often than they are needed"
    # The same run, and one that starts after a pause of a third of what the topic keeps.
    as_of.newest(joins())
    topic.oldest += SIZE * 6
    opened(tmp_path)[0].newest(joins())
    topic.keys += [b"recipe/a"] * 90
    topic.oldest = SIZE * (len(topic.keys) - 80)
    with pytest.raises(DataLossError, match="cannot read the changes of the state store"):
        opened(tmp_path)[0].newest(joins())


@pytest.mark.parametrize("restarts", [False, True])
def test_a_topic_that_is_created_again_is_not_read_from_the_offset_of_the_deleted_one(
    topic: Topic, tmp_path: Path, *, restarts: bool
) -> None:
    """Its changes before this offset would be missing: rows would get values of the deleted topic."""
    topic.keys = [b"recipe/a"] * 2
    as_of, _ = opened(tmp_path)
    as_of.newest(joins())
    topic.keys, topic.epoch = [b"recipe/a"] * 3, 8
    with pytest.raises(DataLossError, match="deleted and created again"):
        (opened(tmp_path)[0] if restarts else as_of).newest(joins())


def test_a_topic_of_a_broker_without_epochs_is_read(topic: Topic, tmp_path: Path) -> None:
    topic.keys, topic.epoch = [b"recipe/a"], None
    opened(tmp_path)[0].newest(joins())
    topic.keys, topic.epoch = [b"recipe/a"] * 2, 8  # the broker is upgraded
    as_of, _ = opened(tmp_path)
    found = as_of.newest(joins())[history_of("made", joins()["made"])]
    assert found["ends"]["1:0"] == SIZE * 2


def test_a_batch_knows_the_same_in_each_run_also_with_a_join_that_the_pipeline_got_later(
    topic: Topic, tmp_path: Path
) -> None:
    topic.keys = [b"recipe/a"]
    assert known(tmp_path, {0: 0}, ["made"]) == {"made": SIZE}
    topic.keys += [b"recipe/a", b"shift/a"]
    # The other sink joins the batch, and knows the same.
    assert known(tmp_path, {1: 5, 0: 0}, ["made"]) == {"made": SIZE}
    assert known(tmp_path, {0: 0}) == {"made": SIZE, "shift": SIZE * 3}
    topic.keys += [b"shift/a"]
    assert known(tmp_path, {0: 0}) == {"made": SIZE, "shift": SIZE * 3}
    assert known(tmp_path, {0: 1}) == {"made": SIZE * 3, "shift": SIZE * 4}


def test_sinks_whose_batches_know_different_changes_are_not_computed_together(topic: Topic, tmp_path: Path) -> None:
    topic.keys = [b"recipe/a"]
    known(tmp_path, {0: 0}, ["made"])
    topic.keys += [b"recipe/a"]
    known(tmp_path, {1: 0}, ["made"])
    with pytest.raises(StorageError, match="with different changes"):
        known(tmp_path, {0: 0, 1: 0}, ["made"])


def test_a_decision_that_a_crash_has_left_there_does_not_keep_changes(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.decide_changes(3, {"made": {"ends": {}, "floor_ms": 3}})
    for batch in (5, 6):
        # 5: the run was killed before it removed the decision for batch 3.
        checkpoint.decide_changes(batch, {"made": {"ends": {}, "floor_ms": batch}})
        if batch == 5:
            (tmp_path / "changes" / "3.json").write_text('{"made": {"ends": {}, "floor_ms": 3}}')
    assert [found["made"]["floor_ms"] for found in checkpoint.repeatable_changes()] == [5, 6]
    # Repeated, it removes it.
    checkpoint.decide_changes(5, {"made": {"ends": {}, "floor_ms": 9}})
    assert not (tmp_path / "changes" / "3.json").exists()
