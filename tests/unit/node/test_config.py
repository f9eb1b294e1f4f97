"""Configuration of a node: defaults, the order of precedence, and what a refused option says."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.node.config.node import OPTIONS, NodeConfig, TopicSection, load_config
from penstock.node.config.template import Template
from penstock.runtime.io.files import Durability
from penstock.runtime.io.network import Address
from penstock.runtime.observability.logs import LogLevel


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "penstock.yaml") -> Path:
    path = Path.cwd() / name
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults() -> None:
    config = load_config(None, {}, {})
    assert config == NodeConfig()
    assert str(config.data_dir) == "penstock-data"
    assert config.durability is Durability.DURABLE
    listeners = (config.mqtt, config.tube_master, config.tube_broker, config.tube_broker_http, config.http)
    assert [str(listener.bind) for listener in listeners] == [
        "127.0.0.1:1883", "127.0.0.1:8715", "127.0.0.1:8123", "127.0.0.1:8081", "127.0.0.1:8080",
    ]  # fmt: skip
    assert config.topics() == {}


def test_a_whole_file() -> None:
    path = write(
        """
data_dir: data
durability: flushed
mqtt: 127.0.0.1:0
tube_master: {bind: "0.0.0.0:8715", advertise: "edge-1:8715"}
tube_broker:
  bind: "[::1]:0"
tube:
  broker_id: 7
  topics:
    water: {partitions: 2, stores: 2}
    plain:
rules:
  - filter: plants/+/flow
    topic: water
    key: "{level.2}"
    partition: 10001
  - {filter: "#", topic: everything}
log_level: debug
""",
        "other.yaml",
    )
    config = load_config(path, {}, {})
    assert config.data_dir == Path.cwd() / "data"
    assert config.mqtt.bind == Address("127.0.0.1", 0)
    assert config.tube_master.advertise == Address("edge-1", 8715)
    assert config.tube_broker.bind == Address("::1", 0)
    assert config.tube.topics == {"water": TopicSection(partitions=2, stores=2), "plain": TopicSection()}
    assert config.topics() == {
        "water": TopicSection(partitions=2, stores=2),
        "plain": TopicSection(),
        "everything": TopicSection(),
    }
    assert config.rules[0].key == Template("{level.2}")
    assert config.rules[1].msg_type == Template("{level.-1}")
    assert config.log_level is LogLevel.DEBUG


def test_the_administration_token_may_be_set_but_not_to_a_known_one() -> None:
    assert NodeConfig().tube.admin_token is None
    write("tube: {admin_token: '${TOKEN}'}\n")
    assert load_config(None, {}, {"TOKEN": "t"}).tube.admin_token == "t"
    for known in ("abc", "ASDFGHJKL"):
        with pytest.raises(ConfigError, match=r"tube\.admin_token: this token is in TubeMQ's documentation"):
            load_config(None, {}, {"TOKEN": known})
    with pytest.raises(ConfigError, match="got a value that is not shown"):
        load_config(None, {}, {"TOKEN": "t" * 200})


def test_flag_then_variable_then_file_then_default() -> None:
    write("durability: flushed\nmqtt: 127.0.0.1:1\nhttp: {bind: 127.0.0.1:2, advertise: edge:3}\n")
    assert load_config(None, {}, {}).durability is Durability.FLUSHED
    environment = {"PENSTOCK_DURABILITY": "memory", "PENSTOCK_MQTT_ADVERTISE": "edge:9", "PENSTOCK_HTTP": ""}
    config = load_config(None, {}, environment)
    assert config.durability is Durability.MEMORY
    assert (config.mqtt.bind, config.mqtt.advertise) == (Address("127.0.0.1", 1), Address("edge", 9))
    assert config.http.bind == Address("127.0.0.1", 2)
    config = load_config(None, {"durability": "durable", "http": "127.0.0.1:5"}, environment)
    assert config.durability is Durability.DURABLE
    assert (config.http.bind, config.http.advertise) == (Address("127.0.0.1", 5), Address("edge", 3))


def paths_of(value: object) -> list[Path]:
    """All paths in a configuration, as ``model_dump`` gives it."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [path for each in value for path in paths_of(each)]
    return [value] if isinstance(value, Path) else []


