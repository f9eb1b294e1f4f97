"""The page of TubeMQ compatibility: methods and fields from the messages, proof from a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.tube.admin import broker as broker_admin
from penstock.tube.admin import master as master_admin
from penstock.tube.codec.methods import METHODS

TABLE = Path(__file__).resolve().parent.parent / "tests" / "conformance" / "tubemq" / "methods.json"


def page(note: str) -> str:
    """Methods and fields of the protocol, from the messages; what is special and which tests show it, from a table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    lines = ["# TubeMQ compatibility", "", note, ""]
    lines += [
        (
            "Every method and every field of the protocol, protocol versions 1 to 3. A field without a remark is read"
            " and written as the reference does. Fields from 1000 on are [extensions](tube-extensions.md), which others"
            " skip."
        ),
        "",
        "## Methods",
        "",
        "| id | method | who asks | who answers | shown by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in METHODS.values():
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in table["methods"][str(row.id)])
        lines.append(f"| {int(row.id)} | {row.name} | {row.asks.name.lower()} | {row.answers.name.lower()} | {tests} |")
    lines += ["", "## Fields", ""]
    done = set()
    for row in METHODS.values():
        for message in (row.request, row.response):
            descriptor = message.DESCRIPTOR
            if descriptor.name in done:
                continue
            done.add(descriptor.name)
            lines += [f"### {descriptor.name}", "", "| number | field | remark |", "| --- | --- | --- |"]
            for field in descriptor.fields:
                lines.append(f"| {field.number} | {field.name} | {_cell(_remark(table, descriptor.name, field))} |")
            lines.append("")
    lines += _administration("Administration of the master: `/webapi.htm`", master_admin.METHODS)
    lines += _administration("Administration of the broker: `/broker.htm`", broker_admin.METHODS)
    lines += [
        "Times are `yyyyMMddHHmmss` in UTC. Methods of the reference that are not listed are refused by name.",
        "",
    ]
    return "\n".join(lines)


def _remark(table: Any, message: str, field: Any) -> str:
    name = f"{message}.{field.name}"
    found = table["fields"].get(name) or table["fields"].get(f"*.{field.name}")
    return str(found or ("extension" if field.number >= 1000 else ""))


def _administration(title: str, methods: Mapping[str, Any]) -> list[str]:
    lines = [f"## {title}", "", "| method | what it does | changes something |", "| --- | --- | --- |"]
    for name, method in sorted(methods.items()):
        about = getattr(method, "about", None) or (method.run.__doc__ or "").split(".")[0]
        lines.append(f"| {name} | {_cell(about)} | {'yes' if method.changes else ''} |")
    return [*lines, ""]


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
