"""Conversion of mosquitto.conf: what the node does with the result, and the lines that are left out."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.node.config.mosquitto import Conversion, convert
from penstock.node.config.node import NodeConfig, load_config
from penstock.security.policy import Principal
from penstock.security.policy_file import load_policy, parse_policy
from tests.unit.cli.conftest import Command, penstock

__all__ = ["penstock"]

CONF = """\
# a comment
per_listener_settings false
listener 1883 127.0.0.1
max_connections 50
listener 8883
certfile certs/server.pem
keyfile /etc/server.key
cafile ca.pem
require_certificate true
tls_version tlsv1.3
listener 8083 ::1
protocol websockets
websockets_origin https://hmi.example

password_file users
acl_file acl
max_inflight_messages 20
max_queued_messages 0
max_keepalive 3600
persistent_client_expiration 2d
autosave_interval 300
plugin /usr/lib/a.so
plugin_opt_x y
misspelt 1
include_dir conf.d

connection cloud
address cloud.example:8883 other.example
topic plant/# out 1
topic set/# in 2 line/ factory/
topic "" both
remote_username edge
remote_password s3cret word
bridge_cafile ca.pem
notifications true
notification_topic cloud/state
cleansession true
try_private true
"""
ACL = """\
topic read public/#
user ann
topic readwrite plant/#
topic deny plant/payroll/#
topic plain
topic read $SYS/#
topic a/#/b
user b*
topic x
user bob
topic write {a}
topic write bob/#
pattern write devices/%c/state
pattern read users/%u/#
pattern deny users/%u/private
nonsense 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mosquitto.conf").write_text(CONF)
    (tmp_path / "acl").write_text(ACL)
    (tmp_path / "users").write_text("ann:$7$101$salt$hash\nbob:$6$salt$hash\n")
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "more.conf").write_text("max_packet_size 2000\nsys_interval 5\n")
    return tmp_path


def converted(tmp_path: Path, text: str) -> Conversion:
    path = tmp_path / "mosquitto.conf"
    path.write_text(text)
    return convert(path)


def reasons(found: Conversion) -> dict[str, str]:
    joined: dict[str, str] = {}
    for each in found.left_out:
        name = f"{Path(each.file).name}:{each.line}"
        joined[name] = f"{joined[name]}; {each.reason}" if name in joined else each.reason
    return joined


def imported(penstock: Command, folder: Path) -> NodeConfig:
    done = penstock("config", "import", str(folder / "mosquitto.conf"), "--output", str(folder / "out"))
    assert done.status == 0, done.err
    assert not [path for path in (folder / "out").glob("*.yaml") if "&" in path.read_text()]  # no anchors
    return load_config(folder / "out" / "penstock.yaml", {}, {})


def test_listeners_limits_and_bridges_are_those_of_mosquitto(penstock: Command, folder: Path) -> None:
    config = imported(penstock, folder)
    assert (str(config.mqtt.bind), config.mqtt.max_connections, config.mqtt.anonymous) == ("127.0.0.1:1883", 50, None)
    tls, web = config.mqtt.listeners.values()
    assert (str(tls.bind), tls.transport, str(web.bind), web.transport) == ("0.0.0.0:8883", "tls", "[::1]:8083", "ws")
    assert tls.tls is not None
    assert (tls.tls.certificate, tls.tls.key) == (folder / "certs/server.pem", Path("/etc/server.key"))
    assert (tls.tls.client_ca, tls.tls.minimum_version) == (folder / "ca.pem", "1.3")
    assert web.origins == ["https://hmi.example"]
    limits: Any = config.mqtt.limits
    assert (limits.max_inflight, limits.max_keep_alive_s, limits.max_session_expiry_s) == (20, 3600, 172_800)
    assert (limits.max_packet_size, limits.sys_interval_s) == (2000, 5)
    (bridge,) = config.bridges
    settings = bridge.settings()
    assert (settings.url, settings.username, settings.password) == ("mqtts://cloud.example", "edge", "s3cret word")
    assert [(each.local_filter, each.remote_filter, each.direction, each.qos) for each in settings.topics] == [
        ("plant/#", "plant/#", "out", 1),
        ("line/set/#", "factory/set/#", "in", 2),
    ]
    assert (bridge.session_expiry_s, bridge.status_topic, bridge.remote_status_topic) == (
        0,
        "cloud/state",
        "cloud/state",
    )
    assert stat.S_IMODE((folder / "out" / "bridge-cloud.secret").stat().st_mode) == 0o600


