"""Mosquitto's broker as a process of its own: listeners with TLS and WebSocket, restarts that keep its sessions."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.ports import free_ports
from tests.tools import require_tool

__all__ = ["Mosquitto"]

DEADLINE_S = 60


class Mosquitto:
    """A broker in ``folder``, with ``listeners`` listeners on free ports; ``settings`` go below each of them.

    With ``persistent`` it keeps sessions and messages over :meth:`stop` and :meth:`start`.
    """

    def __init__(self, folder: Path, *settings: str, persistent: bool = False) -> None:
        self.ports = free_ports(len(settings) or 1)
        self._folder = folder
        lines = ["per_listener_settings false", "allow_anonymous true", "set_tcp_nodelay true", "user root"]
        if persistent:
            lines += ["persistence true", f"persistence_location {folder}/", "autosave_interval 1"]
        for port, text in zip(self.ports, settings or ("",), strict=True):
            lines += [f"listener {port} 127.0.0.1", text]
        (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        """The port of the first listener."""
        return self.ports[0]

    @property
    def url(self) -> str:
        """The first listener, plain MQTT."""
        return f"mqtt://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start and wait until every listener accepts."""
        with (self._folder / "mosquitto.log").open("ab") as log:
            process = self._process = await asyncio.create_subprocess_exec(
                require_tool("mosquitto"),
                *("-c", str(self._folder / "mosquitto.conf")),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
            )
        async with asyncio.timeout(DEADLINE_S):
            for port in self.ports:
                while True:
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                    except OSError:
                        assert process.returncode is None, (self._folder / "mosquitto.log").read_text()
                        await asyncio.sleep(0.02)
                        continue
                    writer.close()
                    break

    async def stop(self) -> None:
        """End it with SIGTERM: it saves what it keeps."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        self._process = None
