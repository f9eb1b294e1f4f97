"""Run benchmarks: ``python -m benchmarks [CASE ...]``; prints results, and stores them as JSON in
benchmarks/results."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict

from benchmarks import generator, servers
from benchmarks.cases import CASES, IN_MEMORY
from benchmarks.figures import Figure, Settings
from benchmarks.machine import describe
from benchmarks.tables import RESULTS, write_pages

PEERS = {
    "mqtt": "mosquitto",
    "connections": "mosquitto",
    "tls": "mosquitto",
    "isolation": "mosquitto",
    "isolation-remote": "mosquitto",
    "scale": "mosquitto",
    "memory": "mosquitto",
    "capacity": "mosquitto",
    "statestore": "redis-server",
    "statestore-keys": "redis-server",
    "core": "redis-server",
    "durable": "redis-server",
    "cluster": "etcd",
    "standby": "etcd",
    "takeover": "etcd",
    "takeover-clients": "etcd",
}


def rows(figures: list[Figure]) -> list[str]:
    """Return the rows of a table: median, minimum and maximum of the runs, and the ratio to penstock's median."""
    ours = {(figure.case, figure.unit): figure.median for figure in figures if figure.server == "penstock"}
    lines = [f"{'case':<48} {'server':<14} {'median':>10} {'least':>10} {'greatest':>10}  unit"]
    for f in figures:
        ratio = "" if f.server == "penstock" else f"   penstock / {f.server} = {ours[f.case, f.unit] / f.median:.2f}"
        if max(f.generator_cpu, default=0.0) > generator.BOUND:
            ratio += f"   generator-bound ({max(f.generator_cpu):.0%} of a core)"
        if f.p50_us and f.p99_us:
            ratio += f"   p50 {statistics.median(f.p50_us):,.0f} us, p99 {statistics.median(f.p99_us):,.0f} us"
        if f.cpu_us:
            ratio += f"   CPU of all processes {statistics.median(f.cpu_us):.2f} us/op"
        if f.server_us:
            ratio += f"   server {statistics.median(f.server_us):.1f} us/op"
        figure = " ".join(
            f"{number:>10,.{0 if f.median >= 100 else 2}f}" for number in (f.median, min(f.runs), max(f.runs))
        )
        lines.append(f"{f.case:<48} {f.server:<14} {figure}  {f.unit}{ratio}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--durability", choices=["durable", "flushed", "memory"], default="durable")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a run")
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys of statestore-keys, scale and memory")
    parser.add_argument("--gigabytes", type=float, default=20.0, help="data of pipeline-drain")
    parser.add_argument("--tube-peer", metavar="HOST:PORT", help="master of an Apache TubeMQ with a topic demo")
    options = parser.parse_args()
    settings = Settings(
        options.durability, options.repeats, options.seconds, options.keys, options.gigabytes, options.tube_peer
    )
    machine = describe()
    print(json.dumps(machine))
    for name in options.cases or list(CASES):
        peer = PEERS.get(name)
        if peer is not None and servers.find(peer) is None:
            print(f"{name}: not run: its peer {peer} is not installed", file=sys.stderr)
            continue
        if peer is not None and (reason := generator.missing()) is not None:
            print(f"{name}: not run: {reason}", file=sys.stderr)
            continue
        figures = CASES[name](settings)
        print("\n".join(rows(figures)), flush=True)
        RESULTS.mkdir(exist_ok=True)
        durability = "memory" if name in IN_MEMORY else settings.durability
        result = {"machine": machine, "durability": durability, "figures": [asdict(f) for f in figures]}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
