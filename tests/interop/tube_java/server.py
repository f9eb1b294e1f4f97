"""Apache's master and broker on loopback, and one of our brokers at that master.

The master lets a topic be used 35 s after the broker that has it registered (fixed in its code); topics named before
share one such wait. So it starts once, early and in the background, while other tests run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.tube_java.jars import Jars
from tests.ports import free_ports

__all__ = ["JavaTube", "start_broker"]

TOKEN = "interop"
READY_S = 100

# Our broker, at the master of the arguments; it runs as long as its input is open.
_OUR_BROKER = """
import asyncio, sys
from pathlib import Path
from penstock.tube.broker.broker import TubeBroker

async def main():
    broker = TubeBroker(Path(sys.argv[1]), broker_id=2, masters=[sys.argv[2]])
    await broker.start("127.0.0.2", int(sys.argv[3]))
    await asyncio.to_thread(sys.stdin.read)
    await broker.close()

asyncio.run(main())
"""


def start_broker(
    jars: Jars, folder: Path, master: str, broker_id: int, port: int, web: int, *, heap: str = "256m"
) -> subprocess.Popen[bytes]:
    """Start Apache's broker at ``master``; returns at once."""
    folder.mkdir(parents=True)
    (folder / "broker.ini").write_text(
        f"[broker]\nbrokerId={broker_id}\nhostName=127.0.0.1\nport={port}\nwebPort={web}\n"
        f"masterAddressList={master}\nprimaryPath={folder}/data\noffsetStgFilePath={folder}/offset\n"
        "maxSegmentSize=1073741824\nmaxIndexSegmentSize=22020096\ntransferSize=524288\n"
        "loadMessageStoresInParallel=true\nconsumerRegTimeoutMs=35000\nheartbeatPeriodMs=1000\n"
    )
    main = "org.apache.inlong.tubemq.server.tools.BrokerStartup"
    return _launch(jars, folder, "broker", heap, main, "-f", str(folder / "broker.ini"))


