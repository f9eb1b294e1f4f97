"""URLs of PostgreSQL, and errors of its connections as lines with a cause and an action."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError, PenstockError, UnavailableError
from penstock.spark.postgresql.connection import connected, parse_url
from tests.certificates import Authority
from tests.postgresql import PASSWORD, Postgres


def test_tls_is_verified_unless_the_host_is_of_loopback_or_the_url_says_otherwise() -> None:
    assert dict(parse_url("postgresql://u@db.example/d").options) == {"sslmode": "verify-full"}
    assert dict(parse_url("postgresql://u@[::1]:1/d").options) == {"sslmode": "disable"}
    assert dict(parse_url("postgresql://u@localhost/d?sslmode=require").options) == {"sslmode": "require"}
    found = parse_url("postgres://a%40b@db:6000/my%20data?sslmode=verify-ca&sslrootcert=/etc/ca.pem")
    assert (found.user, found.host, found.port, found.database) == ("a@b", "db", 6000, "my data")
    assert found.shown == "PostgreSQL at db:6000, database 'my data'"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql://u:secret@h/d", "it has a password"),
        ("mysql://u@h/d", "does not begin with postgresql://"),
        ("postgresql://h/d", "lacks the user"),
        ("postgresql://u@h", "lacks the user, the host or the database"),
        ("postgresql://u@h:port/d", "cannot be parsed"),
        ("postgresql://u@h/d?sslmode=prefer", "sslmode='prefer'"),
        ("postgresql://u@h/d?password=secret", "the parameter 'password'"),
        ("postgresql://u@h/d?sslmode=require&sslmode=disable", "a parameter twice"),
    ],
)
def test_invalid_urls_are_refused_without_their_secrets(url: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_url(url)
    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_refused_connection_says_what_to_correct(postgres: Postgres, tmp_path: Path) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("wrong", encoding="utf-8")
    right = str(postgres.password_file)
    url = postgres.url
    for server, why, hint in (
        (parse_url(url, str(wrong)), "password authentication failed", "password_file, PGPASSWORD or PGPASSFILE"),
        (parse_url(url.replace("/plant", "/none"), right), 'database "none" does not exist', "create the user"),
        (parse_url(f"{url}?sslmode=require", right), "does not support SSL", "set sslmode"),
    ):
        with pytest.raises(PenstockError) as refused, connected(server, "test"):
            pass
        assert not isinstance(refused.value, UnavailableError)
        assert "refused user 'writer'" in refused.value.what
        assert why in str(refused.value.why)
        assert hint in str(refused.value.hint)
        assert PASSWORD not in str(refused.value)
    with (
        pytest.raises(UnavailableError, match="is not available") as down,
        connected(parse_url("postgresql://u@127.0.0.1:1/d"), "test"),
    ):
        pass
    assert "Connection refused" in str(down.value.why)
    with (
        pytest.raises(PenstockError, match="refused a statement") as refused,
        connected(parse_url(url, right), "test") as connection,
    ):
        connection.execute("CREATE TABLE pg_catalog.mine (n int)")
    assert "grant the user USAGE and CREATE" in str(refused.value.hint)


def test_a_server_with_messages_in_another_language_refuses_a_wrong_password(
    postgres: Postgres, tmp_path: Path
) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("wrong", encoding="utf-8")
    right = str(postgres.password_file)
    postgres.stop()
    postgres.start(language="de")
    try:
        for url, password, why in (
            (postgres.url, str(wrong), "Passwort-Authentifizierung"),
            (postgres.url.replace("/plant", "/none"), right, "existiert nicht"),
        ):
            server = parse_url(url, password)
            with pytest.raises(PenstockError, match="refused user 'writer'") as refused, connected(server, "test"):
                pass
            assert why in str(refused.value.why)
            assert not isinstance(refused.value, UnavailableError)
        # Temporary, although the server refuses the user.
        postgres.execute("ALTER DATABASE plant CONNECTION LIMIT 0")
        with pytest.raises(UnavailableError, match="is not available"), connected(parse_url(postgres.url, right), "t"):
            pass
    finally:
        with postgres.connect("admin", "postgres") as connection:
            connection.execute("ALTER DATABASE plant CONNECTION LIMIT -1")
        postgres.stop()
        postgres.start()


def test_certificate_and_host_are_verified(postgres: Postgres, tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    right = str(postgres.password_file)
    postgres.stop()
    postgres.start(ours.issue("server", "localhost"))
    try:
        for host, authority, why in (
            ("127.0.0.1", ours, "does not match host name"),
            ("localhost", other, "certificate verify failed"),
            ("localhost", None, "certificate verify failed"),
        ):
            files = "" if authority is None else f"&sslrootcert={authority.file}"
            url = postgres.url.replace("127.0.0.1", host) + f"?sslmode=verify-full{files}"
            with pytest.raises(PenstockError) as refused, connected(parse_url(url, right), "test"):
                pass
            assert why in str(refused.value.why)
            assert not isinstance(refused.value, UnavailableError)
        url = postgres.url.replace("127.0.0.1", "localhost") + f"?sslmode=verify-full&sslrootcert={ours.file}"
        with connected(parse_url(url, right), "test") as connection:
            row = connection.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        assert row == (True,)
    finally:
        postgres.stop()
        postgres.start()
