"""Dead letters of a pipeline in the API of the console: groups, records, correction, redrive, closing, deletion."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.errors import RefusedError, UnavailableError
from penstock.node import pipeline_commands
from penstock.node.config.node import PipelineSection, TopicSection, Tube
from penstock.node.node import ReadyNode
from penstock.node.pipeline_commands import PipelineCommands
from penstock.runtime.observability.audit import read_audit
from penstock.tube.consumer import Consumer
from tests.unit.node.test_api import Api
from tests.unit.node.test_http_access import running
from tests.unit.node.test_node import config
from tests.unit.pipelines.recorded_run import RecordedRun, letter

LETTERS = "/pipelines/plain/dead-letters"
TOPIC = "telemetry"


def dead_run(folder: Path) -> RecordedRun:
    """A finished run with two dead letters of ``TOPIC``."""
    folder.mkdir()
    run = RecordedRun(folder)
    shutil.rmtree(folder / "dead")
    run.commit("dead", 0, [letter(0, topic=TOPIC), letter(1, topic=TOPIC)])
    return run


def read_from(run: RecordedRun, master: str) -> None:
    """Let the pipeline file of ``run`` read ``TOPIC`` from ``master``."""
    text = run.file.read_text(encoding="utf-8")
    run.file.write_text(text.replace("{topics: [t]}", f"{{topics: [{TOPIC}], master: '{master}'}}"), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return dead_run(tmp_path / "run")


@pytest.fixture
async def ready(tmp_path: Path, run: RecordedRun) -> AsyncIterator[ReadyNode]:
    """A node that manages the dead letters of ``run``, and has its topic."""
    pipelines = {"plain": PipelineSection(file=run.file, state_dir=run.state)}
    tube = Tube(topics={TOPIC: TopicSection(partitions=1)})
    async with running(config(tmp_path / "data", pipelines=pipelines, tube=tube)) as found:
        read_from(run, found.tube_master)
        yield found


async def test_a_letter_is_corrected_and_redriven(ready: ReadyNode) -> None:
    api = Api(ready)
    before = (await api.get("/pipelines/plain"))["pipeline"]
    assert (before["managed"], before["open_letters"]) == (True, None)
    status, _, body = await api.send(f"{LETTERS}/correct?id=id-0", "POST", '{"x": 7}')
    assert (status, body) == (200, {"letters": 1, "dry_run": False, "notes": []})
    assert (await api.send(f"{LETTERS}/redrive?id=id-0", "POST"))[2]["letters"] == 1
    async with Consumer(ready.tube_master, "readers", [TOPIC]) as consumer:
        async for message in consumer:
            assert message.record.value == b'{"x": 7}'
            break
    (group,) = (await api.get(LETTERS))["rows"]
    assert (group["step"], group["reason"], group["redriven"], group["open"]) == ("parsed", "not JSON", 1, 1)
    assert (await api.get("/pipelines/plain"))["pipeline"]["open_letters"] == 1
    found = await api.get(f"{LETTERS}/records?limit=1&all=1")
    assert ([row["id"] for row in found["rows"]], found["complete"]) == (["id-0"], False)
    assert (found["rows"][0]["value"], found["rows"][0]["place"]) == ("{0", "telemetry 1:0@0")
    methods = [
        entry["method"] for entry in read_audit(Path(ready.data_dir) / "audit") if "dead_letters" in entry["method"]
    ]
    assert methods == ["correct_dead_letters", "redrive_dead_letters", "read_dead_letters"]


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        ("POST /redrive?step=parsed&dry_run=1", ["redrive", "--state-dir=DIR", "--step=parsed", "--dry-run"]),
        ("POST /discard?id=a&id=--help", ["discard", "--id=a", "--id=--help", "--yes"]),
        ("POST /resolve?step=parsed&dry_run=1", ["resolve", "--step=parsed", "--yes", "--dry-run"]),
        ("POST /reopen?id=a", ["reopen", "--id=a", "--yes"]),
        ("POST /purge?older_than=30d&all=1", ["purge", "--all", "--yes", "--older-than=30d"]),
        ("GET ", ["list", "--all"]),
        ("GET /records?step=parsed&limit=7", ["show", "--limit=8", "--step=parsed"]),
    ],
)
async def test_a_request_is_a_command(
    ready: ReadyNode, run: RecordedRun, monkeypatch: pytest.MonkeyPatch, request_: str, options: list[str]
) -> None:
    """The program prints its arguments."""
    program = "import json, sys; print(json.dumps({'letters': sys.argv[1:]})); print('a note', file=sys.stderr)"
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", (sys.executable, "-c", program))
    method, _, path = request_.partition(" ")
    status, _, body = await Api(ready).send(LETTERS + path, method)
    assert status == 200
    found = body["rows"][0] if method == "GET" else body
    verb, *rest = options
    arguments = ["pipeline", "dead-letter", verb, str(run.file), "--json", *rest]
    wanted = [each.replace("DIR", str(run.state)) for each in arguments]
    assert sorted(found["letters"]) == sorted(wanted)
    assert method == "GET" or body["notes"] == ["a note"]


async def test_a_refusal_has_the_text_of_the_command(ready: ReadyNode, run: RecordedRun) -> None:
    api = Api(ready)
    assert (await api.send(f"{LETTERS}/drop", "POST"))[0] == 404
    status, _, body = await api.send("/pipelines/other/dead-letters")
    assert (status, body["error"]["code"]) == (404, "not_found")
    assert (await Api(ready, "").send(f"{LETTERS}/redrive", "POST"))[0] == 401
    status, _, body = await api.send(f"{LETTERS}/redrive?id=--help", "POST")
    assert (status, body["error"]["what"]) == (409, "no dead letter has the id '--help'")
    assert "penstock pipeline dead-letter show" in body["error"]["hint"]
    run.file.write_text("name: [")
    status, _, body = await api.send(LETTERS)
    assert status == 409
    assert "p.yaml" in body["error"]["what"]


async def test_the_plan_of_a_changed_file_is_that_of_the_command(
    ready: ReadyNode, run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1 with a plan means that a run could not continue; without one the command failed."""
    program = (
        "import json, sys\n"
        "change = {'mark': '!', 'what': 'sink rows', 'text': ' '.join(sys.argv[1:])}\n"
        "print(json.dumps({'pipeline': 'plain', 'queries': [], 'changes': [change]}))\n"
        "sys.exit(1)"
    )
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", (sys.executable, "-c", program))
    found = await Api(ready).get("/pipelines/plain/plan")
    arguments = f"pipeline plan {run.file} --json --state-dir={run.state}"
    assert found == {"pipeline": "plain", "changes": [{"mark": "!", "what": "sink rows", "text": arguments}]}
    assert (await Api(ready, "").send("/pipelines/plain/plan"))[0] == 401
    assert (await Api(ready).send("/pipelines/other/plan"))[0] == 404
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", (sys.executable, "-c", "import sys; sys.exit('no file')"))
    status, _, body = await Api(ready).send("/pipelines/plain/plan")
    assert (status, body["error"]["what"]) == (409, "no file")


