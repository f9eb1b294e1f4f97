"""Messages of refused options: location, path, value, accepted values, the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from penstock.errors import ConfigError
from penstock.runtime.config.loader import load, parse
from penstock.runtime.io.files import Durability


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Listener(Strict):
    bind: str = "127.0.0.1:0"
    advertise: str | None = None

    @field_validator("bind")
    @classmethod
    def _has_port(cls, bind: str) -> str:
        if ":" not in bind:
            raise ValueError("expected HOST:PORT")
        return bind


class Table(Strict):
    kind: Literal["table"]
    path: str


class Store(Strict):
    kind: Literal["store"]
    prefix: str


class Options(Strict):
    given: dict[str, str] = Field(default={}, json_schema_extra={"properties": {"startAt": {"type": "string"}}})


class Example(Strict):
    options: Options = Options()
    durability: Durability = Durability.DURABLE
    mqtt: Listener = Listener()
    port: int = Field(default=1, ge=0, le=65535)
    mode: Literal["fast", "slow"] = "fast"
    topics: dict[str, Listener] = {}
    sinks: list[Annotated[Table | Store, Field(discriminator="kind")]] = []
    either: Listener | int | None = None
    password: int | None = None
    name: str = ""
    folder: Path = Path()


class Required(Strict):
    source: str
    sinks: list[Table]


def refused(text: str, model: type[BaseModel] = Example) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, model, name="f.yaml", environment={})
    return caught.value


def test_a_good_file_becomes_the_model(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(
        "durability: flushed\nmqtt: {bind: '${HOST}:1'}\nport: ${PORT:-7}\nsinks: [{kind: table, path: p}]\n"
    )
    config = load(path, Example, environment={"HOST": "h"})
    assert (config.durability, config.mqtt.bind, config.port) == (Durability.FLUSHED, "h:1", 7)
    assert config.sinks == [Table(kind="table", path="p")]
    assert parse("", Example, name="empty", environment={}) == Example()


CASES = [
    ("port: high\n", "f.yaml:1:7: option 'port': got 'high', expected a whole number", None),
    ("port: 70000\n", "f.yaml:1:7: option 'port': got 70000, expected at most 65535", None),
    ("name: 12\n", "option 'name': got 12, expected text (quote a value that looks like a number)", None),
    ("mqtt:\n  bind: nowhere\n", "f.yaml:2:9: option 'mqtt.bind': got 'nowhere', expected HOST:PORT", None),
    ("folder: [a]\n", "f.yaml:1:9: option 'folder': got a list, expected a path", None),
    ("mqtt: 5\n", "f.yaml:1:7: option 'mqtt': got 5, expected a mapping of options", None),
    ("mode: fats\n", "f.yaml:1:7: option 'mode': got 'fats', expected 'fast' or 'slow'", "did you mean 'fast'?"),
    (
        "durability: durabel\n",
        "option 'durability': got 'durabel', expected 'durable', 'flushed' or 'memory'",
        "did you mean 'durable'?",
    ),
    (
        "mqtt:\n  bnd: x\n",
        "f.yaml:2:3: option 'mqtt.bnd': is not known",
        "did you mean 'bind'?",
    ),
    ("topics: {a: {adverttise: x}}\n", "option 'topics.a.adverttise': is not known", "did you mean 'advertise'?"),
    ("bind: h:1\n", "f.yaml:1:1: option 'bind': is not known", "put it under 'either' or 'mqtt'"),
    ("options: {startat: x}\n", "option 'options.startat': is not known", "put it under 'given'"),
    ("either: {advertize: x}\n", "option 'either.advertize': is not known", "did you mean 'advertise'?"),
    (
        "sinks: [{kind: table, pth: x, path: y}]\n",
        "f.yaml:1:23: option 'sinks[0].pth': is not known",
        "did you mean 'path'?",
    ),
    (
        "sinks:\n- {kind: tabel}\n",
        "f.yaml:2:10: option 'sinks[0].kind': got 'tabel', expected 'table', 'store'",
        "did you mean 'table'?",
    ),
    ("sinks: [{path: x}]\n", "f.yaml:1:9: option 'sinks[0]': 'kind' is missing", "add `kind: ...`"),
    ("sinks: [{kind: table}]\n", "f.yaml:1:9: option 'sinks[0].path': is missing", "add it"),
    ("password: hunter2\n", "f.yaml:1:11: option 'password': got a value that is not shown", None),
    ("port: mqtt://u:hunter2@h\n", "f.yaml:1:7: option 'port': got 'mqtt://***@h', expected", None),
    ("mqtt-: 1\n", "f.yaml:1:1: option 'mqtt-': is not known", "did you mean 'mqtt'?"),
]


class Numbers(Strict):
    wait_s: int = Field(default=1, ge=1)
    segment_bytes: int = 1


def test_an_error_of_a_number_has_the_unit_of_the_option() -> None:
    lines = refused("wait_s: 0\nsegment_bytes: big\n", Numbers).what.splitlines()
    assert lines == [
        "f.yaml:1:9: option 'wait_s': got 0, expected at least 1, in seconds",
        "f.yaml:2:16: option 'segment_bytes': got 'big', expected a whole number, in bytes",
    ]


@pytest.mark.parametrize(("text", "what", "hint"), CASES, ids=[text.strip() for text, _, _ in CASES])
def test_a_refused_option_is_explained(text: str, what: str, hint: str | None) -> None:
    error = refused(text)
    assert what in error.what
    if hint is not None:
        assert hint in str(error)
    assert error.where.startswith("f.yaml:")
    assert "hunter2" not in str(error)


def test_several_errors_come_at_once_in_the_order_of_the_file() -> None:
    error = refused("port: x\nmode: y\nmqtt: {bindd: z}\n")
    assert error.what.splitlines() == [
        "f.yaml:1:7: option 'port': got 'x', expected a whole number",
        "f.yaml:2:7: option 'mode': got 'y', expected 'fast' or 'slow'",
        "f.yaml:3:8: option 'mqtt.bindd': is not known (did you mean 'bind'?)",
    ]


def test_many_errors_are_cut() -> None:
    error = refused("".join(f"a{n}: 1\n" for n in range(30)))
    assert len(error.what.splitlines()) == 11
    assert error.what.endswith("and 20 more")


def test_missing_required_options_are_named() -> None:
    error = refused("", Required)
    assert "f.yaml: option 'source': is missing" in error.what
    assert "option 'sinks': is missing" in error.what
