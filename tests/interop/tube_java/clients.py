"""One JVM with Apache's client in it, driven line by line (see ``TubePeer.java``)."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.interop.tube_java.jars import Jars

__all__ = ["Got", "JavaClients", "body", "number"]

T = TypeVar("T")


class Got(NamedTuple):
    """One message as a Java consumer had it: which member of the group, from which partition, number, type."""

    member: int
    partition: str
    number: int
    msg_type: str | None


def body(number: int, size: int = 0) -> bytes:
    """The message of that number, of at least ``size`` bytes; the Java program makes and checks the same."""
    head = b"%d|" % number
    return head + bytes((number + at) % 251 for at in range(len(head), size))


def number(data: bytes) -> int:
    """The number of a message whose every byte is right."""
    found = int(data.partition(b"|")[0])
    assert data == body(found, len(data)), f"message {found} is damaged"
    return found


class JavaClients:
    """Producers and consumers in one JVM; each question runs on a thread of its own there."""

    def __init__(self, jars: Jars, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            jars.command("TubePeer", heap="512m"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._count = itertools.count(1)
        self._waiting: dict[str, Future[str]] = {"0": Future()}
        ready = self._waiting["0"]
        self._reader = threading.Thread(target=self._read, name="java clients")
        self._reader.start()
        ready.result(30)

    @property
    def pid(self) -> int:
        """The process of the JVM."""
        return self._process.pid

    def produce(self, masters: str, topic: str, count: int, **options: object) -> Future[str]:
        """Send messages ``from_`` (0) to ``from_ + count``; see below.

        Options: ``size``, ``window``, ``types``, ``pause_ms``, ``publish_attempts``; for both sides ``trust`` and
        ``keys`` (key stores) with ``store_password``, and ``user`` with ``password``.
        """
        return self._ask("produce", masters=masters, topic=topic, count=count, **options)

    def consume(self, masters: str, group: str, topic: str, count: int, **options: object) -> Future[list[Got]]:
        """Read until ``count`` different messages came.

        Options: ``kind`` (pull, push, balance), ``filters``, ``members``, ``bound`` with ``session``, ``timeout_ms``.
        """
        answer = self._ask("consume", masters=masters, group=group, topic=topic, count=count, **options)
        parsed: Future[list[Got]] = Future()
        answer.add_done_callback(partial(_convert, parsed, lambda text: [_got(item) for item in text.split()]))
        return parsed

    def measure(self, masters: str, group: str, topic: str, count: int, **options: object) -> Future[str]:
        """As :meth:`consume`, with times instead of messages."""
        return self._ask("consume", masters=masters, group=group, topic=topic, count=count, quiet="", **options)

    def latency(self, masters: str, group: str, topic: str, count: int, **options: object) -> Future[str]:
        """Send ``count`` messages, 500 a second, to a consumer in the same JVM; median and p99 from send to receipt."""
        return self._ask("latency", masters=masters, group=group, topic=topic, count=count, **options)

    def begin(self, name: str, masters: str, topic: str, timeout_ms: int, **options: object) -> Future[int]:
        """Start a producer that sends every 100 ms, or a consumer of ``group``, with the settings of Apache's client.

        Returns the time of its first acknowledged or received message, in ns of :func:`time.perf_counter_ns`.
        """
        found: Future[int] = Future()
        answer = self._ask("begin", name=name, masters=masters, topic=topic, timeout_ms=timeout_ms, **options)
        answer.add_done_callback(partial(_convert, found, int))
        return found

    def end(self, name: str) -> Future[list[int]]:
        """End a client of :meth:`begin`; returns the times of all its messages."""
        found: Future[list[int]] = Future()
        self._ask("end", name=name).add_done_callback(
            partial(_convert, found, lambda text: [int(time) for time in text.split()])
        )
        return found

    def make_stores(self, folder: Path, password: str) -> Future[str]:
        """Make ``trust.jks`` and ``keys.jks`` of the ``ca.pem`` and ``client.p12`` in ``folder``."""
        return self._ask("stores", folder=folder, password=password)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends with its input
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _ask(self, verb: str, **options: object) -> Future[str]:
        number = str(next(self._count))
        future = self._waiting[number] = Future()
        line = "\t".join([number, verb, *(f"{name.rstrip('_')}={value}" for name, value in options.items())])
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return future

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, status, text = line.rstrip("\n").split("\t", 2)
            future = self._waiting.pop(number)
            if status == "ok":
                future.set_result(text)
            else:
                future.set_exception(AssertionError(f"Java client: {text}"))
        for future in self._waiting.values():
            future.set_exception(AssertionError("the JVM with the Java clients ended"))


def _convert(converted: Future[T], convert: Callable[[str], T], answer: Future[str]) -> None:
    try:
        converted.set_result(convert(answer.result()))
    except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
        converted.set_exception(error)


def _got(text: str) -> Got:
    member, partition, number, msg_type = text.split(",")
    return Got(int(member), partition, int(number), None if msg_type == "null" else msg_type)
