from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from penstock.errors import ConfigError, DataLossError, UnavailableError
from penstock.spark.tube.offsets import Bounds, Slice, TopicPartition
from penstock.spark.tube.tube_client import BrokerAddress, TubeClient
from tests.unit.spark.fake_tube import FakeBroker, FakeReader, FakeTube

A0, A1 = TopicPartition("a", 1, 0), TopicPartition("a", 1, 1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def broker() -> FakeBroker:
    log = [(record % 2, b"%d" % record) for record in range(20)]
    return FakeBroker(1, 8123, logs={"a": log}, partitions={"a": 2})


@pytest.fixture
def fake(broker: FakeBroker) -> FakeTube:
    return FakeTube(broker)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tube(fake: FakeTube, clock: Clock) -> Iterator[TubeClient]:
    with TubeClient("127.0.0.1:8715", 10_000, servers=fake, clock=clock, sleep=clock.sleep) as tube:
        yield tube


def payloads(tube: TubeClient, piece: Slice, *, fail_on_data_loss: bool = True) -> list[bytes]:
    batches = tube.read(piece, fail_on_data_loss=fail_on_data_loss)
    return list(itertools.chain.from_iterable(batch.payloads for batch in batches))


def test_one_connection_a_broker_and_none_left_behind(tube: TubeClient, fake: FakeTube) -> None:
    assert tube.partitions(["a"]) == [A0, A1]
    assert tube.bounds([A0, A1]) == {A0: Bounds(0, 560), A1: Bounds(0, 560)}
    assert tube.count(Slice(A0, 0, 560)) == 10
    assert tube.plan(Slice(A1, 0, 560), 3) == (28 * 7, 3)
    assert payloads(tube, Slice(A0, 56, 140)) == [b"2", b"4"]
    assert (fake.connections, fake.discoveries) == (1, 1)
    tube.close()
    assert fake.closed == 1
    assert tube.count(Slice(A0, 0, 28)) == 1


def test_a_lost_connection_is_made_again(tube: TubeClient, fake: FakeTube, clock: Clock) -> None:
    fake.failures = 3
    assert tube.bounds([A0]) == {A0: Bounds(0, 560)}
    assert fake.connections == 4
    assert 0 < clock.now < 1


def test_after_the_deadline_the_failure_is_raised(tube: TubeClient, fake: FakeTube, clock: Clock) -> None:
    fake.failures = 10**6
    with pytest.raises(UnavailableError, match=r"connection lost \(tried for 10 s\)") as caught:
        tube.bounds([A0])
    assert clock.now <= 10
    assert "tubemq.timeoutMs" in str(caught.value.hint)


def test_a_read_continues_where_the_connection_broke(tube: TubeClient, fake: FakeTube) -> None:
    batches = tube.read(Slice(A0, 0, 560))
    first = next(batches)
    fake.failures = 2
    rest = [payload for batch in batches for payload in batch.payloads]
    assert [*first.payloads, *rest] == [b"%d" % record for record in range(0, 20, 2)]
    assert fake.connections == 3


def test_a_read_that_makes_progress_never_times_out(tube: TubeClient, fake: FakeTube, clock: Clock) -> None:
    got = 0
    for batch in tube.read(Slice(A0, 0, 560)):
        got += len(batch.payloads)
        clock.now += 8
        fake.failures = 3
    assert got == 10
    assert clock.now > 20


def test_a_topic_that_is_not_there_is_not_waited_for(tube: TubeClient, clock: Clock) -> None:
    with pytest.raises(ConfigError, match="topic 'b' does not exist at tube master"):
        tube.partitions(["a", "b"])
    assert clock.now == 0


def test_a_partition_that_was_there_is_waited_for(tube: TubeClient, fake: FakeTube, clock: Clock) -> None:
    fake.hidden = {1}
    with pytest.raises(UnavailableError, match="topic 'a' partition 1:0: unknown to tube master"):
        tube.partitions(["a"], required=[A0])
    assert clock.now > 5

    def sleep(seconds: float) -> None:
        fake.hidden.clear()

    with TubeClient("127.0.0.1:8715", 10_000, servers=fake, clock=clock, sleep=sleep) as patient:
        fake.hidden = {1}
        assert patient.partitions(["a"], required=[A0]) == [A0, A1]
        fake.hidden = {1}
        assert patient.bounds([A0]) == {A0: Bounds(0, 560)}


def test_a_broker_that_moved_is_found_again(tube: TubeClient, fake: FakeTube, broker: FakeBroker) -> None:
    tube.bounds([A0])
    broker.port = 9000
    fake.failures = 1
    assert tube.bounds([A0]) == {A0: Bounds(0, 560)}


def test_an_offset_no_longer_stored_is_an_error_that_names_it(tube: TubeClient, broker: FakeBroker) -> None:
    broker.oldest["a"] = 4
    with pytest.raises(DataLossError, match=r"topic 'a' partition 1:0: offset 28 is no longer stored \(oldest: 112\)"):
        payloads(tube, Slice(A0, 28, 280))


def test_without_fail_on_data_loss_reading_continues_at_the_oldest_offset(tube: TubeClient, broker: FakeBroker) -> None:
    broker.oldest["a"] = 4
    assert payloads(tube, Slice(A0, 0, 280), fail_on_data_loss=False) == [b"4", b"6", b"8"]
    assert payloads(tube, Slice(A0, 0, 112), fail_on_data_loss=False) == []


def test_a_range_beyond_the_log_cannot_be_counted(tube: TubeClient) -> None:
    with pytest.raises(DataLossError, match="messages between offset 560 and 588 cannot be counted"):
        tube.count(Slice(A0, 0, 588))


def test_a_range_that_the_log_lost_is_given_up_only_where_that_is_accepted(tube: TubeClient) -> None:
    with pytest.raises(DataLossError, match=r"offset 588 is beyond the end of the log \(560\)"):
        payloads(tube, Slice(A0, 588, 616))
    with pytest.raises(DataLossError, match="not all of the range is there"):
        payloads(tube, Slice(A0, 560, 616))
    assert payloads(tube, Slice(A0, 560, 616), fail_on_data_loss=False) == []


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_damage_inside_the_log_is_never_skipped(tube: TubeClient, broker: FakeBroker, fail_on_data_loss: bool) -> None:
    broker.is_damaged = True
    with pytest.raises(DataLossError, match="not all of the range is there"):
        payloads(tube, Slice(A0, 0, 280), fail_on_data_loss=fail_on_data_loss)


def test_partitions_of_a_store_are_asked_once(
    tube: TubeClient, fake: FakeTube, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def bounds(_: FakeReader, topic: str, partition: int) -> tuple[int, int]:
        asked.append(partition)
        return 0, 560

    monkeypatch.setattr(FakeReader, "bounds", bounds)
    other_store = TopicPartition("a", 1, 10_000)
    assert set(tube.bounds([A0, A1, other_store])) == {A0, A1, other_store}
    assert asked == [0, 10_000]


def test_discovery_is_repeated_when_it_is_old_or_something_failed(
    tube: TubeClient, fake: FakeTube, clock: Clock
) -> None:
    tube.partitions(["a"], max_age_s=1)
    clock.now += 0.9
    tube.partitions(["a"], max_age_s=1)
    assert fake.discoveries == 1
    clock.now += 0.2
    tube.partitions(["a"], max_age_s=1)
    assert fake.discoveries == 2
    with pytest.raises(UnavailableError):
        tube.partitions(["a"], max_age_s=1, required=[TopicPartition("a", 9, 0)])
    before = fake.discoveries
    fake.failures = 1
    tube.bounds([A0])
    tube.partitions(["a"], max_age_s=1)
    assert fake.discoveries == before + 2


def test_a_task_with_the_brokers_address_does_not_ask_the_master(
    tube: TubeClient, fake: FakeTube, broker: FakeBroker
) -> None:
    [first] = tube.read(Slice(A0, 0, 28), address=BrokerAddress("127.0.0.1", 8123, ""))
    assert first.payloads == [b"0"]
    assert fake.discoveries == 0
    assert tube.address(A0) == BrokerAddress("127.0.0.1", 8123, "")
    broker.port = 9000
    fake.failures = 1  # the connection breaks, and the broker is elsewhere
    assert payloads(tube, Slice(A0, 56, 84)) == [b"2"]
    assert fake.discoveries == 1
