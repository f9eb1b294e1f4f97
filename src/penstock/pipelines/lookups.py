"""Enrich steps against the state store of the pipeline."""

from __future__ import annotations

from pyspark.sql import DataFrame

from penstock.pipelines.stages import Lookup, WithLookup
from penstock.spark.lookup import with_lookup

__all__ = ["lookups"]


def lookups(broker: str) -> WithLookup:
    """How enrich steps look keys up at ``broker``."""

    def look_up(rows: DataFrame, lookup: Lookup) -> DataFrame:
        return with_lookup(rows, lookup.key, lookup.into, broker=broker, refresh_ms=lookup.refresh_ms)

    return look_up
