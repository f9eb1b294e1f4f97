"""Record what concurrent clients of a state store ask and are answered; the format is in README.md."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from penstock.errors import PenstockError
from penstock.statestore.client.client import Condition, StateStoreClient
from penstock.statestore.errors import FencingError, QuotaExceededError
from penstock.statestore.hlc import Hlc

__all__ = ["DEADLINE_S", "Load", "Recorder"]

CLIENTS = 6
FENCED = "lock"
KEYS = ["a", "b", "c", FENCED]
PATIENT_S = 20.0
"""The timeout of half of the clients: their requests are answered after the fault."""
IMPATIENT_S = 0.6
"""Of the others: what they asked before the fault is open for ever."""
RETRY_S = 0.01
"""After a request without an answer: a client that is closed fails at once."""
DEADLINE_S = 180.0
"""On a machine whose processors are busy, leases end and nodes take over without a fault."""


class Recorder:
    """Writes one line for each operation. ``answered`` and ``open`` count them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answered = 0
        self.open = 0
        self.refused: list[str] = []
        """Errors of the store, except those of fencing."""
        self.may_be_full = False
        """Whether the store may refuse requests for lack of space: then they are not executed, and not recorded."""
        self.keys: dict[str, None] = {}
        self.values: dict[str, str] = {}
        """The value of each key that a client has seen last."""
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    async def ask(self, store: StateStoreClient, client: int, words: Sequence[str], token: int = 0) -> bool:
        """Send a request, and record it; whether it was answered."""
        self.keys[words[1]] = None
        call = time.monotonic_ns()
        line = {"client": client, "words": list(words), "call": call} | ({"token": token} if token else {})
        try:
            answer, version = await _send(store, words, Hlc(token, 0, "t") if token else None)
        except FencingError as error:
            answer, version = f"-ERR {error.text}", None
        except PenstockError as error:
            if isinstance(error, QuotaExceededError) and self.may_be_full:
                return True
            # A standby refuses connections (0x9C): the request may have been sent on the connection before.
            if getattr(error, "text", None) and getattr(error, "code", 0) != 0x9C:
                self.refused.append(str(error))
            self.open += 1
            self._write(line)
            return False
        self.answered += 1
        line |= {"return": time.monotonic_ns(), "answer": answer}
        if version is not None:
            line["version"] = str(version)
        self._write(line)
        if answer in {"+OK", "$-1"}:
            self.values[words[1]] = words[2] if answer == "+OK" else ""
        elif answer.startswith("$"):
            self.values[words[1]] = answer[1:]
        return True

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")


async def _send(store: StateStoreClient, words: Sequence[str], token: Hlc | None) -> tuple[str, Hlc | None]:
    """The answer as in a history, and its version."""
    verb, key, *rest = words
    if verb == "GET":
        entry = await store.get(key)
        return ("$-1", None) if entry is None else (f"${entry.value.decode()}", entry.version)
    if verb == "SET":
        condition = Condition(rest[1]) if len(rest) > 1 else Condition.ALWAYS
        done = await store.set(key, rest[0], condition=condition, fencing_token=token)
        return "+OK" if done.applied else ":-1", done.version
    if verb == "DEL":
        return f":{await store.delete(key, fencing_token=token)}", None
    return f":{await store.vdelete(key, rest[0], fencing_token=token)}", None


@dataclass
class Load:
    """Clients that send requests for a few keys, each one after the other, until :meth:`finish`.

    Half of them wait for their answers over a fault; the others give a request up after ``IMPATIENT_S``, and go on.
    """

    recorder: Recorder
    url: str
    seed: int = 0
    pause_s: float = 0.0
    """Between an answer and the next request of a client, for faults that last: it saves processor time."""
    _generation: int = 0
    _ending: bool = False
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _may_refuse: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _counts: list[int] = field(default_factory=lambda: [0] * CLIENTS)

    async def __aenter__(self) -> Self:
        self.release()
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._ending = True
        self.release()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)

    async def more(self, answers: int) -> None:
        """Return when each client got so many more answers."""
        wanted = [count + answers for count in self._counts]
        await self._until(lambda: all(count >= least for count, least in zip(self._counts, wanted, strict=True)))

    def hold(self) -> None:
        """Send no further requests until :meth:`release`."""
        self._flowing.clear()

    def release(self) -> None:
        """Send requests again."""
        self._flowing.set()

    def change_keys(self) -> None:
        """Use other keys from now on: many open requests for one key cannot be checked in reasonable time."""
        self._generation += 1

    async def until_given_up(self, requests: int) -> None:
        """Return when so many requests in all were given up."""
        await self._until(lambda: self.recorder.open >= requests)

    async def until_refused(self) -> None:
        """Return when the store has refused a request."""
        self._may_refuse = True
        await self._until(lambda: bool(self.recorder.refused))

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                assert self.recorder.refused == [] or self._may_refuse, self.recorder.refused
                await asyncio.sleep(0.005)

    async def _client(self, number: int) -> None:
        random = Random(f"{self.seed} {number}")
        timeout_s = IMPATIENT_S if number % 2 else PATIENT_S
        # Timestamps of the store's own clock: the machine's clock may differ by hours.
        store = StateStoreClient.connect(self.url, client_id=f"client-{number}", timeout_s=timeout_s, server_clock=True)
        name, count = number, 0
        async with store:
            while not self._ending:
                await self._flowing.wait()
                count += 1
                words, token = self._request(random, f"{number}-{count}")
                if await self.recorder.ask(store, name, words, token):
                    self._counts[number] += 1
                    if self.pause_s:
                        await asyncio.sleep(self.pause_s)
                else:
                    name += CLIENTS  # a client in the history has one operation at a time
                    await asyncio.sleep(RETRY_S)
                    if self.recorder.refused:
                        return

    def _request(self, random: Random, value: str) -> tuple[list[str], int]:
        kept = random.choice(KEYS)
        key = f"{kept}{self._generation}"
        known = self.recorder.values.get(key, "")
        token = random.choice((0, 1, 2, 3)) if kept == FENCED else 0
        kind = random.choices(("GET", "SET", "NX", "NEX", "DEL", "VDEL"), (36, 30, 10, 8, 10, 6))[0]
        if kind in {"GET", "DEL"}:
            return [kind, key], 0 if kind == "GET" else token
        if kind == "VDEL":
            return [kind, key, known or value], token
        if kind == "SET":
            return [kind, key, value], token
        # Of NEX half repeat the value that the key had last.
        return ["SET", key, known if kind == "NEX" and known and random.random() < 0.5 else value, kind], token


async def record(path: Path, url: str, fault: Callable[[Load], Awaitable[None]], *, pause_s: float = 0.0) -> Recorder:
    """Record a history to ``path``: before, during and after ``fault``, and what each key holds at the end."""
    with Recorder(path) as recorder:
        async with Load(recorder, url, 0, pause_s) as load:
            await load.more(40)
            await fault(load)
            await load.more(40)
        await read_all(recorder, url)
    return recorder


async def read_all(recorder: Recorder, url: str) -> None:
    """Record a read of every key."""
    async with StateStoreClient.connect(url, timeout_s=PATIENT_S, server_clock=True) as store:
        for key in list(recorder.keys):
            assert await recorder.ask(store, CLIENTS * 1_000_000, ["GET", key])