@pytest.mark.parametrize(
    ("given", "found"),
    [("s3://lake/state", "s3://lake/state"), ("s3a://lake/state", "s3a://lake/state"), ("state", Path("etc/state"))],
)
def test_the_state_directory_of_a_pipeline_may_be_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, found: object
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("etc").mkdir()
    Path("etc/penstock.yaml").write_text(f"pipelines: {{lake: {{file: lake.yaml, state_dir: {given}}}}}\n")
    assert load_config(Path("etc/penstock.yaml"), {}, {}).pipelines["lake"].state_dir == found


def test_relative_paths_of_the_file_start_at_its_directory(tmp_path: Path) -> None:
    tls = "{certificate: c, key: k, client_ca: a, revoked: r}"
    (tmp_path / "etc").mkdir()
    path = write(
        f"data_dir: d\nmqtt:\n  transport: tls\n  tls: {tls}\n"
        f"  listeners: {{more: {{bind: '127.0.0.1:0', transport: tls, tls: {tls}}}}}\n"
        "security: {passwords: p, tokens: t, policies: /abs/policies}\n"
        "tube: {access: {groups: [g]}, tls: {certificate: c, key: k, client_ca: a}}\n"
        "bridges: [{name: b, url: 'mqtts://h', password_file: w, tls: {ca: a, certificate: c, key: k},"
        " topics: [{filter: x}]}]\n",
        "etc/penstock.yaml",
    )
    found = paths_of(load_config(path.relative_to(tmp_path), {}, {}).model_dump())
    beside = [path for path in found if path.parent == Path("etc")]
    assert (len(beside), [path for path in found if path not in beside]) == (18, [Path("/abs/policies")])
    assert load_config(path, {"data-dir": "mine"}, {}).data_dir == Path("mine")


def test_every_option_of_the_command_line_exists_and_has_a_variable() -> None:
    values = {"profile": "aio", "data-dir": "d", "durability": "memory", "log-level": "error", "log-format": "json"}
    values |= {option.flag: "allow" for option in OPTIONS if option.flag.endswith("-anonymous")}
    flags = {option.flag: values.get(option.flag, f"h:{port}") for port, option in enumerate(OPTIONS, 1)}
    variables = {option.variable: flags[option.flag] for option in OPTIONS}
    assert load_config(None, flags, {}) == load_config(None, {}, variables)
    assert {"PENSTOCK_DATA_DIR", "PENSTOCK_TUBE_BROKER_HTTP", "PENSTOCK_TUBE_BROKER_ADVERTISE"} <= set(variables)


