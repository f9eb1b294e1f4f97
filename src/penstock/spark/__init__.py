"""Spark: Structured Streaming sources of the tube log, lookups in the state store, and a session set up for both.

Importing this package imports neither pyspark nor pyarrow. They are the extra ``penstock[spark]``.
"""

from __future__ import annotations

from penstock.spark.session import session

__all__ = ["session"]