def test_access_is_that_of_the_acl_file(penstock: Command, folder: Path) -> None:
    imported(penstock, folder)
    policy = load_policy(folder / "out" / "policies.yaml")
    ann = policy.permissions(Principal(client_id="c1", user="ann"))
    bob = policy.permissions(Principal(client_id="c2", user="bob"))
    nobody = policy.permissions(Principal(client_id="c3"))
    assert all(each.may_connect("c1") for each in (ann, bob, nobody))
    publishes = {
        "plant/1": (True, False, False), "plant/payroll/1": (False, False, False), "plain": (True, False, False),
        "bob/1": (False, True, False), "devices/c2/state": (False, True, False), "$SYS/x": (False, False, False),
    }  # fmt: skip
    found = {topic: tuple(each.may_publish(topic) for each in (ann, bob, nobody)) for topic in publishes}
    assert found == publishes
    receives = {
        "plant/1": (True, False, False), "plant/payroll/1": (False, False, False), "public/a": (False, False, True),
        "users/ann/a": (True, False, False), "users/bob/a": (False, True, False), "$SYS/x": (True, False, False),
        "users/ann/private": (False, False, False),
    }  # fmt: skip
    assert {topic: tuple(each.may_receive(topic) for each in (ann, bob, nobody)) for topic in receives} == receives


def test_denials_win_over_patterns_and_have_no_placeholders(tmp_path: Path) -> None:
    """In Mosquitto, the denials of a user precede all that is allowed to it."""
    acl = (
        "user ann\ntopic deny plant/{line}/payroll\nuser b*\ntopic deny hall/secret\n"
        "pattern read plant/#\npattern read hall/#\npattern read users/%u/#\npattern deny users/%u/a-%c\n"
    )
    (tmp_path / "acl").write_text(acl)
    found = converted(tmp_path, "acl_file acl\n")
    policy = parse_policy(json.dumps(found.policy), "acl")
    ann = policy.permissions(Principal(client_id="c1", user="ann"))
    topics = (
        "plant/{line}/payroll",
        "plant/a",
        "hall/secret",
        "hall/a",
        "users/ann/a-c1",
        "users/ann/a/b",
        "users/x/a",
    )
    assert [ann.may_receive(topic) for topic in topics] == [False, True, False, True, False, True, False]
    assert any(each.line == 2 and "a denial of plant/+/payroll" in each.reason for each in found.left_out)


@pytest.mark.parametrize(
    ("identity", "authentication", "certificates"),
    [("", ["password", "scram"], False), ("use_identity_as_username true\n", None, True),
     ("allow_anonymous true\n", ["anonymous"], False)],
)  # fmt: skip
def test_a_certificate_replaces_the_password_only_where_it_does_in_mosquitto(
    tmp_path: Path, identity: str, authentication: list[str] | None, certificates: bool
) -> None:
    (tmp_path / "acl").write_text("user ann\ntopic a\n")
    listener = "listener 8883\ncertfile a\nkeyfile b\ncafile c\nrequire_certificate true\n"
    found = converted(tmp_path, f"{listener}{identity}acl_file acl\n")
    assert found.config["mqtt"].get("authentication") == authentication
    assert found.policy is not None
    assert ("certificates" in found.policy["rules"][1]["principals"]) == certificates
    assert ("passwords" in found.config["security"]) == (authentication == ["password", "scram"])


def test_directories_that_include_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "a.conf").write_text("include_dir conf.d\n")
    with pytest.raises(ConfigError, match="is not read"):
        converted(tmp_path, "include_dir conf.d\n")


@pytest.mark.parametrize("option", ["password_file", "acl_file"])
def test_a_missing_file_is_named_with_its_line(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"mosquitto\.conf:2: {option}: /none/file cannot be read"):
        converted(tmp_path, f"listener 1883 127.0.0.1\n{option} /none/file\n")


def test_a_file_that_is_no_text_is_an_error_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "mosquitto.conf").write_bytes(b"user \xfc\n")
    with pytest.raises(ConfigError, match=r"why: byte 5 is not UTF-8\n  hint: save the file as UTF-8"):
        convert(tmp_path / "mosquitto.conf")