REFUSED = [
    ("mqtt: localhost\n", "penstock.yaml:1:7: option 'mqtt': got 'localhost', expected HOST:PORT"),
    ("mqtt:\n  bind: 1883\n", "penstock.yaml:2:9: option 'mqtt.bind': got 1883, expected HOST:PORT"),
    ("durability: sometimes\n", "got 'sometimes', expected 'durable', 'flushed' or 'memory'"),
    ("datadir: x\n", "penstock.yaml:1:1: option 'datadir': is not known"),
    (
        "rules:\n- filter: 'a/#/b'\n  topic: tt\n",
        "penstock.yaml:2:11: option 'rules[0].filter': got 'a/#/b', expect",
    ),
    ("rules: [{filter: $share/g/a, topic: tt}]\n", "expected a topic filter without a shared"),
    ("rules: [{filter: a, topic: a-b}]\n", "option 'rules[0].topic': got 'a-b', expected a TubeMQ topic: a letter"),
    (
        "rules: [{filter: a, topic: tt, key: '{nope}'}]\n",
        "option 'rules[0].key': got '{nope}', expected one of",
    ),
    ("rules: [{topic: tt}]\n", "option 'rules[0].filter': is missing"),
    ("rules: [{filter: a, topic: tt, partition: 3}]\n", "rules[0].partition: topic 'tt' has partitions 0 to 2"),
    ("tube: {topics: {'1x': {}}}\n", "got '1x', expected a TubeMQ topic"),
    ("tube: {topics: {tt: {partitions: 0}}}\n", "option 'tube.topics.tt.partitions': got 0, expected at least"),
    ("tube: {topics: {tt: {retention: 3 days}}}\n", "option 'tube.topics.tt.retention': got '3 days'"),
    ("tube: {max_store_bytes: 5}\n", "option 'tube.max_store_bytes': got 5, expected at least"),
    ("tube_broker: '0.0.0.0:8123'\n", "set tube_broker.advertise (--tube-broker-advertise HOST:PORT)"),
    ("http: {advertise: '0.0.0.0:80'}\n", "no client can connect to every interface"),
    ("http: {url: console.example}\n", "expected https://HOST[:PORT]/[PATH/]"),
    ("http: {url: 'https://ada:secret@console.example/'}\n", "expected https://HOST[:PORT]/[PATH/]"),
    ("http: {url: 'https://console.example:0/'}\n", "expected https://HOST[:PORT]/[PATH/]"),
    ("http: {url: 'https://[console/'}\n", "expected https://HOST[:PORT]/[PATH/]"),
    (
        "mqtt: {listeners: {second: {bind: '127.0.0.1:1883'}}}\n",
        "mqtt.listeners.second: 127.0.0.1:1883 is in use by `mqtt` (127.0.0.1:1883): each needs a port of its own",
    ),
    ("http: '0.0.0.0:8715'\n", "tube_master: 127.0.0.1:8715 is in use by `http` (0.0.0.0:8715)"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text.strip() for text, _ in REFUSED])
def test_a_refused_option_names_its_location_and_accepted_values(text: str, message: str) -> None:
    write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {})
    assert message in caught.value.what


def test_the_same_port_at_other_addresses_is_accepted() -> None:
    write(
        "mqtt: {bind: '127.0.0.1:0', listeners: {v6: {bind: '[::1]:1883'}, all6: '[::]:1884'}}\nhttp: 127.0.0.1:1883\n"
    )
    assert load_config(None, {"tube-broker": "127.0.0.1:0", "tube-master": "127.0.0.1:0"}, {}).http.bind.port == 1883


def test_a_refused_flag_or_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--mqtt: option 'mqtt\.bind': got 'x', expected HOST:PORT"):
        load_config(None, {"mqtt": "x"}, {})
    with pytest.raises(ConfigError, match="PENSTOCK_DURABILITY: option 'durability': got 'x', expected 'durable'"):
        load_config(None, {}, {"PENSTOCK_DURABILITY": "x"})
    with pytest.raises(ConfigError, match="--data-dir: the data directory is empty"):
        load_config(None, {"data-dir": " "}, {})


def test_a_file_that_is_asked_for_must_exist() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(Path("absent.yaml"), {}, {})


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("mqtt: {listen: 127.0.0.1:1883}", "did you mean 'bind'?"),
        ("mqtt: {lisen: 127.0.0.1:1883}", "did you mean 'bind'?"),
        ("mqtt: {port: 1883}", "did you mean 'bind'?"),
        ("http: {address: 127.0.0.1:8080}", "did you mean 'bind'?"),
        ("tube: {retention: 12h}", "did you mean tube.topics.NAME.retention?"),
        ("mqtt: {limits: {max_queued_mesages: 5}}", "did you mean 'max_queued_messages'?"),
    ],
)
def test_a_misspelt_or_misplaced_option_has_a_short_error_with_a_suggestion(
    tmp_path: Path, text: str, suggestion: str
) -> None:
    (tmp_path / "penstock.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "penstock.yaml", {}, {})
    assert caught.value.what.endswith("is not known")
    assert caught.value.hint == suggestion
