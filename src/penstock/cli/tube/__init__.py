"""`penstock tube`: topics, consumer groups, records and brokers of TubeMQ."""

from __future__ import annotations

from penstock.cli.options import Commands
from penstock.cli.tube import broker, consume, groups, produce, topics

__all__ = ["app"]

app = Commands("Manage topics, consumer groups, offsets and brokers of TubeMQ; produce and consume records.")
app.add(
    "penstock tube produce telemetry hello",
    "penstock tube produce telemetry --key-separator : < lines.txt",
    "penstock tube produce images --format whole < image.png",
)(produce.produce)
app.add("penstock tube consume telemetry", "penstock tube consume telemetry --group lake --follow --json")(
    consume.consume
)
app.groups |= {
    "topic": topics.app,
    "group": groups.app,
    "offset": groups.offset_app,
    "broker": broker.app,
    "staged": broker.staged_app,
}
