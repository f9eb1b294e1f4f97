"""The proof must fail for each way in which the story can go wrong."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.demo.data import AbnormalSegment
from penstock.demo.proof import Evidence, LoggedRecord, Proof, last_line, late_ids, prove
from penstock.pipelines.ledger.ledger import LedgerEntry

NOON = datetime(2022, 3, 20, 12, tzinfo=UTC)
SEGMENT = AbnormalSegment("low", NOON, NOON, 1, 5.0)
MEASURED = {f"m{n}": (NOON + timedelta(hours=n), float(n)) for n in range(4)} | {"late": (NOON, 9.0)}


def ms(name: str) -> int | None:
    return int(MEASURED[name][0].timestamp() * 1000) if name in MEASURED else None


def entry(sink: str, batch: int, start: int, end: int, *, watermark: int = 0, **counts: Any) -> LedgerEntry:
    """A batch of ``[start, end)``, counted in records; the log has 28 bytes for each."""
    read = end - start
    given = {"dead": 0, "filtered": 0, "duplicates": 0, "late": 0, **counts}
    out = read - given["dead"] - given["filtered"] - given["duplicates"]
    return LedgerEntry(
        sink=sink,
        batch=batch,
        start={"t": {"1:0": 28 * start}},
        end={"t": {"1:0": 28 * end}},
        read=read,
        out=out,
        late_watermark_ms=watermark,
        watermark_ms=watermark,
        fencing_token="1:0:n",
        **given,
    )


def log(*names: str) -> list[LoggedRecord]:
    return [LoggedRecord(name, "t", "1:0", 28 * n, ms(name)) for n, name in enumerate(names)]


WATERMARK = int((NOON + timedelta(hours=1, minutes=30)).timestamp() * 1000)
NAMES = ("m0", "m1", "bad", "m2", "m3", "late")
GOOD = Evidence(
    sent=NAMES,
    acknowledged=NAMES,
    log=log(*NAMES),
    table_ids=[*MEASURED],
    table=MEASURED,
    dead_ids=["bad"],
    rows_ledger=[entry("rows", 0, 0, 5, dead=1), entry("rows", 1, 5, 6)],
    windows_ledger=[entry("w", 0, 0, 3), entry("w", 1, 3, 5), entry("w", 2, 5, 6, watermark=WATERMARK)],
    segments=[SEGMENT],
)


def proof(evidence: Evidence = GOOD, *, chaos: bool = False) -> Proof:
    return prove(evidence, measured=MEASURED, malformed=["bad"], late=["late"], segments=[SEGMENT], chaos=chaos)


def test_all_checks_hold_for_a_correct_run() -> None:
    found = proof()
    assert [check for check in found.checks if not check.holds] == []
    assert found.counts == {
        "sent": 6,
        "acknowledged": 6,
        "logged": 6,
        "redelivered": 0,
        "table_rows": 5,
        "dead_letters": 1,
        "filtered": 0,
        "late": 1,
    }


def test_the_last_line_has_the_keys_of_the_contract() -> None:
    line = last_line(proof(), [SEGMENT], 12.345)
    assert list(line) == [
        *("ok", "sent", "acknowledged", "logged", "redelivered", "table_rows", "dead_letters", "filtered", "late"),
        *("segments", "seconds"),
    ]
    assert line["ok"] is True
    assert line["seconds"] == 12.3


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"acknowledged": NAMES[:-1]}, "ids acknowledged are those sent"),
        ({"sent": [*NAMES, "x"]}, "the expected ids were sent"),
        ({"log": log("m0", "m1", "bad", "m2", "late")}, "distinct ids in the log are those sent"),
        ({"table_ids": [*MEASURED, "m1"]}, "every id is in the table once"),
        ({"table_ids": list(MEASURED)[1:]}, "the table holds every reading"),
        ({"table": MEASURED | {"m1": (NOON, 7.0)}}, "the table holds every reading's time and flow"),
        ({"dead_ids": []}, "the dead letters are the malformed messages"),
        ({"dead_ids": ["bad", "bad"]}, "each dead letter exists once"),
        ({"dead_ids": ["bad", "m1"]}, "distinct ids in the log = table rows + dead letters + filtered"),
        ({"rows_ledger": GOOD.rows_ledger[:1]}, "records read in the ledger = records in the log"),
        (
            {"rows_ledger": [entry("rows", 0, 0, 5, dead=2), GOOD.rows_ledger[1]]},
            "rows written in the ledger = rows in the table",
        ),
        (
            {"rows_ledger": [entry("rows", 0, 0, 5, dead=1, duplicates=1), GOOD.rows_ledger[1]]},
            "duplicates in the ledger = redelivered messages",
        ),
        ({"rows_ledger": [GOOD.rows_ledger[0], entry("rows", 2, 5, 6)]}, "batches of rows are contiguous"),
        ({"windows_ledger": GOOD.windows_ledger[::2]}, "batches of windows are contiguous"),
        ({"windows_ledger": GOOD.windows_ledger[:2]}, "records read by the windows = records in the log"),
        (
            {"windows_ledger": [*GOOD.windows_ledger[:2], entry("w", 2, 5, 6)]},
            "the late events are the delayed ones",
        ),
        ({"segments": []}, "the segments found are those in the data"),
    ],
)
def test_each_thing_that_is_off_fails_its_check(change: dict[str, Any], claim: str) -> None:
    found = proof(replace(GOOD, **change))
    assert not found.holds
    assert claim in [check.claim for check in found.checks if not check.holds]


def test_copies_are_shown_and_allowed_in_chaos_only() -> None:
    twice = replace(
        GOOD,
        log=log(*NAMES, "m0"),
        rows_ledger=[*GOOD.rows_ledger, entry("rows", 2, 6, 7, duplicates=1)],
        windows_ledger=[*GOOD.windows_ledger, entry("w", 3, 6, 7, watermark=WATERMARK)],
    )
    assert proof(twice, chaos=True).holds
    assert proof(twice, chaos=True).counts["redelivered"] == 1
    assert not proof(twice).holds


def test_only_the_first_copy_decides_whether_an_event_was_late() -> None:
    ledger = [entry("w", 0, 0, 2), entry("w", 1, 2, 4, watermark=WATERMARK)]
    assert late_ids(log("m0", "m3", "m0", "m1"), ledger) == {"m1"}
    assert late_ids(log("bad", "bad", "bad", "bad"), ledger) == set()


def test_an_event_at_the_watermark_is_late() -> None:
    exact = ms("m1")
    assert exact is not None
    assert late_ids(log("m1"), [entry("w", 0, 0, 1, watermark=exact)]) == {"m1"}
    assert late_ids(log("m1"), [entry("w", 0, 0, 1, watermark=exact - 1)]) == set()