def test_every_line_that_is_left_out_is_named_with_its_reason(penstock: Command, folder: Path) -> None:
    done = penstock("config", "import", str(folder / "mosquitto.conf"), "--output", str(folder / "out"), "--json")
    rows = [json.loads(line) for line in done.out.splitlines()]
    found = {f"{Path(row['file']).name}:{row['line']}": row["reason"] for row in rows}
    wanted = {
        "mosquitto.conf:12": "browsers also need origins",
        "mosquitto.conf:18": "without a limit",
        "mosquitto.conf:21": "acknowledged messages are on disk",
        "mosquitto.conf:22": "plugins",
        "mosquitto.conf:23": "a plugin",
        "mosquitto.conf:24": "unknown option",
        "mosquitto.conf:28": "cloud.example:8883 is used",
        "mosquitto.conf:31": "maps one topic to another",
        "mosquitto.conf:38": "Retain As Published",
        "acl:4": "it denies to the other users as well",
        "acl:7": "# the last one",
        "acl:8": "would be a pattern",
        "acl:9": "a user that is left out",
        "acl:11": "braces",
        "acl:15": "no placeholders",
        "acl:16": "expected user, topic or pattern",
        "users:1": "(PBKDF2) cannot be converted",
        "users:2": "(SHA-512) cannot be converted",
    }
    assert found.keys() == wanted.keys()
    assert [line for line, reason in wanted.items() if reason not in found[line]] == []
    assert "penstock user create" in done.err
    assert "s3cret" not in done.out + done.err
    assert "$7$" not in done.out


@pytest.mark.parametrize(
    ("text", "anonymous"),
    [
        ("", ["allow"]),
        ("listener 1883\nallow_anonymous true\nlistener 1884\n", ["allow", "allow"]),
        ("per_listener_settings true\nlistener 1883\nallow_anonymous true\nlistener 1884 127.0.0.1\n", ["allow", None]),
        ("listener 1883 127.0.0.1\nlistener 1884 127.0.0.1\nlistener_allow_anonymous true\n", [None, "allow"]),
        ("port 1900\nbind_address localhost\nallow_anonymous true\n", ["allow"]),
        ("listener 0 /run/mosquitto.sock\n", [None]),
    ],
)
def test_anonymous_clients_are_accepted_where_mosquitto_accepts_them(
    penstock: Command, tmp_path: Path, text: str, anonymous: list[str | None]
) -> None:
    (tmp_path / "mosquitto.conf").write_text(text)
    mqtt = imported(penstock, tmp_path).mqtt
    assert [mqtt.anonymous, *(each.anonymous for each in mqtt.listeners.values())] == anonymous


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("listener 0 /run/mosquitto.sock\nmax_connections 5\n", 1, "sockets of the file system"),
        ("listener 0 /run/mosquitto.sock\nmax_connections 5\n", 2, "belongs to a listener or bridge that is left out"),
        ("listener many\n", 1, "invalid literal"),
        ("max_keepalive 70000\n", 1, "mqtt.limits.max_keep_alive_s"),
        ("listener 1\ncafile a\n", 2, "not needed: without require_certificate true no certificate is requested"),
        ("listener 1\ncertfile a\nkeyfile b\ncafile c\n", 4, "certfile must have them, as fullchain.pem"),
        ("listener 1\ncertfile a\nkeyfile b\ncrlfile c\n", 4, "not needed: without require_certificate true"),
        ("pid_file /run/mosquitto.pid\n", 1, "not needed: `penstock status` shows the process id"),
        ("listener 1\ncertfile a\n", 1, "TLS needs certfile and keyfile"),
        ("listener 1\ncertfile a\nkeyfile b\nrequire_certificate true\ncapath c\n", 1, "it is left out"),
        ("connection a\naddress b\n", 1, "a bridge needs address and topic"),
        ("connection a b\naddress c\ntopic d\n", 1, "converted, with the name a-b"),
        ("connection a b\naddress c\ntopic d\nconnection a-b\n", 4, "another bridge has this name"),
        ("connection\naddress c\n", 2, "belongs to a listener or bridge that is left out"),
        ("connection a\nbridge_insecure true\n", 2, "is always checked"),
        ("connection a\naddress b\ntopic c\nremote_username d\n", 1, "belong together"),
        ("connection a\naddress b\ntopic c sideways\n", 3, "expected the direction"),
        ("connection a\nnotifications false\n", 2, "published on this node only"),
        ("connection a\nbridge_protocol_version mqttv311\n", 2, "the other broker must support"),
        ("connection a\nbridge_outgoing_retain false\n", 2, "sent as retained"),
        ("message_size_limit 0\n", 1, "only mqtt.limits.max_packet_size"),
        ("max_inflight_bytes 0\n", 1, "has a default"),
        ("connection a\nstart_type lazy\n", 2, "no such setting"),
        ("plugin /usr/lib/mosquitto_dynamic_security.so\n", 1, "nothing does so here"),
        ("include_dir missing\n", 1, "does not exist"),
        ("allow_anonymous maybe\n", 1, "expected true or false"),
        ("protocol amqp\n", 1, "expected mqtt or websockets"),
        ("persistent_client_expiration soon\n", 1, "expected a number with h, d, w, m or y"),
    ],
)
def test_a_line_that_cannot_be_converted(tmp_path: Path, text: str, line: int, reason: str) -> None:
    assert reason in reasons(converted(tmp_path, text))[f"mosquitto.conf:{line}"]


