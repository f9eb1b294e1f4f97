"""Connections to PostgreSQL: the URL in a pipeline file, the password, TLS, and the server's errors as penstock's.

The URL has no password: it is in a file, or where libpq looks for it (``PGPASSWORD``, ``PGPASSFILE``). It is read where
a connection is made, on the driver and on the executors, so it is neither in the plan nor in Spark's configuration.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.errors import ConfigError, PenstockError, UnavailableError, shortened
from penstock.runtime.extras import needs_extra
from penstock.runtime.io.network import Address
from penstock.runtime.io.tls import read_password

if TYPE_CHECKING:
    import psycopg
    from psycopg import pq

__all__ = ["Server", "connected", "identifier", "parse_url", "translated_errors"]

PORT = 5432
CONNECT_TIMEOUT_S = 10
LOCK_TIMEOUT_S = 60
"""Seconds to wait for a lock; after that the batch is retried."""
IDLE_TIMEOUT_S = 60
"""Seconds after which the server ends the transaction of a paused driver, which would block a later run."""
_SSL_MODES = ("disable", "require", "verify-ca", "verify-full")
_SSL_FILES = ("sslrootcert", "sslcert", "sslkey")
_RETRIED_CLASSES = ("08", "40", "53", "57", "58")
"""SQLSTATE classes of failures that may be temporary: connection, rollback, resources, intervention, system."""
_RETRIED = ("55P03", "25006", "XX000")
"""Further ones: a lock was not available, the server is read-only (a standby), the server failed."""
_REFUSED = re.compile(
    # Of libpq itself, and of servers whose messages are in English.
    r"password authentication failed|no password supplied|authentication failed|does not exist|no pg_hba\.conf entry|"
    r"does not support SSL|certificate|is not permitted to log in|permission denied|SSL error|private key"
)
"""Messages of failed connections that a retry does not change; libpq returns no SQLSTATE for them (:func:`_sqlstate`).
"""
_ERROR_RESPONSE = re.compile(rb'\tErrorResponse\t S "[^"]*" (?:V "[^"]*" )?C "([0-9A-Z]{5})"')
"""An error of the server in a trace of libpq; the severity ``S`` is translated, the SQLSTATE ``C`` is not."""


class Server(NamedTuple):
    """A server, with user and database; see :func:`parse_url`. ``options`` are libpq's parameters of TLS."""

    host: str
    port: int
    user: str
    database: str
    options: tuple[tuple[str, str], ...] = ()
    password_file: str | None = None

    @property
    def shown(self) -> str:
        """The server and the database in messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"PostgreSQL at {host}:{self.port}, database {self.database!r}"


def parse_url(url: str, password_file: str | None = None) -> Server:
    """Parse ``postgresql://USER@HOST[:PORT]/DATABASE[?sslmode=...]``.

    TLS is verified (``sslmode=verify-full``) unless the host is of loopback or the URL says otherwise.

    Raises:
        ConfigError: the URL is invalid, or it has a password. The message has no part of it that may be secret.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise _wrong("it cannot be parsed as a URL") from error
    if parts.scheme not in ("postgresql", "postgres"):
        raise _wrong("it does not begin with postgresql://")
    if parts.password is not None:
        raise _wrong("it has a password", "write it into a file and set password_file, or set PGPASSWORD or PGPASSFILE")
    database = unquote(parts.path.removeprefix("/"))
    if not parts.hostname or not parts.username or not database:
        raise _wrong("it lacks the user, the host or the database")
    for name, value in given:
        if name not in ("sslmode", *_SSL_FILES):
            raise _wrong(f"it has the parameter {name!r}", f"use only sslmode, {', '.join(_SSL_FILES)}")
        if name == "sslmode" and value not in _SSL_MODES:
            raise _wrong(f"it has sslmode={value!r}", f"use one of {', '.join(_SSL_MODES)}")
    options = dict(given)
    if len(options) < len(given):
        raise _wrong("it has a parameter twice")
    host = unquote(parts.hostname)
    options.setdefault("sslmode", "disable" if Address(host, port).is_loopback else "verify-full")
    return Server(host, port, unquote(parts.username), database, tuple(sorted(options.items())), password_file)


def _wrong(why: str, hint: str = "write postgresql://USER@HOST:PORT/DATABASE") -> ConfigError:
    return ConfigError("url of PostgreSQL is not valid", option="url", why=why, hint=hint)


def identifier(name: str) -> str:
    """Quote ``name`` for SQL."""
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def connected(server: Server, application: str) -> Iterator[psycopg.Connection[Any]]:
    """Connect to ``server`` in autocommit mode; errors inside of the block are translated.

    Raises:
        UnavailableError: the server does not answer, or cannot work now.
        PenstockError: it refused the connection or a statement.
        ConfigError: the extra `postgresql` is not installed, or the file of the password cannot be read.
    """
    with needs_extra("postgresql", "the client of PostgreSQL is not installed"):
        import psycopg
    password = None if server.password_file is None else read_password(Path(server.password_file))
    parameters = {
        "host": server.host,
        "port": server.port,
        "user": server.user,
        "dbname": server.database,
        "password": password,
        "application_name": application[:63],
        "client_encoding": "utf8",
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
        **_tls(server),
    }
    try:
        # Statements that are prepared in a session fail behind a pooler of transactions.
        connection = psycopg.connect(autocommit=True, prepare_threshold=None, **parameters)
    except psycopg.errors.ConnectionTimeout as error:
        raise _connect_error(server, str(error), None) from error
    except psycopg.OperationalError as error:
        is_known = _REFUSED.search(str(error)) is not None
        raise _connect_error(server, str(error), None if is_known else _sqlstate(parameters)) from error
    try:
        with translated_errors(server):
            yield connection
    finally:
        connection.close()


