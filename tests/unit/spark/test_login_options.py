from __future__ import annotations

import pickle

import pytest

from penstock.errors import ConfigError
from penstock.runtime.io.tls import ANONYMOUS_LOGIN, Login, TlsOptions
from penstock.spark.mqtt.options import MqttReadOptions
from penstock.spark.tube.options import SinkOptions, SourceOptions

SOURCE = {"tubemq.master": "127.0.0.1:8715", "subscribe": "a"}
SINK = {"tubemq.master": "127.0.0.1:8715", "topic": "a"}
USER = {"tubemq.user": "edge", "tubemq.passwordfile": "/p"}


def test_source_and_sink_take_the_same() -> None:
    assert SourceOptions.parse(SOURCE).login == SinkOptions.parse(SINK).login == ANONYMOUS_LOGIN
    for given, login in (
        (USER, Login("edge", "/p")),
        ({"tubemq.tls": "true"}, Login(tls=TlsOptions())),
        ({"tubemq.tlsca": "/ca.pem"}, Login(tls=TlsOptions("/ca.pem"))),
        (USER | {"tubemq.tlsCert": "/c", "tubemq.tlsKey": "/k"}, Login("edge", "/p", TlsOptions(None, "/c", "/k"))),
        ({"tubemq.tlsCa": "/ca.pem", "tubemq.tls": "false"}, ANONYMOUS_LOGIN),
    ):
        source = SourceOptions.parse(SOURCE | given)
        assert source.login == SinkOptions.parse(SINK | given).login == login
        # Driver and executors get the options pickled.
        assert pickle.loads(pickle.dumps(source)) == source
    through = MqttReadOptions.parse({"tubemq.master": "127.0.0.1:8715", "tubemq.topic": "a", **USER})
    assert through.tube.login == Login("edge", "/p")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tubemq.user": "edge"}, "a user and a password file must be set together"),
        ({"tubemq.tls": "perhaps"}, "tubemq.tls 'perhaps'"),
        ({"tubemq.tlsCA2": "x"}, "has no option"),
    ],
)
def test_invalid_login_options_are_refused(given: dict[str, str], message: str) -> None:
    for parse, base in ((SourceOptions.parse, SOURCE), (SinkOptions.parse, SINK)):
        with pytest.raises(ConfigError, match=message):
            parse(base | given)
