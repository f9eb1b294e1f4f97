"""Writers killed -9 and servers that crash at random times: the table has the rows of each batch once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from penstock.spark.postgresql.connection import parse_url
from penstock.spark.postgresql.writes import written_batches
from penstock.spark.written_batches import WrittenBatches
from tests.postgresql import Postgres
from tests.unit.spark.postgresql.writing_process import ROWS

PROGRAM = "tests.unit.spark.postgresql.writing_process"
LAST = 1_000_000


def write(postgres: Postgres, run: int, first: int, last: int) -> subprocess.Popen[str]:
    numbers = map(str, (run, first, last))
    argv = [sys.executable, "-m", PROGRAM, postgres.url, str(postgres.password_file), *numbers]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)])])
def test_each_batch_is_in_the_table_once(postgres: Postgres, rounds: int) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", time.time_ns() % 1_000_000))
    print(f"PENSTOCK_CHAOS_SEED={seed}")
    dice, pause = random.Random(seed), threading.Event()
    postgres.execute("DROP TABLE IF EXISTS killed, penstock_batches")
    done, run = -1, 0
    for number in range(rounds):
        run += 1
        writer = write(postgres, run, done + 1, LAST)
        assert writer.stdout is not None
        assert writer.stderr is not None
        # Its first batch, so that the kill hits a batch and not the start of the interpreter.
        first = writer.stdout.readline()
        assert first, writer.stderr.read()
        pause.wait(dice.uniform(0.0, 0.3))
        if number % 3 == 2:
            postgres.stop("immediate")
            postgres.start()
        writer.kill()
        printed = [int(line) for line in (first, *writer.stdout)]
        writer.stderr.close()
        writer.stdout.close()
        writer.wait()
        done = printed[-1]
    # A ledger that lacks the last batches, and a run that ends.
    last = done + 3
    writer = write(postgres, run + 1, done + 1, last)
    out, errors = writer.communicate(timeout=120)
    assert writer.returncode == 0, errors
    assert [int(line) for line in out.splitlines()] == list(range(done + 1, last + 1))
    rows = (last + 1) * ROWS
    assert postgres.rows("SELECT count(*), count(DISTINCT n), min(n), max(n) FROM killed") == [
        (rows, rows, 0, rows - 1)
    ]
    assert postgres.rows("SELECT relname FROM pg_class WHERE relname LIKE 'penstock\\_staging%'") == []
    found = written_batches(parse_url(postgres.url, str(postgres.password_file)), "public", "killed", "sink", "q")
    assert found == WrittenBatches(last, ROWS, rows)
