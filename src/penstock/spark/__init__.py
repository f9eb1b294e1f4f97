"""Spark: Structured Streaming sources of TubeMQ, lookups in the state store, and a session configured for both.

Importing this package imports neither pyspark nor pyarrow. They are the extra ``penstock[spark]``.
"""

from __future__ import annotations

from penstock.spark.session import session

__all__ = ["session"]
