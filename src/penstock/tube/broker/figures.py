"""A broker in numbers, for metrics, administration and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.tube.broker.broker import TubeBroker

__all__ = ["figures"]


def figures(broker: TubeBroker) -> dict[str, int]:
    """Counters and gauges as plain integers, by name."""
    engine, disk = broker.engine, broker.disk
    stores = list(disk.stores.values())
    return {
        "connections": len(broker.peers.open),
        "refused_connections": broker.peers.refused,
        "requests": broker.requests,
        "bytes_in": broker.bytes_in,
        "bytes_out": broker.bytes_out,
        "produced_messages": engine.produce.messages,
        "produced_bytes": engine.produce.bytes,
        "produced_duplicates": engine.produce.duplicates,
        "fetched_messages": engine.fetch.messages,
        "gets": engine.gets,
        "waiting_gets": engine.fetch.parked,
        **broker.upkeep.staged_stats(),
        "refused": engine.checks.refused,
        "dropped_late": engine.dropped_late,
        "registrations": len(engine.registrations),
        "topics": len(engine.topics.by_name),
        "stores": len(stores),
        "stored_bytes": sum(store.data_end - store.min_data_offset for store in stores),
        "unwritten_bytes": sum(store.unwritten_bytes for store in stores),
        "damaged_reads": sum(store.damaged_reads for store in stores),
        "recovered_torn_bytes": disk.recovery.torn_bytes,
        "recovered_losses": sum(len(store.recovery.losses) for store in stores),
        "commits": broker.commits.count,
        "failed": int(broker.failure is not None),
    }
