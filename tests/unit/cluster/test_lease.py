"""The time for which an active node may count on its lease."""

from __future__ import annotations

from random import Random

import pytest

from penstock.cluster.lease import LeaseClock


def test_it_holds_for_nine_tenths_from_before_the_request() -> None:
    lease = LeaseClock(1, 3, sent_ms=1000)
    assert lease.holds(1000 + 2699)
    assert not lease.holds(1000 + 2700)
    assert lease.left_ms(2000) == 1700


def test_a_keep_alive_counts_from_before_it_was_sent() -> None:
    lease = LeaseClock(1, 3, sent_ms=0)
    lease.kept(2000, 3)
    assert lease.holds(4699)
    lease.kept(1000, 3)  # an earlier one that is answered later
    assert lease.holds(4699)
    assert not lease.holds(4700)


def test_it_holds_again_after_a_late_answer() -> None:
    """etcd's leader died: the new one gave the lease its whole time again."""
    lease = LeaseClock(1, 3, sent_ms=0)
    assert not lease.holds(5000)
    lease.kept(5000, 3)
    assert lease.holds(5001)


def test_it_never_holds_after_etcd_has_ended_it() -> None:
    lease = LeaseClock(1, 3, sent_ms=0)
    lease.kept(1000, 0)
    assert not lease.holds(1001)
    assert lease.left_ms(1001) == 0
    lease.kept(1500, 3)
    assert not lease.holds(1501)


@pytest.mark.parametrize("seed", range(50))
def test_it_ends_before_the_lease_in_etcd(seed: int) -> None:
    """etcd counts from the arrival of a keep-alive; its clock runs up to a twentieth faster or slower."""
    random = Random(seed)
    rate = random.uniform(0.95, 1.05)
    now = arrival = 0.0
    lease = LeaseClock(1, 3, sent_ms=0)
    for _ in range(200):
        now += random.choice((10.0, 900.0, 2500.0, 60_000.0))
        if lease.holds(int(now)):
            assert (now - arrival) * rate < 3000, "another node may be active"
        elif (now - arrival) * rate >= 3000:
            return
        if random.random() < 0.7:
            sent = now
            now += random.uniform(0, 700)
            if (now - arrival) * rate >= 3000:
                return
            arrival = now
            now += random.uniform(0, 700)
            if random.random() < 0.8:
                lease.kept(int(sent), 3)


def test_keep_alives_leave_time_for_others() -> None:
    lease = LeaseClock(1, 3, sent_ms=0)
    assert lease.interval_s + 2 * lease.deadline_s < 0.9 * lease.ttl_s
