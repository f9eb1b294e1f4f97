"""Spark connectors: sources and sinks for TubeMQ, MQTT and the state store, state store lookups, and a session.

Start with ``session``; each format has a package. Importing this package does not import pyspark or pyarrow, which the
extra ``penstock[spark]`` installs.
"""

from __future__ import annotations

from penstock.spark.session import session

__all__ = ["session"]
