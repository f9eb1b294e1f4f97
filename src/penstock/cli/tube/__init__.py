"""`penstock tube`: topics, consumer groups, records and brokers of TubeMQ."""

from __future__ import annotations

from penstock.cli.audit import audit
from penstock.cli.options import command_group
from penstock.cli.tube import broker, consume, groups, offsets, produce, staged, topics

__all__ = ["app"]

app = command_group("Topics, brokers, groups; produce and consume records; positions and lag.")
app.add_typer(topics.app, name="topics", invoke_without_command=True)
app.command()(produce.produce)
app.command()(audit)
app.command()(consume.consume)
app.add_typer(groups.app, name="groups", invoke_without_command=True)
app.add_typer(offsets.app, name="offsets")
app.command()(offsets.lag)
app.command()(staged.staged)
app.command()(broker.broker)
app.command("brokers")(broker.list_brokers)
app.command()(broker.fsck)
