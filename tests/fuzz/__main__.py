"""Run one target with coverage guidance, or everything that runs without: see ``--help``.

atheris instruments Python bytecode, so the core runs interpreted. Found inputs are kept below ``build/fuzz``; a crash
is written there as ``crash-*``, and running the target with that file as argument repeats it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.targets import TARGETS, load
from tests.mutations import mutated

ROOT: Final = Path(__file__).parents[2]
CORPUS: Final = Path(__file__).parent / "corpus"
MAX_BYTES: Final = 4096
_LINE: Final = re.compile(r"#(\d+)\s+\S+\s+cov: (\d+) ft: (\d+) corp: (\d+)")


class Summary(NamedTuple):
    """What a run of libFuzzer reports at its end; ``crash`` is the file of the input, "" without one."""

    executions: int
    coverage: int
    features: int
    inputs: int
    crash: str

    def __str__(self) -> str:
        return f"{self.executions} executions, coverage {self.coverage}, {self.features} features, {self.inputs} inputs"


def guided(target: str, seconds: int, *, merge: bool = False) -> tuple[int, Summary, str]:
    """Run ``target`` in a process of its own: exit status, summary, output. ``merge``: minimise its corpus instead."""
    found = ROOT / "build" / "fuzz" / target
    found.mkdir(parents=True, exist_ok=True)
    options = ["-merge=1", "-rss_limit_mb=2048"] if merge else [f"-max_total_time={seconds}", "-timeout=25"]
    folders = [str(found), str(CORPUS / target)]
    command = [sys.executable, "-m", "tests.fuzz", "--inside", target, "--"]
    command += [*options, f"-max_len={MAX_BYTES}", f"-artifact_prefix={found}/", *folders]
    environment = {**os.environ, "PENSTOCK_CORE": "interpreted"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
    output = done.stdout + done.stderr
    lines = _LINE.findall(output)
    executions, coverage, features, inputs = map(int, lines[-1] if lines else "0000")
    crash = re.search(r"Test unit written to (\S+)", output)
    return done.returncode, Summary(executions, coverage, features, inputs, crash[1] if crash else ""), output


def inside(target: str, arguments: list[str]) -> None:
    """Hand the target over to libFuzzer, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["penstock"], enable_loader_override=False):
        run = load(target)
        run(b"")  # what is prepared once does not count for the time limit of an input
    atheris.Setup([sys.argv[0], *arguments], lambda data: run(data) and None)
    atheris.Fuzz()


def outcomes(target: str, mutations: int) -> str:
    """Digest of the outcomes of the committed corpus of ``target`` and of fixed mutations of it."""
    run = load(target)
    rng = random.Random(target)
    seeds = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    digest = hashlib.sha256()
    for data in seeds + [mutated(rng, rng.choice(seeds)) for _ in range(mutations)]:
        try:
            outcome = repr(run(data))
        except Exception as error:
            error.add_note(f"target {target}, input {data.hex()}")
            raise
        digest.update(outcome.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="names in tests/fuzz/targets.py with commas between them, or `all`")
    parser.add_argument("inputs", nargs="*", type=Path, help="run these files once, without atheris")
    parser.add_argument("--seconds", type=int, default=60, help="length of the run (default: %(default)s)")
    parser.add_argument("--merge", action="store_true", help="write the minimal corpus into build/fuzz")
    parser.add_argument("--outcomes", type=int, metavar="N", help="print the digest of the corpus and N mutations")
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[4:])
    options = parser.parse_args()
    names = list(TARGETS) if options.target == "all" else options.target.split(",")
    failed = False
    for name in names:
        for path in options.inputs:
            print(load(name)(path.read_bytes()))
        if options.outcomes is not None:
            print(name, outcomes(name, options.outcomes), flush=True)
        elif not options.inputs:
            status, summary, output = guided(name, options.seconds, merge=options.merge)
            if status:
                print(output[-4000:])
            print(f"{name}: {summary}", summary.crash, flush=True)
            failed = failed or status != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
