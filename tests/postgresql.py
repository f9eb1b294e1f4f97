"""A PostgreSQL server on loopback that a test starts, crashes and stops."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.ports import free_port
from tests.tools import skip_or_fail

__all__ = ["PASSWORD", "Postgres", "running_postgres"]

PASSWORD = "not in any log"
USER = "writer"
_DATABASE = "plant"


class Postgres:
    """A server with the database ``plant``, owned by a user with a password."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.password_file = directory / "password"
        self._data = directory / "data"
        self._bin = _programs()
        # The server refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        self.password_file.write_text(PASSWORD)
        if self._user is not None:
            shutil.chown(directory, self._user)
            shutil.chown(self.password_file, self._user)
        self._run(
            *(
                "initdb",
                "--pgdata",
                str(self._data),
                "--no-sync",
                "--encoding=UTF8",
                "--locale=C",
                "--auth=scram-sha-256",
            ),
            *("--username=admin", f"--pwfile={self.password_file}"),
        )
        self.start()
        with self.connect("admin", "postgres") as connection:
            connection.execute(f"CREATE USER {USER} PASSWORD '{PASSWORD}'")
            connection.execute(f"CREATE DATABASE {_DATABASE} OWNER {USER}")

    @property
    def url(self) -> str:
        """The URL for a pipeline file."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{_DATABASE}"

    def start(self, certificate: tuple[Path, Path] | None = None, language: str = "") -> None:
        """Start the server, and wait until it accepts connections; with a ``certificate`` and its key also over TLS.

        ``language``: that of its messages, as an ISO code.
        """
        # A test kills processes, not the machine: what was written without fsync stays.
        options = (
            f"-h 127.0.0.1 -p {self.port} -k {self.directory} -c shared_buffers=16MB -c fsync=off -c max_connections=50"
        )
        for name, path in zip(("cert", "key"), certificate or (), strict=False):
            own = self.directory / f"server.{name}"
            shutil.copy(path, own)
            own.chmod(0o600)
            if self._user is not None:
                shutil.chown(own, self._user)
            options += f" -c ssl=on -c ssl_{name}_file={own}"
        if language:
            # Translations are used with each locale but C.
            options += " -c lc_messages=C.UTF-8"
        self._run(*("pg_ctl", "start", "--pgdata", str(self._data), "--wait", "--timeout=60"), f"--options={options}",
                  f"--log={self.directory / 'log'}", LANGUAGE=language)  # fmt: skip

    def stop(self, mode: str = "fast") -> None:
        """Stop the server if it runs; with ``immediate`` as in a crash, after which it empties unlogged tables."""
        if not (self._data / "postmaster.pid").exists():
            return
        self._run("pg_ctl", "stop", "--pgdata", str(self._data), f"--mode={mode}", "--wait", "--timeout=60")

    def connect(self, user: str = USER, database: str = _DATABASE) -> psycopg.Connection[Any]:
        """Return a new connection in autocommit mode."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=user, dbname=database, password=PASSWORD, autocommit=True
        )

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self.connect() as connection:
            return connection.execute(statement).fetchall()

    def execute(self, statement: str) -> None:
        """Execute a statement."""
        with self.connect() as connection:
            connection.execute(statement)

    def log(self) -> str:
        """The log of the server."""
        return (self.directory / "log").read_text(encoding="utf-8", errors="replace")

    def _run(self, program: str, *arguments: str, **variables: str) -> None:
        done = subprocess.run(
            [self._bin / program, *arguments],
            user=self._user,
            cwd=self.directory,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr + done.stdout


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    if not found:
        skip_or_fail("postgresql is not installed: `make system` installs it")
    return found[-1].parent


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A new server, which is stopped and removed at the end."""
    # Not below TMPDIR, which may be a directory that only the user of the tests may enter.
    directory = Path(tempfile.mkdtemp(prefix="penstock-postgres-", dir="/tmp"))
    try:
        server = Postgres(directory)
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
