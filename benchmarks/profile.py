"""Profile of the processor time of a node under load, by library and by function, with Linux's ``perf``.

Usage: python -m benchmarks.profile [--request set|get] [--clients N] [--window N] [--durability memory] [--seconds S]

The node runs in a separate process under the load of ``benchmarks.generator``; only this process is sampled, in user
space and in the kernel. Without the required privileges, ``perf`` reports an error and no profile is printed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from typing import Final

from benchmarks import generator, servers

__all__ = ["main", "profile"]

KEYS: Final = 1000
FUNCTIONS: Final = 40
"""Number of lines in the list of functions."""
HERTZ: Final = 5000


def profile(request: str, *, clients: int, window: int, durability: str, seconds: float) -> str:
    """Return the shares of libraries and functions in a node's processor time under ``request`` (``set`` or
    ``get``)."""
    with tempfile.TemporaryDirectory() as folder, servers.penstock(durability, core="compiled") as ready:
        load = {"pid": ready["pid"], "keys": KEYS}
        generator.measure(ready["mqtt"], "statestore", op="fill", clients=10, window=10, **load)
        recorded = f"{folder}/perf.data"
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(HERTZ), "-p", str(ready["pid"]), "-o", recorded]
        with subprocess.Popen([*command, "--", "sleep", str(seconds)]) as sampling:
            measured = generator.measure(
                ready["mqtt"], "statestore", op=request, clients=clients, window=window, seconds=seconds, **load
            )
        if sampling.returncode:
            raise SystemExit(f"perf record ended with status {sampling.returncode}; the reason is above")
        work = f"{request.upper()}, {clients} clients, {window} in flight each, {durability}"
        lines = [
            f"{work}: {measured.server_us:.1f} us of processor time, {measured.per_s:,.0f} requests/s",
            "",
            *_shares(recorded, "dso"),
            "",
            *_shares(recorded, "dso,symbol")[:FUNCTIONS],
            "",
        ]
    return "\n".join(lines)


def _shares(recorded: str, by: str) -> list[str]:
    """Return the report as lines, without comments and without libraries below a tenth of a percent."""
    command = ["perf", "report", "-i", recorded, "--no-children", "--percent-limit", "0.1", "--stdio", "--sort", by]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [" ".join(line.split()).removesuffix(" - -") for line in report if line.strip() and not line.startswith("#")]


def main() -> None:
    """Run the module as a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--request", choices=["set", "get"], help="default: both, one after the other")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--durability", choices=["memory", "flushed", "durable"], default="memory")
    parser.add_argument("--seconds", type=float, default=3.0)
    asked = parser.parse_args()
    if shutil.which("perf") is None:
        raise SystemExit("perf is not installed; the package linux-perf has it")
    for request in [asked.request] if asked.request else ["set", "get"]:
        found = profile(
            request,
            clients=asked.clients,
            window=asked.window,
            durability=asked.durability,
            seconds=asked.seconds,
        )
        print(found)


if __name__ == "__main__":
    main()
