"""Extras of the installation that a configuration needs.

A node checks them before it starts. One that is missing would otherwise be found late: by a standby at its election.
"""

from __future__ import annotations

from importlib import import_module

from penstock.node.config.cluster import needs_cluster
from penstock.node.config.node import NodeConfig
from penstock.node.config.tracing import needs_otel
from penstock.runtime.kafka.config import needs_kafka

__all__ = ["check_extras"]


def check_extras(config: NodeConfig) -> None:
    """Import the libraries of the extras that ``config`` needs.

    Raises:
        ConfigError: one is not installed, or cannot be imported.
    """
    if config.cluster is not None:
        with needs_cluster():
            import_module("penstock.cluster.client")
    if any(rule.to is not None and rule.to.kafka is not None for rule in config.rules):
        with needs_kafka("rules"):
            import_module("confluent_kafka")
    if config.tracing is not None:
        with needs_otel("tracing"):
            import_module("penstock.runtime.observability.tracing")
    if config.telemetry is not None:
        with needs_otel("telemetry"):
            import_module("penstock.runtime.observability.telemetry")
