"""Ledger, reconciliation and samples of a pipeline in the API of the console."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.node import pipeline_commands
from penstock.node.config.node import PipelineSection, TopicSection, Tube
from penstock.node.node import ReadyNode
from penstock.node.pipeline_commands import JobKind, PipelineCommands
from penstock.runtime.observability.audit import read_audit
from tests.unit.node.test_api import Api
from tests.unit.node.test_dead_letters import TOPIC, dead_run, read_from
from tests.unit.node.test_http_access import running
from tests.unit.node.test_node import config
from tests.unit.pipelines.recorded_run import RecordedRun

RECONCILE = "/pipelines/plain/reconcile"
SAMPLE = "/pipelines/plain/sample"
SUMS = {"batches": 2, "read": 10, "exploded": 0, "out": 7, "dead": 2, "filtered": 0, "duplicates": 1, "late": 0}
SINK = {"sink": "rows", "ok": True, **SUMS, "off": [], "unknown": []}
STEP = {
    "step": "parsed", "kind": "parse", "live": 3, "filtered": 0, "dead": 1,
    "rows": [{"x": 9007199254740993, "y": None, "z": {"a": [1]}, "t": "text"}],
    "rejections": [{"code": "parse.not_json", "reason": "not JSON", "rows": 1}],
}  # fmt: skip


def prints(*rows: dict[str, Any], then: str = "") -> tuple[str, ...]:
    """A program that prints ``rows`` and does ``then``."""
    lines = "".join(f"print({json.dumps(json.dumps(row))}, flush=True)\n" for row in rows)
    return (sys.executable, "-c", f"import sys, time\n{lines}{then}")


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return dead_run(tmp_path / "run")


@pytest.fixture
async def ready(tmp_path: Path, run: RecordedRun) -> AsyncIterator[ReadyNode]:
    """A node that manages the pipeline of ``run``, and another one, whose name must be quoted in URLs."""
    section = PipelineSection(file=run.file, state_dir=run.state)
    tube = Tube(topics={TOPIC: TopicSection(partitions=1)})
    pipelines = {"plain": section, "other?": section}
    async with running(config(tmp_path / "data", pipelines=pipelines, tube=tube)) as found:
        read_from(run, found.tube_master)
        yield found


async def ended(api: Api, path: str) -> dict[str, Any]:
    found = await api.until(path, lambda now: now["job"]["state"] != "running")
    job: dict[str, Any] = found["job"]
    return job


async def test_the_ledger_and_its_reconciliation_are_those_of_the_commands(ready: ReadyNode, run: RecordedRun) -> None:
    for number, entry in enumerate(run.entries):  # the topic has no records
        run.change(number, start={TOPIC: {"1:0": 0}}, end={TOPIC: {"1:0": 0}})
        assert entry.batch == number
    api = Api(ready)
    assert await api.get(RECONCILE) == {"job": None}
    (sink,) = (await api.get("/pipelines/plain/ledger"))["rows"]
    assert sink == {"sink": "rows", "batch": 1, "version": None, **SUMS}
    status, _, body = await api.send(RECONCILE, "POST")
    assert (status, body["job"]["state"], body["job"]["sinks"]) == (200, "running", [])
    job = await ended(api, RECONCILE)
    assert (job["state"], job["error"]) == ("done", None)
    (found,) = job["sinks"]
    assert {name: found[name] for name in SUMS} == SUMS
    assert not found["ok"]
    assert "the source has 0 records in the range of the batches, 10 were read" in found["off"]
    methods = [entry["method"] for entry in read_audit(Path(ready.data_dir) / "audit")]
    assert methods == ["reconcile_pipeline"]


async def test_one_job_of_a_kind_runs_and_can_be_cancelled(ready: ReadyNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", prints(SINK, then="time.sleep(600)"))
    api = Api(ready)
    for path, code in ((RECONCILE, 401), ("/pipelines/none/reconcile", 404)):
        assert (await (Api(ready, "") if code == 401 else api).send(path, "POST"))[0] == code
    assert (await api.send(RECONCILE, "POST"))[0] == 200
    job = (await api.until(RECONCILE, lambda now: now["job"]["sinks"] != []))["job"]
    assert (job["state"], job["sinks"]) == ("running", [SINK])
    for name in ("plain", "other%3F"):
        status, _, body = await api.send(f"/pipelines/{name}/reconcile", "POST")
        assert (status, body["error"]["what"]) == (409, "`reconcile` of pipeline 'plain' is running")
    # Other commands do not wait for it.
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", prints(STEP))
    assert (await api.send(SAMPLE, "POST"))[0] == 200
    assert (await ended(api, SAMPLE))["state"] == "done"
    await api.get(SAMPLE)  # of several reads of its rows, one is recorded
    status, _, body = await api.send(RECONCILE, "DELETE")
    assert (status, body["job"]["state"], body["job"]["sinks"]) == (200, "cancelled", [SINK])
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", prints(then="time.sleep(600)"))
    assert (await api.send(RECONCILE, "POST"))[2]["job"]["sinks"] == []  # and the node is closed while it runs
    methods = [entry["method"] for entry in read_audit(Path(ready.data_dir) / "audit")]
    assert methods == [
        "reconcile_pipeline", "sample_pipeline", "read_sample", "cancel_reconcile", "reconcile_pipeline",
    ]  # fmt: skip


async def test_a_sample_has_the_options_of_the_request_and_exact_values(
    ready: ReadyNode, run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", prints(STEP))
    api = Api(ready)
    assert (await api.send(f"{SAMPLE}?step=parsed&records=7&limit=2", "POST"))[0] == 200
    job = await ended(api, SAMPLE)
    assert (job["state"], job["parameters"]) == ("done", {"records": "7", "limit": "2", "step": "parsed"})
    (step,) = job["steps"]
    assert step["columns"] == ["x", "y", "z", "t"]
    assert step["rows"] == [["9007199254740993", None, '{"a": [1]}', "text"]]
    assert step["rejections"] == STEP["rejections"]
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", prints(then="sys.exit(str(sys.argv[1:]))"))
    assert (await api.send(f"{SAMPLE}?step=--help", "POST"))[0] == 200
    job = await ended(api, SAMPLE)
    arguments = ["pipeline", "sample", str(run.file), "--json", "--records=100", "--limit=5", "--step=--help"]
    assert (job["state"], job["error"]["what"]) == ("failed", str(arguments))
    assert (await api.send(f"{SAMPLE}?limit=101", "POST"))[0] == 400
    assert (await api.send(f"{SAMPLE}?step=a%00", "POST"))[0] == 200
    assert (await ended(api, SAMPLE))["error"]["what"] == "an option of `sample` contains the character NUL"


async def test_a_job_ends_by_sigterm_and_by_sigkill_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = PipelineCommands({"p": PipelineSection(file=tmp_path / "p.yaml")})
    cleans = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (open('cleaned', 'w').close(), sys.exit()))\n"
    # A child with the same output, as Java of a sample: the job ends when both have ended.
    ignores = (
        "import signal, subprocess\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )

    async def cancelled(program: str, limit_s: float) -> str:
        ready = f"print({json.dumps(json.dumps(STEP))}, flush=True)\ntime.sleep(600)"
        monkeypatch.setattr(pipeline_commands, "_PROGRAM", prints(then=program + ready))
        monkeypatch.setattr(pipeline_commands, "END_S", limit_s)
        commands.start_job(JobKind.SAMPLE, "p", {})
        async with asyncio.timeout(60):
            while not (job := commands.job(JobKind.SAMPLE, "p")) or not job.steps:
                await asyncio.sleep(0.01)
            # The second request does not disturb the end of the process.
            first, second = await asyncio.gather(*(commands.cancel_job(JobKind.SAMPLE, "p") for _ in range(2)))
        assert first is not None
        assert second == first
        return first.state

    assert await cancelled(cleans, 20) == "cancelled"
    assert (tmp_path / "cleaned").exists()
    assert await cancelled(ignores, 0.1) == "cancelled"
    await commands.close()


ERROR = 'print(\'{"error": {"what": "no broker", "why": null, "hint": "start it"}}\', file=sys.stderr)\n'
WATCHES = """
import threading
from penstock.runtime.io.process_end import end_with_parent
end_with_parent()
sys.exit(threading.active_count() != 2)
"""


@pytest.mark.parametrize(
    ("sink", "then", "state", "what"),
    [
        ({}, "", "done", None),
        ({"ok": False, "off": ["batch 3: 1 read"]}, "sys.exit(1)", "done", None),
        ({"ok": False, "off": ["batch 3: 1 read"]}, f"{ERROR}sys.exit(1)", "failed", "no broker"),
        ({}, f"{ERROR}sys.exit(1)", "failed", "no broker"),
        ({}, WATCHES, "done", None),
        ({}, "sys.exit(1)", "failed", "`reconcile` failed with exit status 1, without a message"),
        ({}, "import os; os.kill(os.getpid(), 9)", "failed", "`reconcile` was ended by signal 9 (Killed)"),
        ({}, "print('{}')", "failed", "`reconcile` printed an unknown result"),
        ({}, "print('x' * 9_000_000)", "failed", "the output is larger than 8 MiB"),
    ],
)
async def test_differences_are_a_result_and_an_error_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: dict[str, Any], then: str, state: str, what: str | None
) -> None:
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", prints(SINK | sink, then=then))
    commands = PipelineCommands({"p": PipelineSection(file=tmp_path / "p.yaml")})
    commands.start_job(JobKind.RECONCILE, "p", {})
    task = commands._jobs[JobKind.RECONCILE, "p"].task
    assert task is not None
    await task
    found = commands.job(JobKind.RECONCILE, "p")
    assert found is not None
    assert (found.state, None if found.error is None else found.error.what) == (state, what)
    assert found.sinks[0].off == tuple(sink.get("off", ()))
    await commands.close()
