"""Shell completion of names at a node, and of pipeline files. Administrations are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.bash_completion import join_words, shown
from penstock.cli.node_api import NodeApi
from penstock.errors import UnavailableError
from penstock.security.passwords import edit_passwords, make_credential
from penstock.tube.client import web as tube_web
from tests.ports import free_port
from tests.unit.cli.conftest import BROKER, Command, Web


@pytest.fixture(autouse=True)
def _cluster(web: Web) -> None:
    web.answers = {
        "admin_query_topic_info": [{"topicName": name} for name in ("water", "wind", "heat")],
        "admin_query_sub_info": [{"consumeGroup": "lake"}],
        "admin_query_broker_run_status": [BROKER],
        "admin_query_offset": [{"groupName": "lab"}, {"groupName": "lake"}, {"groupName": "archive"}],
    }


def offered(penstock: Command, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    words = line.split(" ")
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    done = penstock()
    assert (done.status, done.err) == (0, "")
    return done.out.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("penstock tube consume w", ["water", "wind"]),
        ("penstock tube produce ", ["heat", "water", "wind"]),
        ("penstock tube group lag lake --topic h", ["heat"]),
        ("penstock tube offset reset l", ["lab", "lake"]),
        ("penstock tube group describe a", ["archive"]),
        ("penstock tube consume water --group la", ["lab", "lake"]),
        ("penstock pipeline infer --topic w", ["water", "wind"]),
    ],
)
def test_names_are_offered(penstock: Command, monkeypatch: pytest.MonkeyPatch, line: str, names: list[str]) -> None:
    assert offered(penstock, monkeypatch, line) == names


def in_bash(penstock: Command, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """What is offered for the last of the ``words`` into which Bash has split a line."""
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    done = penstock()
    assert (done.status, done.err) == (0, "")
    return done.out.splitlines()


def test_bash_splits_words_at_colons_and_interprets_characters_of_names(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, web: Web
) -> None:
    address = ("penstock", "tube", "topic", "describe", "--http", "edge", ":", "8080")
    assert in_bash(penstock, monkeypatch, *address, "wa") == ["water"]
    assert web.calls[-1][0] == "edge:8080"
    assert in_bash(penstock, monkeypatch, *address[:4], "--http", "=", "other", ":", "1", "wa") == ["water"]
    assert web.calls[-1][0] == "other:1"
    names = ["it's $5", "x:y", "x:z", "ü*"]
    web.answers["admin_query_topic_info"] = [{"topicName": name} for name in names]
    describe = address[:4]
    assert in_bash(penstock, monkeypatch, *describe, "") == [r"it\'s\ \$5", "x:y", "x:z", r"ü\*"]
    assert in_bash(penstock, monkeypatch, *describe, "x", ":") == ["y", "z"]
    assert in_bash(penstock, monkeypatch, *describe, "x", ":", "z") == ["z"]
    assert in_bash(penstock, monkeypatch, *describe, '"it') == [r"it's \$5"]
    assert in_bash(penstock, monkeypatch, *describe, "'x:") == ["x:y", "x:z"]


@pytest.mark.parametrize(
    ("words", "at", "joined"),
    [
        ("penstock kv get", 2, (["penstock", "kv", "get"], 2)),
        ("p --broker mqtt : //h : 1 x", 7, (["p", "--broker", "mqtt://h:1", "x"], 3)),
        ("p --broker mqtt : //h : 1 x", 3, (["p", "--broker", "mqtt://h:1", "x"], 2)),
        ("p --broker = mqtt : //h", 5, (["p", "--broker=mqtt://h"], 1)),
        ("p a := b", 2, (["p", "a:=b"], 1)),
        ("p set a : ", 4, (["p", "set", "a:", ""], 3)),
        ("p set a : b", 4, (["p", "set", "a:b"], 2)),
        ("p", 1, (["p"], 1)),
    ],
)
def test_words_are_joined(words: str, at: int, joined: tuple[list[str], int]) -> None:
    assert join_words(words.split(" "), at) == joined


def test_a_value_after_an_equals_sign_is_completed_without_the_option() -> None:
    assert shown("mqtt://edge", "--broker=mqtt:") == "//edge"
    assert shown("a=b c", "a=") == r"b\ c"
    assert shown("it's", "'i") == r"it'\''s"


def test_the_master_that_the_line_names_is_asked(penstock: Command, monkeypatch: pytest.MonkeyPatch, web: Web) -> None:
    assert offered(penstock, monkeypatch, "penstock tube topic describe --http edge:8080 wa") == ["water"]
    assert web.calls[0][0] == "edge:8080"
    monkeypatch.setenv("PENSTOCK_HTTP", "plant:8080")
    assert offered(penstock, monkeypatch, "penstock tube topic describe wa") == ["water"]
    assert web.calls[1][0] == "plant:8080"


def test_no_completions_are_offered_if_the_master_is_unreachable(
    penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise UnavailableError("no administration of a TubeMQ master answers")

    monkeypatch.setattr(tube_web, "call", away)
    assert offered(penstock, monkeypatch, "penstock tube consume w") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("penstock demo plant --fault d", ["drift", "dead", "duplicate"]),
        (
            "penstock demo plant --fault ",
            ["drift", "stuck", "dead", "burst", "late", "duplicate", "broken", "all", "none", "turns"],
        ),
        ("penstock top --view t", ["topics"]),
        ("penstock up --durability f", ["flushed"]),
        ("penstock up --profile ", ["aio"]),
        ("penstock up --mqtt-anonymous ", ["allow"]),
        ("penstock up --log-format ", ["text", "json"]),
        ("penstock tube broker run --durability m", ["memory"]),
        ("penstock tube broker run --log-level w", ["warning"]),
        ("penstock pipeline submit --deploy-mode c", ["client", "cluster"]),
        ("penstock log level mqtt in", ["info", "inherit"]),
        ("penstock bench pipeline --table-format ", ["delta", "parquet"]),
    ],
)
def test_words_are_offered(penstock: Command, monkeypatch: pytest.MonkeyPatch, line: str, words: list[str]) -> None:
    assert offered(penstock, monkeypatch, line) == words


def test_users_and_parts_of_the_log_are_offered(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    users = tmp_path / "passwords"
    edit_passwords(
        users, lambda _: {name: make_credential(name, b"secret of it") for name in ("alice", "albert", "bob")}
    )
    assert offered(penstock, monkeypatch, f"penstock user update {users} al") == ["albert", "alice"]
    assert offered(penstock, monkeypatch, f"penstock user delete {tmp_path}/none al") == []
    asked = []

    def get(api: NodeApi, path: str, *, timeout_s: float) -> dict[str, object]:
        assert timeout_s <= 1
        asked.append((api.address, path))
        return {"levels": {"all": "info", "mqtt": "info", "mqtt.bridge": "debug", "tube": "info"}}

    monkeypatch.setattr(NodeApi, "get", get)
    assert offered(penstock, monkeypatch, "penstock log level --http edge:8080 mq") == ["mqtt", "mqtt.bridge"]
    monkeypatch.setenv("PENSTOCK_HTTP", "other:8080")
    assert offered(penstock, monkeypatch, "penstock log level mqtt.") == ["mqtt.bridge"]
    assert [address for address, _ in asked] == ["http://edge:8080", "http://other:8080"]
    # A given directory has precedence over the variable, as in the command; no node runs in this one.
    assert offered(penstock, monkeypatch, f"penstock log level --data-dir {tmp_path} mq") == []
    monkeypatch.delenv("PENSTOCK_HTTP")
    assert {path for _, path in asked} == {"log-levels"}
    assert offered(penstock, monkeypatch, "penstock log level mqtt inf") == ["info"]


def test_no_parts_of_the_log_are_offered_without_a_node(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(penstock, monkeypatch, f"penstock log level --http 127.0.0.1:{free_port()} mq") == []


PIPELINE = """\
name: line3
source: {topics: [telemetry]}
dead_letters: {path: dead}
steps:
  - name: readings
    parse: {schema: "bar DOUBLE NOT NULL"}
  - name: warm
    filter: bar > 1
