"""Generate Markdown pages from the results in a folder.

One page has all results next to those of the peers; the other one describes the capacity of one node for operators.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Final

from benchmarks import generator

__all__ = ["RESULTS", "result_pages", "write_pages"]

HEAD = """# Results

Written by `python -m benchmarks` from the JSON next to it. The ratio is penstock's median to that server's, same run.
"""


RESULTS: Final = Path(__file__).resolve().parent / "results"
CAPACITY_PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "operations" / "capacity.md"

CAPACITY_HEAD: Final = """# Size a node

<!-- Written by `python -m benchmarks` from benchmarks/results; run it again to change the page. -->

Medians of `python -m benchmarks`, in which the clients ran on the same machine and shared its cores with the node.
They are meant for sizing: measure your own load before you rely on them.

The event loop of a node uses one core; the kernel, commits, TLS clients and Spark use others. More than two cores
therefore help the clients and pipelines on the same machine more than the node. A node accepts 10,000 connections by
default ([`mqtt.limits.max_connections`](../reference/configuration.md)).
"""

MEMORY: Final = """## Memory after a peak

A node that becomes idle returns free memory. Some of a peak stays, and a second peak of the same size reuses it. It is
not in use: after 10,000 clients, and after 300,000 keys that expired, Python's objects and the C library's blocks were
within 2 MB of those before. It is fragmented: Python's allocator returns a block of 1 MiB when its last object is
freed, and the few objects that live on are distributed over many blocks. With `PYTHONMALLOC=malloc` in the environment
of the node, the C library allocates these objects, too, and returns each free page. A SET then takes 5.1 instead of
4.6 µs of processor time, without the kernel's part. Resident without files, in memory mode (Python 3.11, compiled core,
one run of two rounds for each row, on two busy cores):

| load | allocator | before | at the peak | 30 s after it | second peak | 30 s after it |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
| 10,000 clients with a subscription each | Python's | 63 MB | 109 MB | 108 MB | 118 MB | 108 MB |
| | `malloc` | 65 MB | 115 MB | 70 MB | 115 MB | 77 MB |
| 10,000 retained messages and 300,000 keys of 64 bytes | Python's | 63 MB | 312 MB | 158 MB | 275 MB | 173 MB |
| | `malloc` | 65 MB | 330 MB | 99 MB | 341 MB | 103 MB |

Size the machine for the peak.
"""

CAPACITY: Final[dict[str, tuple[tuple[str, str, str, str], ...]]] = {
    "MQTT": (
        ("memory of an idle connection", "connections", "9999 idle connections", "bytes/connection"),
        (
            "the same with a subscription",
            "connections",
            "9999 idle connections with a subscription",
            "bytes/connection",
        ),
        ("the same with TLS", "connections", "1999 idle TLS connections", "bytes/connection"),
        ("QoS 1, one sender and one receiver, one in flight", "core", "QoS 1, 1:1, window 1", "messages/s"),
        ("QoS 1, one sender and one receiver, 64 in flight", "core", "QoS 1, 1:1, window 64", "messages/s"),
        ("QoS 1, one sender and 50 receivers, delivered", "core", "QoS 1, 1:50, window 64", "messages/s"),
        ("requests with response, 16 pairs", "core", "request/response, 16 pairs", "messages/s"),
    ),
    "State store": (
        ("SET in memory, 1 client", "core", "SET, 1 client", "requests/s"),
        ("SET in memory, 50 clients", "core", "SET, 50 clients", "requests/s"),
        ("GET, 50 clients", "core", "GET, 50 clients", "requests/s"),
        ("durable SET, 1 client", "durable", "durable SET, 1 client", "requests/s"),
        ("durable SET, 50 clients", "durable", "durable SET, 50 clients", "requests/s"),
        ("memory of a key with 64 bytes", "statestore-keys", "memory of 1,000,000 keys", "bytes/key"),
        ("start with a million keys", "statestore-keys", "start with 1,000,000 keys", "ms"),
    ),
    "TubeMQ, Apache's Java client": (
        ("produce 100 B, durable", "tube-floor", "produce 100 B", "messages/s"),
        ("produce 1 KiB, durable", "tube-floor", "produce 1024 B", "messages/s"),
        ("consume 100 B from files", "tube-floor", "consume 100 B from files", "messages/s"),
        ("consume 1 KiB from files", "tube-floor", "consume 1024 B from files", "messages/s"),
    ),
    "Two nodes": (
        ("memory of a standby without data", "standby", "standby, empty", "MB"),
        (
            "memory of a standby with 100,000 keys and 1,000 sessions",
            "standby",
            "standby, 100,000 keys, 1,000 sessions",
            "MB",
        ),
        ("memory of its active node", "standby", "active node, 100,000 keys, 1,000 sessions", "MB"),
        ("a key of 65 bytes in etcd", "standby", "commit of a key with 65 bytes in etcd", "bytes"),
        (
            "a persistent session that subscribes, in etcd",
            "standby",
            "commits of a session that subscribes in etcd",
            "bytes",
        ),
        ("a queued message of 64 bytes in etcd", "standby", "commit of a queued message of 64 bytes in etcd", "bytes"),
    ),
    "Return of 10,000 clients after the node was killed": (
        ("anonymous", "scale", "10,000 anonymous clients are back", "s"),
        ("with a client certificate", "scale", "10,000 certificate clients are back", "s"),
        ("with SCRAM", "scale", "10,000 SCRAM clients are back", "s"),
    ),
}
"""Rows by heading: description for operators, benchmark, case, unit."""

LATENCIES: Final = ("p50 ms", "p99 ms", "p99.9 ms")


def result_pages() -> dict[Path, str]:
    """Return the text of each page that is made of the results: their tables, and a node's capacity for operators."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return {RESULTS / "README.md": page(results), CAPACITY_PAGE: capacity_page(results)}


