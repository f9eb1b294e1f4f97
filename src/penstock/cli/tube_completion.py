"""What a shell offers for TOPIC and GROUP after a Tab: the names that the master and its brokers know.

A shell waits for it, so nothing is asked for long; where nobody answers nothing is offered.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import typer

from penstock.errors import PenstockError

__all__ = ["WEB", "complete_group", "complete_topic"]

WEB = "127.0.0.1:8080"
ANSWER_S = 1.0


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics that begin with ``incomplete``."""
    return _beginning(incomplete, _topics(_http(ctx)))


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """The groups that begin with ``incomplete``: those with members, and those that left a position."""
    return _beginning(incomplete, _groups(_http(ctx)))


def _http(ctx: typer.Context) -> str:
    return str(ctx.params.get("http") or os.environ.get("PENSTOCK_HTTP") or WEB)


def _beginning(incomplete: str, names: Iterator[str]) -> list[str]:
    found: set[str] = set()
    with contextlib.suppress(PenstockError):  # what was told until then is offered
        found.update(name for name in names if name.startswith(incomplete))
    return sorted(found)


def _topics(http: str) -> Iterator[str]:
    from penstock.cli.tube_common import call

    for row in call(http, "admin_query_topic_info", {}, timeout_s=ANSWER_S):
        yield str(row["topicName"])


def _groups(http: str) -> Iterator[str]:
    from penstock.cli.tube_common import call, call_broker

    for row in call(http, "admin_query_sub_info", {}, timeout_s=ANSWER_S):
        yield str(row["consumeGroup"])
    for broker in call(http, "admin_query_broker_run_status", {}, timeout_s=ANSWER_S):
        web = broker.get("brokerWebAddress") or f"{broker['brokerIp']}:{broker.get('brokerWebPort') or 8081}"
        for row in call_broker(web, "admin_query_offset", {}, timeout_s=ANSWER_S):
            yield str(row["groupName"])