def _tls(server: Server) -> dict[str, Any]:
    options = dict(server.options)
    if options["sslmode"].startswith("verify") and "sslrootcert" not in options:
        # libpq of the wheel looks for the authorities where it was built; these are the system's.
        paths = ssl.get_default_verify_paths()
        options["sslrootcert"] = paths.cafile or "system"
    return options


def _sqlstate(parameters: dict[str, Any]) -> str | None:
    """Connect again, and return the SQLSTATE with which the server refuses it; None if it is not known.

    Messages of the server are in its language, and libpq tells their SQLSTATE only in a trace of the protocol (libpq 18
    or newer, which the wheel contains, on Linux).
    """
    import psycopg
    from psycopg import conninfo, pq

    if not hasattr(os, "memfd_create"):
        return None
    # The trace may have the password, so it is in memory only.
    with os.fdopen(os.memfd_create("libpq"), "r+b") as trace, suppress(psycopg.Error, OSError):
        connection = pq.PGconn.connect_start(conninfo.make_conninfo("", **parameters).encode())
        try:
            connection.trace(trace.fileno())
            _poll(connection)
            connection.untrace()
        finally:
            connection.finish()
        trace.seek(0)
        found = _ERROR_RESPONSE.findall(trace.read())
        return found[-1].decode() if found else None
    return None


def _poll(connection: pq.abc.PGconn) -> None:
    """Wait until ``connection`` is connected, refused, or too slow."""
    from psycopg.pq import ConnStatus, PollingStatus

    wanted = {PollingStatus.READING: EVENT_READ, PollingStatus.WRITING: EVENT_WRITE}
    ends = time.monotonic() + CONNECT_TIMEOUT_S
    while connection.status != ConnStatus.BAD and (left := ends - time.monotonic()) > 0:
        events = wanted.get(PollingStatus(connection.connect_poll()))
        if events is None:
            return
        with DefaultSelector() as selector:
            selector.register(connection.socket, events)
            selector.select(left)


def _is_temporary(state: str) -> bool:
    return state in _RETRIED or state[:2] in _RETRIED_CLASSES


def _connect_error(server: Server, text: str, state: str | None) -> PenstockError:
    why = _cause(text)
    if "certificate" in why or "SSL" in why:
        hint = "set sslmode, sslrootcert, sslcert and sslkey in the url"
    elif "password" in why or state in ("28P01", "28000"):
        hint = "correct the user in url, or the password in password_file, PGPASSWORD or PGPASSFILE"
    else:
        hint = "correct url, create the user or the database, or permit the connection in pg_hba.conf"
    if _REFUSED.search(why) is not None or (state is not None and not _is_temporary(state)):
        return PenstockError(f"{server.shown} refused user {server.user!r}", why=why, hint=hint)
    return UnavailableError(
        f"{server.shown} is not available",
        applied=False,
        why=why,
        hint="start the server; the pipeline repeats the batch",
    )


def _cause(text: str) -> str:
    """Return the cause in a message of libpq, which begins with the address."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Several addresses of a host: the last one counts.
    last = next((line for line in reversed(lines) if "failed" in line), lines[0] if lines else "no message")
    return shortened(re.sub(r"^.*failed: (?:FATAL:\s+)?", "", last) or last, 300)


@contextmanager
def translated_errors(server: Server) -> Iterator[None]:
    """Translate errors of the server inside the block.

    Raises:
        UnavailableError: the statement may succeed later.
        PenstockError: it was refused.
    """
    import psycopg

    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate
        detail = f" ({error.diag.message_detail})" if error.diag.message_detail else ""
        why = shortened(" ".join(f"{error.diag.message_primary or error}{detail}".split()), 500)
        lost = state is None and isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
        if lost or _is_temporary(state or ""):
            raise UnavailableError(
                f"{server.shown} did not complete a statement",
                why=why,
                hint="the pipeline repeats the batch; if it continues, look at the server's log",
            ) from error
        raise PenstockError(
            f"{server.shown} refused a statement",
            why=f"{why} [SQLSTATE {state}]",
            hint=_advice(state) or error.diag.message_hint,
        ) from error


def _advice(state: str | None) -> str | None:
    if state == "42501":
        return (
            "grant the user USAGE and CREATE on the schema (or set work_schema), and INSERT, UPDATE, DELETE and SELECT"
        )
    return "change the table back, or run `penstock pipeline plan`" if state in ("42703", "42P01", "42804") else None
