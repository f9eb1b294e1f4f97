"""versitygw: a server with the protocol of S3 that stores objects as files, to be killed and started again.

It is built in minutes, so only nightly tests use it, and they build it (``go.mod``, ``go.sum``).
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from tests.go_programs import prepare_program
from tests.object_storage import CREDENTIALS
from tests.ports import free_port

__all__ = ["BUCKET", "VersityGateway", "prepare"]

BUCKET = "lake"
DEADLINE_S = 60.0
_PACKAGE = "github.com/versity/versitygw/cmd/versitygw"
_open = build_opener(ProxyHandler({})).open


def prepare() -> Path:
    """The program, built if it was not yet."""
    return prepare_program("versitygw", "versitygw", Path(__file__).parent, "versitygw", _PACKAGE, download=True)


class VersityGateway:
    """The server with the bucket :data:`BUCKET`, whose objects are in ``directory``. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._program = prepare()
        self._directory = directory
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"http://127.0.0.1:{self._port}"
        (directory / "objects" / BUCKET).mkdir(parents=True)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        keys = {"ROOT_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"]}
        keys["ROOT_SECRET_KEY"] = CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
        with (self._directory / "versitygw.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "--port", f"127.0.0.1:{self._port}", "posix", str(self._directory / "objects")],
                env=keys,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + DEADLINE_S
        while not self._answers():
            assert self._process.poll() is None, "versitygw ended"
            assert time.monotonic() < deadline, f"versitygw did not answer within {DEADLINE_S:g} s"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            _open(f"{self.endpoint}/{BUCKET}", timeout=DEADLINE_S).close()
        except HTTPError as error:
            # Without a signature the server refuses, but it answers.
            error.close()
        except (URLError, ConnectionError):
            return False
        return True

    def kill(self) -> None:
        """kill -9, and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._process = None

    def __enter__(self) -> VersityGateway:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
