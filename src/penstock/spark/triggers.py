"""Spark's mixin for streams that can read what is available now and end: absent in Spark 4.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["SupportsTriggerAvailableNow"]

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
else:
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    except ImportError:  # Spark 4.1

        class SupportsTriggerAvailableNow:
            """Stands in where Spark has no such mixin."""
