"""Power is lost after any operation while batches are staged and committed: each batch is published once, or not yet.

Writes and fsyncs are recorded, as in `test_tube_power_loss`; the notes (LMDB, all or nothing and durable at once) stand
in the record too. For every prefix a new process recovers from what the disk may hold; what was decided is carried out,
and the batch that was not committed is run again, by a newer run and with other rows.
"""

from __future__ import annotations

from random import Random
from typing import Any

from penstock.tube.codec.proto import broker_pb2 as pb
from tests.engine.tube.staging_harness import Rows, StagingTalk
from tests.unit.runtime.recorded_disk import Op, RecordedDisk, after_power_loss

PLACES = [("a", 0), ("a", 1), ("b", 0)]


def rows_of(random: Random, batch: int, attempt: str) -> list[Rows]:
    """What one attempt stages, request by request: rows that name batch, attempt, and their number."""
    number = 0
    requests = []
    for _ in range(random.randrange(1, 4)):
        rows: Rows = {}
        for place in random.sample(PLACES, random.randrange(1, 4)):
            rows[place] = []
            for _ in range(random.randrange(1, 4)):
                rows[place].append(b"%d %s %d" % (batch, attempt.encode(), number) + bytes(random.randrange(40)))
                number += 1
        requests.append(rows)
    return requests


def run_batch(talk: StagingTalk, random: Random, run: str, batch: int, *, prepare: bool) -> dict[str, int]:
    """Two tasks and a loser, then the commit; the winners with their rows."""
    talk.begin(run=run, batch=batch)
    winners = {}
    for task, (name, wins) in enumerate([(f"{run}-x", True), (f"{run}-y", True), (f"{run}-loser", False)]):
        attempt = f"{name}-{batch}"
        at = 0
        for rows in rows_of(random, batch, attempt):
            answer = talk.stage(attempt, rows, task=task, at=at, run=run, batch=batch)
            at = answer.transaction.stagedRows
        if wins:
            winners[attempt] = at
    participants = ["1:h:1", "2:h:2"] if prepare else []
    common: dict[str, Any] = {"run": run, "batch": batch, "name": f"{run}-{batch}", "participants": participants}
    if prepare:
        assert talk.settle(pb.Transaction.PREPARE, *winners.items(), **common).success
    done = talk.settle(pb.Transaction.COMMIT, *(() if prepare else winners.items()), **common)
    assert done.transaction.committed == batch
    talk.disk.note(("committed", batch, winners))
    return winners


def check(talk: StagingTalk, committed: dict[int, dict[str, int]]) -> dict[int, dict[str, int]]:
    """What is published is whole batches, each row once; all of ``committed`` is there. What is there, by batch."""
    found: dict[int, dict[str, set[int]]] = {}
    for messages in talk.published().values():
        order: list[tuple[int, int, int]] = []
        for message in messages:
            batch, attempt, number = message.rstrip(b"\0").split(b" ")
            numbers = found.setdefault(int(batch), {}).setdefault(attempt.decode(), set())
            assert int(number) not in numbers, "published twice"
            numbers.add(int(number))
            order.append((int(batch), attempt.split(b"-")[1] == b"y", int(number)))
        assert order == sorted(order), "batches, tasks and rows stand in their order"
    counts = {batch: {name: len(numbers) for name, numbers in of.items()} for batch, of in found.items()}
    for of in found.values():
        assert not any("loser" in name for name in of)
        assert all(numbers == set(range(len(numbers))) for numbers in of.values())
    assert {batch: counts.get(batch) for batch in committed} == committed
    assert talk.lost == []
    return counts


def recover(disk: RecordedDisk, ops: list[Op]) -> tuple[StagingTalk, dict[int, dict[str, int]]]:
    """A new process, once it has carried out what was decided; and what had been acknowledged as committed."""
    notes: dict[str, bytes] = {}
    committed: dict[int, dict[str, int]] = {}
    for op in ops:
        if op.kind == "note" and isinstance(op.value, tuple):
            if op.value[0] == "notes":
                notes = op.value[1]
            elif op.value[0] == "committed":
                committed[op.value[1]] = op.value[2]
    talk = StagingTalk(disk, notes)
    for _ in range(3):
        talk.commit()
    return talk, committed