@pytest.mark.parametrize(
    "before", ["listener 0 /run/mosquitto.sock\n", "connection a\naddress b\ntopic c\n", "connection\n"]
)
def test_options_of_the_broker_may_follow_any_listener_or_bridge(tmp_path: Path, before: str) -> None:
    (tmp_path / "acl").write_text("user ann\ntopic plant/#\n")
    (tmp_path / "users").write_text("ann:$7$1$salt$hash\n")
    text = "password_file users\nacl_file acl\nallow_anonymous true\nmax_keepalive 60\npersistence true\n"
    found = converted(tmp_path, f"listener 1883 127.0.0.1\n{before}{text}")
    assert found.config["security"] == {"passwords": "passwords", "policies": "policies.yaml"}
    assert found.config["mqtt"]["anonymous"] == "allow"
    assert found.config["mqtt"]["limits"] == {"max_keep_alive_s": 60}
    assert found.policy is not None
    assert found.users == ["ann"]
    (line,) = (each for each in found.left_out if each.text == "persistence true")
    assert line.reason.startswith("not needed")
    # With settings of each listener they belong to the last listener, also after a bridge.
    mine = converted(tmp_path, f"per_listener_settings true\nlistener 1883 127.0.0.1\n{before}{text}")
    left_out = before.startswith("listener")
    assert (mine.policy is None, "anonymous" not in mine.config["mqtt"]) == (left_out, left_out)


def test_users_of_one_listener_are_not_those_of_another(tmp_path: Path) -> None:
    """Mosquitto 2.0.11 refuses all clients of the third listener, whose CONNACK is 5 with any user name."""
    (tmp_path / "users").write_text("ann:$7$1$salt$hash\n")
    (tmp_path / "acl").write_text("user ann\ntopic plant/#\n")
    tls = "certfile a\nkeyfile b\ncafile c\nrequire_certificate true\nuse_identity_as_username true\n"
    found = converted(
        tmp_path,
        "per_listener_settings true\nlistener 1883\npassword_file users\nacl_file acl\n"
        "listener 1884 127.0.0.1\nallow_anonymous true\nlistener 1885\n" + f"listener 8883\n{tls}",
    )
    listeners = found.config["mqtt"]["listeners"].values()
    assert [each["bind"] for each in listeners] == ["127.0.0.1:1884", "0.0.0.0:8883"]
    said = reasons(found)
    assert "the users of line 3 could connect: it is left out" in said["mosquitto.conf:7"]
    assert "that of line 4 applies here, too" in said["mosquitto.conf:5"]
    assert "that of line 4 applies here, too" in said["mosquitto.conf:8"]
    assert "mosquitto.conf:2" not in said

    # Without a listener that has users, it has those that are created for the node.
    alone = converted(tmp_path, "per_listener_settings true\nlistener 1885\n")
    assert alone.config["mqtt"]["bind"] == "0.0.0.0:1885"
    # A file of the default listener, which is not opened here.
    unused = converted(tmp_path, "per_listener_settings true\npassword_file users\nlistener 1885\n")
    assert unused.config["mqtt"]["bind"] == "127.0.0.1:1883"


def test_options_of_a_listener_may_follow_a_bridge(tmp_path: Path) -> None:
    tls = "certfile a\nkeyfile b\ncafile c\nrequire_certificate true\n"
    found = converted(tmp_path, f"listener 8883\nconnection d\naddress e\n{tls}topic f\nlistener 1883\nclientid g\n")
    assert {"certificate", "key", "client_ca"} <= found.config["mqtt"]["tls"].keys()
    assert found.config["bridges"][0]["client_id"] == "g"
    assert found.left_out == []


@pytest.mark.parametrize(
    "text",
    [
        "listener 0 /run/mosquitto.sock\nallow_anonymous true\n",
        "allow_anonymous true\nlistener 8883\nrequire_certificate true\ncapath a\n",
        "allow_anonymous true\nport 8883\nrequire_certificate true\ncapath a\n",
        "allow_anonymous true\nlistener 8883\npsk_hint a\npsk_file b\n",
    ],
)
def test_without_a_listener_of_mosquitto_no_anonymous_client_is_accepted(tmp_path: Path, text: str) -> None:
    found = converted(tmp_path, text)
    assert found.config["mqtt"] == {"bind": "127.0.0.1:1883"}
    assert found.config["security"] == {"passwords": "passwords"}
    assert any("no listener is left" in reason for reason in reasons(found).values())