sinks:
  - name: rows
    table: {path: rows, format: parquet}
  - name: messages
    mqtt: {topic: "alarm", value: bar}
"""
CASES = """\
cases:
  - {name: cold, input: [{value: {bar: 1}}], expect: {rows: []}}
  - {name: warm, input: [{value: {bar: 2}}], expect: {rows: [{bar: 2.0}]}}
"""


def test_pipeline_files_and_the_names_in_them_are_offered(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "penstock-pipelines" / "line3").mkdir(parents=True)
    for name, text in {
        "line3.yaml": PIPELINE, "draft.yml": "name: draft\nsinks:\n  -", "more/lamp.yaml": PIPELINE,
        "line3.test.yaml": CASES, "penstock.yaml": "data_dir: data", "notes.txt": PIPELINE,
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    for line, names in {
        "penstock pipeline run ": ["draft.yml", "line3.yaml", "more/lamp.yaml"],
        "penstock pipeline status l": ["line3.yaml"],
        "penstock pipeline reconcile more/": ["more/lamp.yaml"],
        f"penstock pipeline test {tmp_path}/l": [f"{tmp_path}/line3.yaml"],
        "penstock pipeline validate l": ["line3.test.yaml", "line3.yaml"],
        "penstock pipeline apply --rollback l": ["line3.yaml", "line3"],
        "penstock pipeline plan none/": [],
        "penstock pipeline plan ~unknown-user/": [],
        "penstock pipeline sample line3.yaml --step ": ["readings", "warm"],
        "penstock pipeline dead-letter redrive line3.yaml --dry-run --step r": ["readings"],
        "penstock pipeline migrate line3.yaml --sink ": ["rows"],
        "penstock pipeline test line3.yaml --case ": ["cold", "warm"],
        "penstock pipeline test more/lamp.yaml --cases line3.test.yaml --case w": ["warm"],
        "penstock pipeline test more/lamp.yaml --case ": [],
        "penstock pipeline infer --pipeline line3.yaml --from-source s": ["source"],
        "penstock pipeline infer --from-source s": [],
        "penstock pipeline sample draft.yml --step ": [],
        "penstock pipeline sample --step ": [],
    }.items():
        assert offered(penstock, monkeypatch, line) == names, line
