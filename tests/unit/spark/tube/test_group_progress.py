from __future__ import annotations

import threading

import pytest

from penstock.spark.tube.offsets import TopicPartition
from penstock.spark.tube.source import GroupProgress
from penstock.spark.tube.tube_client import TubeClient
from tests.unit.spark.fake_tube import FakeBroker, FakeTube

A0, A1 = TopicPartition("a", 1, 0), TopicPartition("a", 1, 1)


def group_progress(fake: FakeTube) -> GroupProgress:
    return GroupProgress(lambda: TubeClient("127.0.0.1:8715", 1, servers=fake))


@pytest.fixture
def fake() -> FakeTube:
    return FakeTube(FakeBroker(1, 8123, logs={"a": []}, partitions={"a": 2}))


def test_the_newest_positions_are_shown(fake: FakeTube) -> None:
    progress = group_progress(fake)
    for n in range(50):
        progress.publish(["lake"], {A0: n * 28, A1: 28})
    progress.close()
    assert fake.groups == {("lake", A0): 49 * 28, ("lake", A1): 28}
    assert fake.discoveries == 1


def test_groups_have_offsets_of_their_own(fake: FakeTube) -> None:
    progress = group_progress(fake)
    progress.publish(["lake", "river"], {A0: 28, A1: 0})
    progress.publish(["river"], {A0: 56})
    progress.close()
    assert fake.groups == {("lake", A0): 28, ("lake", A1): 0, ("river", A0): 56, ("river", A1): 0}


def test_a_refusal_is_reported_once_and_does_not_stop_the_query(
    fake: FakeTube, caplog: pytest.LogCaptureFixture
) -> None:
    others = threading.enumerate()
    fake.unwilling = True
    progress = group_progress(fake)
    for n in range(3):
        progress.publish(["lake"], {A0: n * 28, A1: n * 28})
    progress.close()
    assert [record.message for record in caplog.records] == [
        "the offsets of group lake were not published: the group is not welcome; why: it belongs to another one"
    ]
    assert not any(thread.name == "offsets" for thread in threading.enumerate() if thread not in others)


def test_offsets_that_could_not_be_published_are_published_at_the_end(fake: FakeTube) -> None:
    """A group must not lag behind for good, because its broker did not answer after the last batch."""
    attempted = threading.Event()

    class Client(TubeClient):
        def commit_offset(self, partition: TopicPartition, group: str, offset: int) -> None:
            try:
                super().commit_offset(partition, group, offset)
            finally:
                attempted.set()

    fake.unwilling = True
    progress = GroupProgress(lambda: Client("127.0.0.1:8715", 1, servers=fake))
    progress.publish(["lake"], {A0: 28})
    assert attempted.wait(30)
    fake.unwilling = False
    progress.close()
    assert fake.groups == {("lake", A0): 28}