def _launch(jars: Jars, folder: Path, name: str, heap: str, main: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            jars.command(main, *arguments, heap=heap, options=(f"-Dtubemq.home={folder}",)),
            env={**os.environ, "LD_PRELOAD": str(jars.loopback)},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


class JavaTube:
    """Apache's master with Apache's broker 1 and our broker 2, each with its topics."""

    def __init__(
        self, jars: Jars, folder: Path, topics: Sequence[str], our_topics: Sequence[str], *, heap: str = "256m"
    ) -> None:
        self._jars = jars
        self._heap = heap
        self._folder = folder
        self._topics = topics
        self._our_topics = our_topics
        self._master, self._web, bdb, self._broker, self._broker_web, self._our_port = free_ports(6)
        self._bdb = bdb
        self.masters = f"127.0.0.1:{self._master}"
        self.web = f"127.0.0.1:{self._web}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="java tube")
        self._thread.start()

    def ready(self) -> str:
        """Wait until every topic can be produced to and consumed from; the master's address."""
        self._thread.join(READY_S)
        if self._failure is not None:
            raise AssertionError(f"Apache's server did not start: {self._failure}; {self._logs()}") from self._failure
        assert not self._thread.is_alive(), f"Apache's server is not ready after {READY_S} s: {self._logs()}"
        return self.masters

    @property
    def pids(self) -> list[int]:
        """Its processes: master and broker."""
        return [process.pid for process in self._processes]

    def query(self, method: str, **parameters: object) -> dict[str, Any]:
        """Ask the master's administration."""
        text = urllib.parse.urlencode({"type": "op_query", "method": method, "confModAuthToken": TOKEN, **parameters})
        with urllib.request.urlopen(f"http://127.0.0.1:{self._web}/webapi.htm?{text}", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for process in reversed(self._processes):
            if process.stdin is not None:
                process.stdin.close()
            else:
                process.kill()  # a Java broker takes seconds to end in order, and nothing of it is kept
        for process in self._processes:
            process.wait(30)

    def _run(self) -> None:
        try:
            self._start()
        except BaseException as error:  # noqa: BLE001 - `ready` tells it
            self._failure = error

    def _start(self) -> None:
        folder = self._folder
        templates = folder / "resources" / "templates"
        for name, text in (("screen", "$sb"), ("layout", "$screen_placeholder")):  # its web server wants both
            (templates / name).mkdir(parents=True)
            (templates / name / "webapi.vm").write_text(text)
        (folder / "master.ini").write_text(
            f"[master]\nhostName=127.0.0.1\nport={self._master}\nwebPort={self._web}\nconsumerBalancePeriodMs=1000\n"
            "firstBalanceDelayAfterStartMs=1000\nconsumerHeartbeatTimeoutMs=30000\nproducerHeartbeatTimeoutMs=45000\n"
            f"brokerHeartbeatTimeoutMs=25000\nconfModAuthToken={TOKEN}\nwebResourcePath={folder}/resources\n"
            "stepChgWaitPeriodMs=1000\nonlineOnlyReadToRWPeriodMs=1000\nofflineOnlyReadToRWPeriodMs=1000\n"
            "maxGroupRebalanceWaitPeriod=2\n\n[meta_bdb]\nrepGroupName=tubemqMasterGroup\n"
            f"repNodeName=tubemqMasterGroupNode1\nrepNodePort={self._bdb}\nmetaDataPath={folder}/meta\n"
            f"repHelperHost=127.0.0.1:{self._bdb}\n"
        )
        main = "org.apache.inlong.tubemq.server.tools.MasterStartup"
        self._processes.append(_launch(self._jars, folder, "master", "256m", main, "-f", str(folder / "master.ini")))
        # Apache's master takes one broker an address, so ours has 127.0.0.2.
        self._configure(1, "127.0.0.1", self._broker, self._topics)
        if self._our_topics:
            self._configure(2, "127.0.0.2", self._our_port, self._our_topics)
        broker_folder = folder / "broker"
        self._processes.append(
            start_broker(self._jars, broker_folder, self.masters, 1, self._broker, self._broker_web, heap=self._heap)
        )
        if self._our_topics:
            self._start_ours()
        self._await(self._usable)

    def _start_ours(self) -> None:
        with (self._folder / "our-broker.log").open("wb") as log:
            command = [sys.executable, "-c", _OUR_BROKER, str(self._folder / "ours"), self.masters, str(self._our_port)]
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
            )

    def _configure(self, broker_id: int, host: str, port: int, topics: Sequence[str]) -> None:
        common = {"createUser": "interop", "acceptPublish": "true", "acceptSubscribe": "true"}
        policy = {"deletePolicy": "delete,168h", "unflushThreshold": 1000, "unflushInterval": 10000}
        add: dict[str, object] = {"brokerId": broker_id, "brokerIp": host, "brokerPort": port, **common, **policy}
        self._change("admin_add_broker_configure", {**add, "brokerWebPort": self._broker_web, "numPartitions": 3})
        self._change("admin_online_broker_configure", {"brokerId": broker_id, "modifyUser": "interop"})
        if topics:
            memory = {"memCacheMsgSizeInMB": 3, "memCacheMsgCntInK": 10, "memCacheFlushIntvl": 4000}
            add = {"topicName": ",".join(topics), "brokerId": broker_id, "numPartitions": 3, "numTopicStores": 1}
            self._change("admin_add_new_topic_record", {**add, **common, **policy, **memory})

    def _change(self, method: str, parameters: dict[str, object]) -> None:
        """Repeated: the administration refuses until the master has elected itself."""

        def done() -> bool:
            answer = self.query(method, **parameters)
            return bool(answer.get("result"))

        self._await(done)

    def _usable(self) -> bool:
        topics = {row["topicName"]: row for row in self.query("admin_query_topic_info")["data"]}
        states = [row["subStatus"] for row in self.query("admin_query_broker_run_status")["data"]]
        wanted = [*self._topics, *self._our_topics]
        open_ = [topics[name]["isSrvAcceptPublish"] for name in wanted if name in topics]
        return len(open_) == len(wanted) and all(open_) and states == ["idle"] * len(states)

    def _await(self, condition: Any) -> None:
        until = time.monotonic() + READY_S - 10
        while not self._stop.is_set():
            for process in self._processes:
                assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
            try:
                if condition():
                    return
                problem = "not yet"
            except (OSError, ValueError, KeyError) as error:  # not listening yet, or no JSON yet
                problem = repr(error)
            assert time.monotonic() < until, f"waited for {condition.__name__}: {problem}"
            self._stop.wait(0.2)
        raise AssertionError("stopped")

    def _logs(self) -> str:
        names = ["master.log", "broker/broker.log", "our-broker.log"]
        return " ".join(
            f"{name}: {(self._folder / name).read_text()[-1500:]}" for name in names if (self._folder / name).exists()
        )