def test_every_prefix_of_three_batches() -> None:
    random = Random(11)
    talk = StagingTalk()
    for batch in range(3):
        run_batch(talk, random, "r1", batch, prepare=batch == 1)
    ops = talk.disk.ops
    tried = redone = 0
    for end in range(len(ops) + 1):
        prefix = ops[:end]
        if end < len(ops) and ops[end].kind == "note":
            continue
        for _, disk in after_power_loss(prefix, {}, random):
            if random.random() < 0.5:
                continue
            again, committed = recover(disk, prefix)
            counts = check(again, committed)
            state = again.begin(run="r2").transaction
            if state.transactionId:
                # Prepared: its driver died; whoever asked all participants decides.
                step = random.choice([pb.Transaction.COMMIT, pb.Transaction.ABORT])
                common = {"run": "r2", "batch": state.transactionBatch, "participants": list(state.participants)}
                assert again.settle(step, name=state.transactionId, **common).success
                state = again.begin(run="r2").transaction
            batch = state.committed if state.HasField("committed") else -1
            published = check(again, committed)
            assert sorted(published) == list(range(batch + 1)), "what is visible is what is committed"
            for following in range(batch + 1, 3):
                published[following] = run_batch(again, random, "r2", following, prepare=False)
                redone += 1
            assert check(again, published) == published
            assert len(published) == 3
            assert set(counts) <= set(published)
            tried += 1
    assert tried > 200
    assert redone > 100


def test_power_is_lost_again_while_a_decision_is_carried_out() -> None:
    random = Random(12)
    talk = StagingTalk()
    run_batch(talk, random, "r1", 0, prepare=False)
    ops = talk.disk.ops
    decided = next(n for n, op in enumerate(ops) if op.kind == "note" and _publishing(op.value))
    for end in range(decided + 1, len(ops) + 1, 7):
        for _, disk in after_power_loss(ops[:end], {}, random):
            base = disk.files()
            first, committed = recover(disk, ops[:end])
            check(first, committed)
            whole = first.published()
            later = [op for op in ops[:end] if op.kind == "note"] + disk.ops
            for stop in range(len(later) - len(disk.ops), len(later) + 1, 7):
                done = disk.ops[: stop - (len(later) - len(disk.ops))]
                for _, again in after_power_loss(done, base, random):
                    second, _ = recover(again, later[:stop])
                    check(second, committed)
                    assert second.published() == whole


def _publishing(value: object) -> bool:
    if not isinstance(value, tuple) or value[0] != "notes":
        return False
    note = value[1].get("staging/q")
    return note is not None and b'"decision":[' in note


def test_acknowledged_rows_are_still_staged() -> None:
    random = Random(13)
    talk = StagingTalk()
    run_batch(talk, random, "r1", 0, prepare=False)
    talk.begin(batch=1)
    staged: dict[str, int] = {}
    for number in range(4):
        attempt = f"r1-x{number}-1"
        for rows in rows_of(random, 1, attempt):
            answer = talk.stage(attempt, rows, task=number, at=staged.get(attempt, 0), batch=1)
            staged[attempt] = answer.transaction.stagedRows
            talk.disk.note(("acknowledged", attempt, staged[attempt]))
    ops = talk.disk.ops
    for end in range(0, len(ops) + 1, 2):
        noted = [op.value for op in ops[:end] if op.kind == "note" and isinstance(op.value, tuple)]
        acknowledged = {value[1]: value[2] for value in noted if value[0] == "acknowledged"}
        for _, disk in after_power_loss(ops[:end], {}, random):
            again, _ = recover(disk, ops[:end])
            found = {row.attempt: row.rows for row in again.staging.rows(again.now)}
            assert all(found.get(name, 0) >= rows for name, rows in acknowledged.items())