def test_a_name_of_a_bridge_that_is_checked_needs_no_attention(tmp_path: Path) -> None:
    found = converted(tmp_path, "connection a\naddress b:8883\ntopic c\nbridge_cafile ca.pem\nbridge_insecure false\n")
    assert found.left_out == []


@pytest.mark.parametrize("line", ["bridge_capath /etc/ssl/certs", "bridge_capath tls", "bridge_tls_use_os_certs true"])
def test_a_bridge_with_tls_never_connects_without_it(tmp_path: Path, line: str) -> None:
    found = converted(
        tmp_path, f"connection a\naddress b:8883\ntopic c\nremote_username d\nremote_password e\n{line}\n"
    )
    assert [each["url"] for each in found.config["bridges"]] == ["mqtts://b"]
    assert reasons(found).get("mosquitto.conf:6", "").startswith("converted: " if line.endswith(" tls") else "")


def test_a_bridge_with_a_pre_shared_key_is_left_out(tmp_path: Path) -> None:
    found = converted(tmp_path, "connection a\naddress b\ntopic c\nbridge_identity d\nbridge_psk 0123abcd\n")
    assert "bridges" not in found.config
    assert "it is left out" in reasons(found)["mosquitto.conf:1"]


def test_options_with_the_values_of_a_node_need_no_attention(tmp_path: Path) -> None:
    text = "queue_qos0_messages false\nmax_qos 2\nconnection a\naddress b\ntopic c\nstart_type automatic\n"
    found = reasons(converted(tmp_path, f"{text}bridge_protocol_version mqttv50\n"))
    assert found.keys() == {f"mosquitto.conf:{number}" for number in (1, 2, 6, 7)}
    assert all(reason.startswith("not needed") for reason in found.values())


def test_a_line_of_another_file_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    for name in ("a", "b"):
        (tmp_path / name).write_text("user ann\ntopic plant/#\n")
        (tmp_path / "conf.d" / f"{name}.conf").write_text(f"listener 188{ord(name) - 96}\nacl_file {name}\n")
    found = reasons(converted(tmp_path, "per_listener_settings true\ninclude_dir conf.d\n"))
    assert f"{tmp_path / 'conf.d' / 'a.conf'}:2 names a" in found["b.conf:2"]


@pytest.mark.parametrize("before", [True, False])
def test_a_bridge_without_notifications_publishes_none_on_the_other_broker(tmp_path: Path, *, before: bool) -> None:
    lines = ["notifications false\n", "notifications_local_only false\n"]
    lines = lines if before else lines[::-1]
    found = converted(tmp_path, f"connection a\naddress b\ntopic c\nnotification_topic d\n{''.join(lines)}")
    (bridge,) = found.config["bridges"]
    assert (bridge["status_topic"], "remote_status_topic" in bridge) == ("d", False)


def test_secrets_of_plugins_and_bridges_are_not_shown(tmp_path: Path) -> None:
    found = converted(
        tmp_path,
        "plugin_opt_pg_dsn postgres://ann:hidden@db\nauth_opt_conninfo pw=hidden\nplugin_opt_jwt_secret hidden\n"
        "connection a\nbridge_psk hidden\n",
    )
    assert len(found.left_out) == 5
    assert not [each for each in found.left_out if "hidden" in each.text]


def test_nothing_is_overwritten_and_a_dry_run_writes_nothing(penstock: Command, folder: Path) -> None:
    arguments = ("config", "import", str(folder / "mosquitto.conf"), "--output", str(folder / "out"))
    shown = penstock(*arguments, "--dry-run")
    assert (shown.status, (folder / "out").exists(), "s3cret" in shown.err) == (0, False, False)
    assert "bind: 127.0.0.1:1883" in shown.err
    imported(penstock, folder)
    again = penstock(*arguments)
    assert (again.status, "penstock.yaml exists" in again.err) == (2, True)
    missing = penstock("config", "import", str(folder / "none.conf"))
    assert (missing.status, "No such file" in missing.err) == (2, True)
    (folder / "mosquitto.conf").write_text("listener 8080 127.0.0.1\nallow_anonymous true\n")
    invalid = penstock("config", "import", str(folder / "mosquitto.conf"), "--output", str(folder / "other"))
    assert (invalid.status, "is not valid" in invalid.err) == (2, True)