async def test_a_command_that_hangs_or_prints_too_much_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = PipelineCommands({"p": PipelineSection(file=tmp_path / "p.yaml")})
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", (sys.executable, "-c", "input()"))
    monkeypatch.setattr(pipeline_commands, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(pipeline_commands, "_write", lambda *_: _nothing())
    with pytest.raises(UnavailableError, match="took longer than"):
        await found.dead_letters("p", "list", [])
    monkeypatch.setattr(pipeline_commands, "TIMEOUT_S", 60)
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", (sys.executable, "-c", "while True: print('x' * 65536)"))
    monkeypatch.setattr(pipeline_commands, "MAX_OUTPUT", 1 << 20)
    with pytest.raises(UnavailableError, match="larger than 1 MiB"):
        await found.dead_letters("p", "list", [])
    missing = PipelineCommands({"p": PipelineSection(file=tmp_path / "none" / "p.yaml")})
    with pytest.raises(RefusedError, match="cannot run in"):
        await missing.dead_letters("p", "list", [])


@pytest.mark.parametrize("given", ["s3://lake/state", Path("/state")])
async def test_the_state_directory_of_a_command_is_that_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | Path
) -> None:
    section = PipelineSection(file=tmp_path / "p.yaml", state_dir=given)
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    monkeypatch.setattr(pipeline_commands, "_PROGRAM", (sys.executable, "-c", program))
    commands = PipelineCommands({"p": section})
    found: object = await commands.plan("p")
    assert found == ["pipeline", "plan", str(section.file), "--json", f"--state-dir={given}"]
    await commands.close()


async def _nothing() -> None:
    pass
