"""Reference page of TubeMQ compatibility: methods and fields from the messages, tests from a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.tube.admin import broker as broker_admin
from penstock.tube.admin import master as master_admin
from penstock.tube.codec.methods import METHODS
from penstock.tube.codec.proto import envelope_pb2 as envelope

TABLE = Path(__file__).resolve().parent.parent / "tests" / "conformance" / "tubemq" / "methods.json"


_REFUSED = (
    "a change with a parameter that the method does not use; queries ignore such parameters, as in Apache TubeMQ",
    (
        "`unflushThreshold`, `unflushInterval`, `unflushDataHold`, `memCacheMsgSizeInMB`, `memCacheMsgCntInK`,"
        " `memCacheFlushIntvl`, `dataStoreType`, `dataPath`, `deleteWhen`, `regionId` and `groupId` with another value"
        " than the one that queries show, because penstock does not use them"
    ),
    "`admin_disable_stats`, `admin_disable_all_stats`: counters are always enabled",
    "`admin_release_broker_autoforbidden_status`: the master never disables brokers automatically",
    "`admin_transfer_current_master`: there is one master",
    "`admin_rmv_offset` with `onlyMemory`: offsets in memory and on disk are the same",
    "`admin_backup_group_offsets` with `backupPath`: the response has the backup",
)


def page(note: str) -> str:
    """Return the page: methods and fields of the protocol, with notes and tests from a table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    lines = ["# TubeMQ compatibility", "", note, ""]
    lines += [
        (
            "This page lists every method and field of the TubeMQ protocol, versions 1 to 3. Fields numbered 1000"
            " and above are [extensions](tube-extensions.md), which other peers ignore."
        ),
        "",
        "## Methods",
        "",
        "| id | method | client | server | status | tests |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in METHODS.values():
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in table["methods"][str(row.id)])
        who = f"{row.asks.name.lower()} | {row.answers.name.lower()}"
        lines.append(f"| {int(row.id)} | {row.name} | {who} | as Apache TubeMQ | {tests} |")
    for what, status, test in table["others"]:
        lines.append(f"| {what} | - | - | - | {status} | `{test.removeprefix('tests/')}` |")
    lines += ["", "## Fields", ""]
    theirs = {descriptor.name for descriptor in messages(extensions=False)}
    for descriptor in messages():
        lines += [f"### {descriptor.name}", "", "| number | field | status | note |", "| --- | --- | --- | --- |"]
        for field in descriptor.fields:
            remark = _remark(table, descriptor.name, field)
            status = _status(field, remark) if descriptor.name in theirs else "extension"
            lines.append(f"| {field.number} | {field.name} | {status} | {_cell(remark)} |")
        lines.append("")
    lines += _administration("Administration of the master: `/webapi.htm`", master_admin.METHODS)
    lines += _administration("Administration of the broker: `/broker.htm`", broker_admin.METHODS)
    lines += [
        "Refused with a reason:",
        "",
        *(f"* {text}" for text in _REFUSED),
        "",
        (
            "Times have the format `yyyyMMddHHmmss` in UTC. Unknown methods are refused. Responses have the fields of"
            " Apache TubeMQ 2.4.0, except for the addresses of clients and the state of a consumer's flow control"
            " (`conformance/tubemq/test_administration.py` compares them)."
        ),
        "",
    ]
    return "\n".join(lines)


def messages(*, extensions: bool = True) -> Iterator[Any]:
    """Yield every message of the protocol once: the envelope, then requests and answers with the messages that they
    contain.

    Without ``extensions``, only the messages of the reference.
    """
    waiting: list[Any] = [
        kind.DESCRIPTOR
        for kind in (
            envelope.RpcConnHeader,
            envelope.RequestHeader,
            envelope.RequestBody,
            envelope.ResponseHeader,
            envelope.RspResponseBody,
            envelope.RspExceptionBody,
        )
    ]
    waiting += [kind.DESCRIPTOR for row in METHODS.values() for kind in (row.request, row.response)]
    done: set[str] = set()
    while waiting:
        descriptor = waiting.pop(0)
        if descriptor.name not in done:
            done.add(descriptor.name)
            waiting += [
                field.message_type
                for field in descriptor.fields
                if field.message_type is not None and (extensions or not _extends(field))
            ]
            yield descriptor


def _extends(field: Any) -> bool:
    return bool(field.number >= 1000)


def _status(field: Any, remark: str) -> str:
    """Return the status of a field, derived from its note."""
    if _extends(field):
        return "extension"
    first = remark.partition(" ")[0].strip(":;,")
    return {"ignored": "ignored", "accepted": "ignored", "never": "not sent"}.get(first, "as Apache TubeMQ")


def _remark(table: Any, message: str, field: Any) -> str:
    name = f"{message}.{field.name}"
    found = table["fields"].get(name) or table["fields"].get(f"*.{field.name}")
    return str(found or "")


def _administration(title: str, methods: Mapping[str, Any]) -> list[str]:
    lines = [f"## {title}", "", "| method | description | modifies |", "| --- | --- | --- |"]
    for name, method in sorted(methods.items()):
        about = getattr(method, "about", None) or (method.run.__doc__ or "").split(".")[0]
        lines.append(f"| {name} | {_cell(about)} | {'yes' if method.changes else ''} |")
    return [*lines, ""]


def _cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())
