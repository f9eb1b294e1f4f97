"""Results of the commands `penstock pipeline status`, `reconcile` and `sample` for the console."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from penstock.console.snapshots import LedgerSink, ReconciledSink, SampledRejection, SampledStep

__all__ = ["MAX_CELL", "ledger_sink", "reconciled_sink", "sampled_step"]

MAX_CELL: Final = 1000
"""Characters of a value in the rows of a sample; longer ones end with an ellipsis."""
_SUMS: Final = ("batches", "read", "exploded", "out", "dead", "filtered", "duplicates", "late")


def ledger_sink(row: Mapping[str, Any]) -> LedgerSink:
    """Return a row of ``pipeline status --json``."""
    return LedgerSink(sink=row["sink"], batch=row["batch"], version=row["version"], **_sums(row))


def reconciled_sink(row: Mapping[str, Any]) -> ReconciledSink:
    """Return a row of ``pipeline reconcile --json``."""
    off, unknown = tuple(row["off"]), tuple(row["unknown"])
    return ReconciledSink(sink=row["sink"], ok=row["ok"], off=off, unknown=unknown, **_sums(row))


def sampled_step(row: Mapping[str, Any]) -> SampledStep:
    """Return a row of ``pipeline sample --json``."""
    columns = tuple(row["rows"][0]) if row["rows"] else ()
    return SampledStep(
        step=row["step"],
        kind=row["kind"],
        live=row["live"],
        filtered=row["filtered"],
        dead=row["dead"],
        columns=columns,
        rows=tuple(tuple(_cell(each[name]) for name in columns) for each in row["rows"]),
        rejections=tuple(SampledRejection(each["code"], each["reason"], each["rows"]) for each in row["rejections"]),
    )


def _sums(row: Mapping[str, Any]) -> dict[str, int]:
    return {name: row[name] for name in _SUMS}


def _cell(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"
