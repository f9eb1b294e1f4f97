"""`penstock kv`: arguments to calls, answers to output and exit status. The store is a stand-in."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError, RefusedError, UnavailableError
from penstock.statestore.client import client as statestore
from penstock.statestore.client.client import Condition, Entry, KeyChange, SetResult
from penstock.statestore.client.observations import Observation
from penstock.statestore.hlc import Hlc
from tests.unit.cli.conftest import Command

VERSION = Hlc(1_700_000_000_000, 1, "StateStore")
TEXT = str(VERSION)
PLAIN = {"condition": Condition.ALWAYS, "ttl_ms": None, "fencing_token": None, "persist": False, "fence_prefix": None}
START = "start a node (penstock up), or set the address of its MQTT listener: --broker mqtt://HOST:PORT"
DIRECTORY = ", or the data directory of a node that runs here: PENSTOCK_DATA_DIR=DIR"


class Store:
    """Stands in for StateStoreClient: remembers the calls, gives the answers that the test set."""

    def __init__(self) -> None:
        self.url = ""
        self.options: dict[str, Any] = {}
        self.calls: list[tuple[str, Any]] = []
        self.entry: Entry | None = None
        self.applied = True
        self.deleted = 1
        self.changes: list[KeyChange] = []
        self.error: Exception | None = None

    def connect(self, url: str, *, client_id: str, **options: Any) -> contextlib.AbstractAsyncContextManager[Store]:
        assert client_id.startswith("penstock-kv-")
        self.url = url
        self.options = options

        @contextlib.asynccontextmanager
        async def session() -> AsyncIterator[Store]:
            if self.error is not None:
                raise self.error
            yield self

        return session()

    async def get(self, key: bytes) -> Entry | None:
        self.calls.append(("get", key))
        return self.entry

    async def set(self, key: bytes, value: bytes, **options: Any) -> SetResult:
        self.calls.append(("set", (key, value, options)))
        return SetResult(self.applied, VERSION)

    async def delete(self, key: bytes, *, fencing_token: Hlc | None) -> int:
        self.calls.append(("delete", (key, fencing_token)))
        return self.deleted

    @contextlib.asynccontextmanager
    async def observe(self, key: bytes) -> AsyncIterator[Observation]:
        self.calls.append(("observe", key))
        observation = _Interrupted(self.entry)
        for change in self.changes:
            observation.put(change)
        yield observation

    def on_lost(self, hook: Callable[[PenstockError], None]) -> None:
        self.lost = hook

    def on_restored(self, hook: Callable[[bool], None]) -> None:
        self.restored = hook


class _Interrupted(Observation):
    """Ends with Ctrl-C."""

    async def __anext__(self) -> KeyChange:
        if not self._changes:
            raise KeyboardInterrupt
        return await super().__anext__()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(statestore, "StateStoreClient", store)
    return store


def test_get_writes_the_value_as_it_is(store: Store, penstock: Command) -> None:
    store.entry = Entry(b"42", VERSION)
    assert penstock("kv", "get", "k") == (0, "42", "")
    assert (store.url, store.calls) == ("mqtt://127.0.0.1:1883", [("get", b"k")])
    done = penstock("kv", "get", "k", "--json", "--broker", "mqtt://edge:1")
    assert json.loads(done.out) == {"key": "k", "found": True, "value": "42", "version": TEXT}
    assert store.url == "mqtt://edge:1"


def test_a_missing_key_is_status_1(store: Store, penstock: Command) -> None:
    assert penstock("kv", "get", "k\x1b") == (1, "", "penstock: key 'k\\x1b' does not exist\n")
    done = penstock("kv", "get", "k", "--json")
    assert (done.status, json.loads(done.out)) == (1, {"key": "k", "found": False, "value": None, "version": None})
    store.deleted = 0
    assert penstock("kv", "del", "k") == (1, "", "penstock: key 'k' does not exist\n")
    done = penstock("kv", "del", "k", "--json")
    assert (done.status, json.loads(done.out)) == (1, {"key": "k", "deleted": 0})


def test_the_broker_comes_from_the_environment_too(
    store: Store, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_BROKER", "mqtt://there:2")
    penstock("kv", "get", "k")
    assert store.url == "mqtt://there:2"


def test_set_prints_the_version(store: Store, penstock: Command) -> None:
    assert penstock("kv", "set", "k", "v") == (0, TEXT + "\n", "")
    assert store.calls == [("set", (b"k", b"v", {**PLAIN}))]
    done = penstock("kv", "set", "k", "v", "--json")
    assert json.loads(done.out) == {"key": "k", "applied": True, "version": TEXT}


@pytest.mark.parametrize(("flag", "condition"), [("--nx", Condition.NX), ("--nex", Condition.NEX)])
def test_a_condition_that_is_not_met_is_status_1(
    store: Store, penstock: Command, flag: str, condition: Condition
) -> None:
    store.applied = False
    done = penstock("kv", "set", "k", "v", flag, "--ttl", "500ms", "--fencing-token", TEXT)
    assert (done.status, done.out) == (1, "")
    assert done.err == (
        f"penstock: key 'k' was not set\n  why: the condition {flag} is not met; the key has version {TEXT}\n"
    )
    assert store.calls[0][1][2] == {**PLAIN, "condition": condition, "ttl_ms": 500, "fencing_token": VERSION}
    assert json.loads(penstock("kv", "set", "k", "v", flag, "--json").out)["applied"] is False


def test_the_value_may_come_from_a_file_or_from_standard_input(store: Store, penstock: Command, tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(b"\x00\xff\n")
    assert penstock("kv", "set", "k", "--file", str(path)).status == 0
    assert penstock("kv", "set", "k", stdin=b"\xfepiped\n").status == 0
    assert penstock("kv", "set", "k", "--file", "-", stdin=b"\xfedash\n").status == 0
    assert [call[1][1] for call in store.calls] == [b"\x00\xff\n", b"\xfepiped\n", b"\xfedash\n"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["k"], "kv set: no value"),
        (["k", "v", "--file", "f"], "a VALUE and --file exclude each other"),
        (["k", "--file", "/nonexistent/f"], "kv set: --file /nonexistent/f: No such file"),
        (["k", "v", "--nx", "--nex"], "--nx and --nex exclude each other"),
        (["k", "v", "--ttl", "0"], "Invalid value for '--ttl'"),
        (["k", "v", "--fencing-token", "x"], "--fencing-token: got 'x', expected a version"),
    ],
)
def test_misuse_of_set_is_exit_status_2_without_a_request(
    store: Store, penstock: Command, args: list[str], message: str
) -> None:
    done = penstock("kv", "set", *args)
    assert (done.status, done.out, store.calls) == (2, "", [])
    assert message in done.err


def test_del(store: Store, penstock: Command) -> None:
    assert penstock("kv", "del", "k", "--fencing-token", TEXT) == (0, "", "")
    assert store.calls == [("delete", (b"k", VERSION))]


def test_watch_prints_changes_until_it_is_interrupted(store: Store, penstock: Command) -> None:
    store.changes = [
        KeyChange(b"k", "SET", b"a\nb", VERSION),
        KeyChange(b"k", "DELETE", None, None, missed=True),
        KeyChange(b"k", "SET", b"c", VERSION),
    ]
    assert penstock("kv", "watch", "k") == (
        0,
        f"SET     {TEXT}  a\\nb\nDELETE  -\nSET     {TEXT}  c\n",
        "watching 'k', interrupt with Ctrl-C\n",
    )
    done = penstock("kv", "watch", "k", "--count", "2", "--json")
    assert [json.loads(line) for line in done.out.splitlines()] == [
        {"key": "k", "operation": "SET", "value": "a\nb", "version": TEXT, "missed": False},
        {"key": "k", "operation": "DELETE", "value": None, "version": None, "missed": True},
    ]


def test_watch_reports_outages_on_standard_error(
    store: Store, penstock: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    store.entry = Entry(b"a\nb", VERSION)
    assert penstock("kv", "watch", "k").status == 0
    for _ in range(2):  # a connection that is lost again before all is observed is one outage
        store.lost(UnavailableError("mqtt: the connection was lost"))
    store.restored(True)
    store.lost(UnavailableError("mqtt: the connection was lost"))
    store.restored(False)
    holds = f"'k' now holds a\\nb  {TEXT}\n"
    assert re.sub(r"after [\d.]+ s", "after N s", capsys.readouterr().err) == (
        "penstock: mqtt: the connection was lost; reconnecting\n"
        f"reconnected after N s: no change was missed\n{holds}"
        "penstock: mqtt: the connection was lost; reconnecting\n"
        f"reconnected after N s: only the last of the missed changes is printed\n{holds}"
    )
    store.entry = None
    assert penstock("kv", "watch", "k").status == 0
    store.restored(False)
    assert capsys.readouterr().err.endswith("'k' now does not exist\n")


@pytest.mark.parametrize(
    "error",
    [UnavailableError("mqtt: no connection", why="refused", hint=START), RefusedError("state store: no", hint="ask")],
)
def test_errors_of_the_state_store_are_exit_status_1(store: Store, penstock: Command, error: Exception) -> None:
    store.error = error
    done = penstock("kv", "get", "k")
    expected = f"penstock: {error}\n".replace(START, START + DIRECTORY)
    assert (done.status, done.out, done.err) == (1, "", expected)


def test_the_hint_names_the_option_if_no_broker_answers(penstock: Command) -> None:
    done = penstock("kv", "get", "k", "--broker", "mqtt://127.0.0.1:1")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("penstock: mqtt: no connection to 127.0.0.1:1\n  why: ")
    assert done.err.endswith(f"  hint: {START}\n")


def test_keys_that_are_no_text_are_given_in_base64(store: Store, penstock: Command) -> None:
    store.entry = Entry(b"\xff", VERSION)
    done = penstock("kv", "get", "AP8=", "--base64", "--json")
    assert store.calls == [("get", b"\x00\xff")]
    assert json.loads(done.out) == {
        "key": None,
        "key_base64": "AP8=",
        "found": True,
        "value": None,
        "value_base64": "/w==",
        "version": TEXT,
    }
    for bad in ("?", "A"):
        done = penstock("kv", "get", bad, "--base64")
        assert (done.status, done.err.split("\n")[0]) == (2, f"penstock: KEY: '{bad}' is not base64")
    assert penstock("kv", "get", "").err.startswith("penstock: KEY is empty")


def test_get_writes_to_a_file(store: Store, penstock: Command, tmp_path: Path) -> None:
    store.entry = Entry(b"\x00\n", VERSION)
    assert penstock("kv", "get", "k", "--file", str(tmp_path / "v")) == (0, "", "")
    assert (tmp_path / "v").read_bytes() == b"\x00\n"
    assert penstock("kv", "get", "k", "--file", "-") == (0, "\x00\n", "")
    done = penstock("kv", "get", "k", "--file", str(tmp_path / "none" / "v"))
    assert (done.status, "No such file" in done.err) == (2, True)


def test_the_connection_is_described_once_for_every_command(store: Store, penstock: Command, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret\nmore\n")
    args = ["--username", "u", "--password-file", str(secret), "--ca-file", "ca.pem", "--timeout", "2.5"]
    penstock("kv", "del", "k", "--broker", "mqtts://edge", *args)
    tls = store.options.pop("tls")
    assert (tls.ca_file, tls.cert_file) == (Path("ca.pem"), None)
    login = {"username": "u", "password": "s3cret", "authentication": None}
    assert store.options == {"timeout_s": 2.5, "session_expiry_s": 300, **login}
    penstock("kv", "del", "k", "--broker", "mqtt://u:p@edge", "--scram")
    assert store.options["authentication"].method == "SCRAM-SHA-256"
    assert (store.options["username"], store.options["password"]) == (None, None), "it is proved, not sent"
    done = penstock("kv", "del", "k", "--scram", "--username", "u")
    assert (done.status, "--scram needs a user name and a password" in done.err) == (2, True)
    done = penstock("kv", "del", "k", "--password-file", "/nonexistent/p")
    assert done.status == 2
    assert done.err == (
        "penstock: --password-file: '/nonexistent/p' cannot be read\n  why: No such file or directory\n"
        "  hint: use a file that this user can read, on each machine that needs it; its first line is the password\n"
    )


def test_a_user_name_and_a_password_need_each_other(store: Store, penstock: Command, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret\n")
    done = penstock("kv", "del", "k", "--username", "u")
    assert (done.status, "--username 'u' is set without a password" in done.err) == (2, True)
    done = penstock("kv", "del", "k", "--password-file", str(secret))
    assert (done.status, "--password-file is set without a user name" in done.err) == (2, True)
    assert penstock("kv", "del", "k", "--broker", "mqtt://u@edge").status == 2
    assert penstock("kv", "del", "k", "--broker", "mqtt://u@edge", "--password-file", str(secret)).status == 0
    assert penstock("kv", "del", "k", "--broker", "mqtt://u:p@edge").status == 0


@pytest.mark.parametrize("code", [0x86, 0x87])
def test_a_refused_login_names_the_options(store: Store, penstock: Command, code: int) -> None:
    store.error = RefusedError("mqtt: edge:1883 refused CONNECT", code=code, hint="ask")
    done = penstock("kv", "get", "k")
    assert done.status == 1
    for name in ("--username", "--password-file", "PENSTOCK_USERNAME", "--cert-file"):
        assert name in done.err


def test_a_login_that_the_policy_refuses_names_policy_and_client_id(
    store: Store, penstock: Command, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret\n")
    store.error = RefusedError("mqtt: edge:1883 refused CONNECT", code=0x87)
    for login in (
        ("--username", "u", "--password-file", str(secret)),
        ("--broker", "mqtt://u:p@edge"),
        ("--broker", "mqtts://edge", "--cert-file", "client.pem"),
    ):
        done = penstock("kv", "get", "k", *login)
        assert done.status == 1
        assert "policy grants Connect" in done.err
        assert "--client-id" in done.err


def test_a_request_that_the_policy_refuses_keeps_its_hint(store: Store, penstock: Command) -> None:
    store.error = error = RefusedError("mqtt: edge:1883 refused", code=0x87, hint="grant Subscribe on 'clients/#'")
    error.needs_grant = True
    assert "hint: grant Subscribe on 'clients/#'" in penstock("kv", "get", "k").err


def test_a_watched_key_that_looks_like_a_pattern(store: Store, penstock: Command) -> None:
    done = penstock("kv", "watch", "plant/alarm/*", "--count", "1")
    assert "KEY is not a pattern; to watch every key that begins with 'plant/alarm/' use --prefix" in done.err
    assert "no pattern" not in penstock("kv", "watch", "plant/alarm", "--count", "1").err


def test_the_token_comes_from_the_environment_too(
    store: Store, penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_FENCING_TOKEN", TEXT)
    penstock("kv", "set", "k", "v", "--persist")
    assert store.calls[0][1][2] == {**PLAIN, "fencing_token": VERSION, "persist": True}
