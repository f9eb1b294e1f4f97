"""Instants at which keys expire: the next one that is still true, and a heap that does not grow with what is not."""

from __future__ import annotations

from penstock.statestore.engine.expiries import Expiries
from penstock.statestore.engine.record import Record
from penstock.statestore.hlc import Hlc

VERSION = Hlc(1, 1, "StateStore")


def _record(key: bytes, expires_at: int) -> Record:
    return Record(key, b"", VERSION, expires_at=expires_at)


def test_restored_keys_expire_in_order() -> None:
    records = {key: _record(key, at) for key, at in ((b"late", 9), (b"never", 0), (b"soon", 3))}
    expiries = Expiries(records)
    assert expiries.next() == (3, b"soon")
    del records[b"soon"]
    expiries.went()
    assert expiries.next() == (9, b"late")


def test_an_instant_that_is_not_the_records_any_more_is_passed_over() -> None:
    records = {b"k": _record(b"k", 5)}
    expiries = Expiries(records)
    records[b"k"] = _record(b"k", 8)
    expiries.went()
    expiries.came(8, b"k")
    assert expiries.next() == (8, b"k")
    records[b"k"] = _record(b"k", 0)
    expiries.went()
    assert expiries.next() is None


def test_renewals_of_one_key_do_not_pile_up() -> None:
    records: dict[bytes, Record] = {}
    expiries = Expiries(records)
    for at in range(1, 10_000):
        if at > 1:
            expiries.went()
        records[b"k"] = _record(b"k", at)
        expiries.came(at, b"k")
    assert len(expiries._heap) < 2000
    assert expiries.next() == (9_999, b"k")