def write_pages() -> None:
    """Write the pages that are made of the results."""
    for path, text in result_pages().items():
        path.write_text(text, encoding="utf-8")


def capacity_page(results: dict[str, Any]) -> str:
    """Return the page for operators; each figure has the machine on which it was measured."""
    found = {
        (name, figure["case"], figure["unit"]): statistics.median(figure["runs"])
        for name, result in results.items()
        for figure in result["figures"]
        if figure["server"] == "penstock"
    }
    lines = [CAPACITY_HEAD]
    for heading, rows in CAPACITY.items():
        lines += [f"## {heading}", "", "| what | median | measured on |", "| --- | ---: | --- |"]
        for words, name, case, measured in rows:
            value = found.get((name, case, measured))
            if value is None:  # this benchmark has not been run yet
                continue
            unit = measured.partition("/")[0] if measured.startswith("bytes") else measured
            lines.append(f"| {words} | {value:{_digits(value)}} {unit} | {_where(results[name])} |")
        lines.append("")
    lines += [
        MEMORY,
        "## Latency at half load",
        "",
        "In ms. Half load is half of the rate that the same clients reach. While durable SETs run, the log of the",
        "state store is applied to its database all the time.",
        "",
        "| load | p50 | p99 | p99.9 |",
        "| --- | ---: | ---: | ---: |",
    ]
    cases = dict.fromkeys(case for name, case, unit in found if name == "capacity" and unit in LATENCIES)
    for case in cases:
        lines.append(f"| {case} | " + " | ".join(f"{found['capacity', case, unit]:.2f}" for unit in LATENCIES) + " |")
    return "\n".join([*lines, *([f"\nMeasured on {_where(results['capacity'])}."] if cases else []), ""])


def _where(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores"


def page(results: dict[str, Any]) -> str:
    """Return the page of ``results``, which are by the name of their benchmark."""
    lines = [HEAD]
    for name, result in results.items():
        if "machine" not in result:  # a comparison of versions, which the page of the benchmarks describes
            continue
        machine = result["machine"]
        versions = ", ".join(f"{k} {v}" for k, v in (machine["versions"] | machine.get("peers", {})).items())
        core = f", core {machine['core']}" if "core" in machine else ""
        where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f} before it"
        lines += [
            f"## {name}",
            "",
            f"{where}, Python {machine['python']}{core}; {versions}.",
            "",
            "| case | server | median | least - greatest | unit | ratio |",
            "| --- | --- | ---: | ---: | --- | ---: |",
        ]
        ours = {(f["case"], f["unit"]): f["runs"] for f in result["figures"] if f["server"] == "penstock"}
        lines += [_row(figure, ours.get((figure["case"], figure["unit"]))) for figure in result["figures"]]
        lines.append("")
    return "\n".join(lines)


def _digits(value: float) -> str:
    return ",.0f" if value >= 100 else ",.2f"


def _row(figure: dict[str, Any], ours: list[float] | None) -> str:
    runs = figure["runs"]
    is_peer = figure["server"] != "penstock" and ours is not None
    ratio = f"{statistics.median(ours) / statistics.median(runs):.2f}" if is_peer and ours else ""
    if max(figure.get("generator_cpu") or [0.0]) > generator.BOUND:
        ratio += " (generator-bound)"
    number = _digits(statistics.median(runs))
    spread = f"{min(runs):{number}} - {max(runs):{number}}" if len(runs) > 1 else ""
    return (
        f"| {figure['case']} | {figure['server']} | {statistics.median(runs):{number}} | {spread} | {figure['unit']}"
        f" | {ratio.strip()} |"
    )
