"""Commits that etcd may forget: bounded, whoever has not read them."""

from __future__ import annotations

from penstock.cluster.retention import EtcdRetention

LARGE = 64 << 10
"""A commit of its own group."""


def test_a_commit_is_deleted_after_every_member_has_it() -> None:
    retention = EtcdRetention(0)
    for sequence in range(1, 11):
        retention.committed(sequence, LARGE)
    assert retention.delete([]) == 0
    retention.release(7)
    assert retention.delete([5, 9]) == 5
    assert retention.delete([6]) == 6
    assert retention.delete([]) == 7
    assert retention.stored_bytes == 3 * LARGE


def test_a_member_that_is_away_does_not_fill_etcd() -> None:
    retention = EtcdRetention(0, 10 * LARGE)
    for sequence in range(1, 1000):
        retention.committed(sequence, LARGE)
        assert not retention.is_full
        retention.release(sequence)
        retention.delete([3])
        assert retention.stored_bytes <= 5 * LARGE
    assert retention.deleted == 994


def test_commits_that_lmdb_lacks_are_kept_and_new_ones_wait() -> None:
    retention = EtcdRetention(0, 10 * LARGE)
    for sequence in range(1, 12):
        assert not retention.is_full
        assert retention.is_scarce == (sequence > 6)
        retention.committed(sequence, LARGE)
    assert retention.is_full
    assert retention.delete([]) == 0
    retention.release(11)
    assert retention.delete([]) == 11
    assert not retention.is_full


def test_a_million_small_commits_are_few_groups() -> None:
    retention = EtcdRetention(100)
    for sequence in range(101, 100_101):
        retention.committed(sequence, 200)
    assert len(retention._stored) < 400
    assert retention.stored_bytes == 100_000 * 200
    retention.release(50_000)
    deleted = retention.delete([])
    assert 49_000 < deleted <= 50_000
    assert retention.stored_bytes == (100_100 - deleted) * 200


def test_the_newest_commits_are_kept_for_members_that_start_later() -> None:
    retention = EtcdRetention(0, 100 * LARGE, 10 * LARGE)
    for sequence in range(1, 31):
        retention.committed(sequence, LARGE)
    retention.release(30)
    assert retention.delete([30]) == 20
    assert retention.stored_bytes == 10 * LARGE
    # The backlog never prevents a commit.
    small = EtcdRetention(0, 8 * LARGE, 1000 * LARGE)
    for sequence in range(1, 31):
        small.committed(sequence, LARGE)
        small.release(sequence)
        small.delete([])
        assert not small.is_scarce


def test_a_full_etcd_keeps_only_what_this_node_lacks() -> None:
    retention = EtcdRetention(0, most_bytes=1 << 20, backlog_bytes=1 << 18)
    for sequence in range(1, 9):
        retention.committed(sequence, 64 << 10)
    retention.release(6)
    assert retention.delete([2]) == 2, "a member needs the rest"
    assert retention.delete([2], all_possible=True) == 6
    assert retention.stored_bytes == 2 * (64 << 10)


def test_a_full_log_is_deleted_even_if_its_commits_are_one_group() -> None:
    """After a takeover all earlier commits are one group, which may be larger than the backlog."""
    retention = EtcdRetention(0, 100 * LARGE, 25 * LARGE)
    retention.committed(40, 90 * LARGE)
    retention.release(40)
    assert retention.delete([]) == 0
    for sequence in range(41, 52):
        assert not retention.is_full
        retention.committed(sequence, LARGE)
    assert retention.is_full
    assert retention.delete([]) == 40
    assert not retention.is_full
