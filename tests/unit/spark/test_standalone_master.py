"""An unreachable standalone master is found before Spark is started."""

from __future__ import annotations

import socket

import pytest

from penstock.errors import ConfigError, UnavailableError
from penstock.spark.session import check_master


def test_an_unreachable_master_is_reported_before_spark_starts() -> None:
    check_master("local[2]")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as taken:
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        taken.bind(("127.0.0.1", 0))  # nobody else gets it, and it does not listen
        away = f"127.0.0.1:{taken.getsockname()[1]}"
        check_master(f"spark://{away},{here}")
        with pytest.raises(UnavailableError, match=f"no Spark master is reachable at spark://{away}") as refused:
            check_master(f"spark://{away}")
    assert refused.value.why == f"{away}: Connection refused"
    with pytest.raises(ConfigError, match="--spark-master: 'here': expected HOST:PORT"):
        check_master("spark://here")
