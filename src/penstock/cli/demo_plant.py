"""`penstock demo plant`: live telemetry of a plant, with faults that can be switched while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import sys
import textwrap
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Commands, Json, StateStoreOptions, connects_to_store, duration_option, local_node
from penstock.cli.output import escape, print_json, shown, shown_count, shown_rate
from penstock.cli.parameters import completes
from penstock.cli.tube.access import run_client
from penstock.demo.plant import (
    FAULTS,
    FAULTS_KEY,
    LOCK_KEY,
    ROOT,
    TURNS,
    Machine,
    Plant,
    PlantMessage,
    faults_in_turn,
    parse_faults,
    parse_limits,
    parse_setpoint,
)
from penstock.errors import ConfigError, PenstockError, UnavailableError

if TYPE_CHECKING:
    from penstock.mqtt.client import MqttClient
    from penstock.statestore.client.client import StateStoreClient
    from penstock.statestore.hlc import Hlc

__all__ = ["app"]

app = Commands()

_WIDTH = 80
_IN_FLIGHT = 1000
"""Messages that wait for their acknowledgement."""
_EARLY_S = 0.001
"""Timers are not more exact, so readings that are due earlier are sent together."""
_PROGRESS_S = 60.0
_CLEAN_UP_S = 10.0


@app.add(
    "penstock demo plant",
    "penstock demo plant --rate 500 --for 10m --fault none",
    "penstock demo plant --fault drift --fault broken --seed 7",
)
@connects_to_store
def plant(
    rate: Annotated[int, typer.Option(help="Readings per second of all machines.", min=1, metavar="N")] = 9,
    duration: Annotated[
        float | None, duration_option("--for", text="End after this time. Default: at Ctrl-C.", at_least_s=0.1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Number that determines values and faults.", min=0, metavar="N")] = 0,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="Fault from the start: drift, stuck, dead, burst, late, duplicate, broken; all, none, or turns: one "
            "after another; repeatable. Default: turns.",
            metavar="NAME",
            autocompletion=completes((*FAULTS, "all", "none", TURNS)),
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the keys and the retained messages at the end.")] = False,
    as_json: Json = False,
    *,
    options: StateStoreOptions,
) -> None:
    """Publish live telemetry of nine machines with faults, for trying a node: console, rules, keys, pipelines.

    Each machine is an MQTT client with a will. It publishes readings as JSON (QoS 1) and its status (retained) below
    demo/. Its limits, its set point and its alarm are keys below demo/, which can be changed and watched. Set the key
    demo/faults to switch faults. The alarms are written under the fencing token of the lock demo/lock, so that only one
    plant runs. At the end all of its keys and retained messages are deleted.
    """
    try:
        mode = " ".join(fault or [TURNS])
        parse_faults(mode)
    except ValueError as error:
        raise ConfigError("--fault: a name is not known", option="--fault", why=str(error)) from error
    run = _Run(options, rate=rate, seed=seed, mode=mode, keep=keep, as_json=as_json)
    with contextlib.suppress(KeyboardInterrupt):
        run_client(run.main(math.inf if duration is None else duration))


class _Run:
    """A run of the plant."""

    def __init__(
        self, options: StateStoreOptions, *, rate: int, seed: int, mode: str, keep: bool, as_json: bool
    ) -> None:
        self._options = options
        self._rate = rate
        self._seed = seed
        self._mode = mode
        self._keep = keep
        self._json = as_json
        self._plant = Plant(seed, datetime.now(UTC))
        self._wanted = parse_faults(mode)
        self._alarms: dict[str, str | None] = {}
        self._clients: dict[str, MqttClient] = {}
        self._dead: MqttClient | None = None
        """The client that the fault ``dead`` disconnected."""
        self._began = time.monotonic()
        self._sent = self._lost = self._raised = 0
        self._in_flight = asyncio.Semaphore(_IN_FLIGHT)
        self._writing = asyncio.Lock()
        """Held during a write of an alarm; it is fair, so that they keep their order."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._followers: list[asyncio.Task[None]] = []
        self._failure: PenstockError | None = None

    async def main(self, duration_s: float) -> None:
        """Run for ``duration_s`` seconds, or until it is cancelled."""
        from penstock.statestore.client.locks import Lease

        async with self._options.store(keeps_session=True) as store:
            holder = f"penstock demo plant {socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
            lease = Lease(store, LOCK_KEY, holder=holder)
            await lease.run(lambda token: self._work(store, token, duration_s), timeout_s=0)

    async def _work(self, store: StateStoreClient, token: Hlc, duration_s: float) -> None:
        try:
            await self._create_keys(store)
            try:
                await self._follow_keys(store)
                for machine in self._plant.machines:
                    async with self._options.explained():
                        await self._connect(machine)
                self._introduce(duration_s)
                await self._send(store, token, duration_s)
                await asyncio.gather(*self._tasks)
                self._check()
            finally:
                for task in (*self._followers, *self._tasks):
                    task.cancel()
                await asyncio.gather(*self._followers, *self._tasks, return_exceptions=True)
        finally:
            await self._end(store, token)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), PenstockError):
            self._failure = self._failure or error

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` while readings are sent; its error ends the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # What it prints

    def _say(self, event: str, text: str, **fields: object) -> None:
        """Print an event with the seconds since the start."""
        seconds = time.monotonic() - self._began
        if self._json:
            print_json({"event": event, "seconds": round(seconds, 3), "text": text, **fields})
            return
        first = f"[{seconds:6.1f} s] "
        lines = textwrap.wrap(escape(text), _WIDTH - len(first))
        sys.stdout.write(first + f"\n{'':{len(first)}}".join(lines) + "\n")
        sys.stdout.flush()

    def _introduce(self, duration_s: float) -> None:
        self._began = time.monotonic()
        count = len(self._plant.machines)
        until = "until Ctrl-C" if duration_s == math.inf else f"for {duration_s:g} s"
        rate = shown_rate(self._rate, "readings")
        text = f"{count} machines, {rate}, seed {self._seed}, faults {self._mode}, {until}"
        self._say("start", text, machines=count, rate=self._rate, seed=self._seed, faults=self._mode)
        if not self._json:
            sys.stdout.write(self._hints())
            sys.stdout.flush()

    def _hints(self) -> str:
        from penstock.demo.data import example

        drifting = self._plant.faulty["drift"]
        looks = {
            "messages": f"penstock mqtt sub '{ROOT}/#'",
            "keys": f"penstock kv scan '{ROOT}/*'",
            "alarm": f"penstock kv watch {drifting.alarm_key}",
            "set point": f"penstock kv set {drifting.setpoint_key} {drifting.setpoint + 40:g}",
            "faults": f"penstock kv set {FAULTS_KEY} drift",
            "": "or " + ", ".join([*list(FAULTS)[1:], "all", "none", "turns"]),
            "rates": "penstock top",
        }
        found = local_node(self._options.broker)
        if found is not None and (web := found.get("http_local", found.get("http"))):
            looks["console"] = f"{'https' if found.get('http_tls') else 'http'}://{web}/"
        lines = [f"  {name:<10}{text}" for name, text in looks.items()]
        node, pipeline = (_shown_path(example(name, of="plant")) for name in ("penstock.yaml", "pipeline.yaml"))
        # Paths are not broken, so that they can be copied.
        lines += ["", "  A rule and a pipeline that write the readings to a table:"]
        lines += [f"  penstock up --config {node}", f"  penstock pipeline run {pipeline}"]
        return "\n" + "\n".join(lines) + "\n\n"

    # Keys

    async def _create_keys(self, store: StateStoreClient) -> None:
        from penstock.statestore.client.client import Condition

        await store.set(FAULTS_KEY, self._mode)
        for machine in self._plant.machines:
            # NX: with --keep, what operators have set is still there.
            await store.set(machine.limits_key, json.dumps(machine.limits), condition=Condition.NX)
            await store.set(machine.setpoint_key, f"{machine.setpoint:g}", condition=Condition.NX)

    async def _follow_keys(self, store: StateStoreClient) -> None:
        """Begin to use what operators set, until the run ends."""
        keys = [key for machine in self._plant.machines for key in (machine.limits_key, machine.setpoint_key)]
        begun = {key: asyncio.Event() for key in (FAULTS_KEY, *keys)}
        for key, event in begun.items():
            task = asyncio.create_task(self._follow(store, key, event))
            task.add_done_callback(self._done)
            self._followers.append(task)
        for event in begun.values():
            await event.wait()

    async def _follow(self, store: StateStoreClient, key: str, begun: asyncio.Event) -> None:
        # Of each key: an observation of a prefix is an extension, which has to be enabled.
        try:
            async with store.observe(key) as changes:
                if changes.entry is not None:
                    self._apply(key, changes.entry.value)
                begun.set()
                async for change in changes:
                    if change.value is not None:
                        self._apply(key, change.value)
        finally:
            begun.set()

    def _apply(self, key: str, value: bytes) -> None:
        """Use the value of a key; an invalid one is reported and has no effect."""
        try:
            if key == FAULTS_KEY and (wanted := parse_faults(value.decode())) != self._wanted:
                self._wanted = wanted
                self._say("faults", f"faults: {shown(value)}", faults=value.decode())
            for machine in self._plant.machines:
                if key == machine.setpoint_key and (setpoint := parse_setpoint(value)) != machine.setpoint:
                    machine.setpoint = setpoint
                    self._say("setpoint", f"set point of {machine.path}: {setpoint:g} °C", machine=machine.path)
                elif key == machine.limits_key and (limits := parse_limits(value)) != machine.limits:
                    machine.limits = limits
                    self._say("limits", f"limits of {machine.path}: {shown(value)}", machine=machine.path)
        except ValueError as error:
            self._say("invalid", f"{key} has no effect: {error}", key=key)

    async def _write_alarm(self, store: StateStoreClient, token: Hlc, key: str, value: dict[str, object]) -> None:
        async with self._writing:
            while True:
                try:
                    await store.set(key, json.dumps(value), fencing_token=token)
                except UnavailableError as error:  # setting it again has the same effect
                    self._say("unavailable", f"{key} is set again: {error.what}", key=key)
                else:
                    return

    async def _end(self, store: StateStoreClient, token: Hlc) -> None:
        """Disconnect the machines; delete keys and retained messages, unless they are to be kept."""
        rest = "kept" if self._keep else "deleted"
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                await self._end_status()
                if not self._keep:
                    await self._delete_keys(store, token)
        except TimeoutError:
            rest = "not deleted, as the node does not answer"
        except PenstockError as error:
            rest = f"not deleted: {error.what}"
        finally:
            for client in self._clients.values():
                await client.disconnect()
        seconds = time.monotonic() - self._began
        text = f"{shown_count(self._sent)} messages in {seconds:.1f} s, alarms: {self._raised}"
        text += f", lost with a dead machine: {self._lost}" if self._lost else ""
        self._say(
            "end", f"{text}; keys and retained messages are {rest}",
            messages=self._sent, lost=self._lost, alarms=self._raised,
        )  # fmt: skip

    async def _end_status(self) -> None:
        """Replace or delete the retained messages, with a client that is connected, for all machines."""
        client = next((each for each in self._clients.values() if not each.closed), None)
        if client is not None:
            for machine in self._plant.machines:
                await client.publish(machine.status_topic, machine.will() if self._keep else b"", retain=True)

    async def _delete_keys(self, store: StateStoreClient, token: Hlc) -> None:
        await store.delete(FAULTS_KEY)
        for machine in self._plant.machines:
            await store.delete(machine.alarm_key, fencing_token=token)
            await store.delete(machine.limits_key)
            await store.delete(machine.setpoint_key)

    # Machines

    async def _connect(self, machine: Machine) -> None:
        """Connect a machine, with its will, and publish its status."""
        from penstock.mqtt.client import MqttClient
        from penstock.mqtt.codec.packets import Will

        client = MqttClient(
            self._options.broker,
            client_id=f"penstock-demo-{machine.path.replace('/', '-')}",
            will=Will(machine.status_topic, machine.will(), qos=1, retain=True),
            **self._options.credentials(),
        )
        await client.connect()
        self._clients[machine.path] = client
        await client.publish(machine.status_topic, machine.birth(), retain=True)

    async def _send(self, store: StateStoreClient, token: Hlc, duration_s: float) -> None:
        """Send readings at the rate; those that are overdue, as after an outage, at once."""
        machines = self._plant.machines
        number, progress_at, before = 0, _PROGRESS_S, 0
        while (number + 1) / self._rate <= duration_s:
            number += 1
            at_s = number / self._rate
            if (early := self._began + at_s - time.monotonic()) > _EARLY_S:
                await asyncio.sleep(early)
            self._check()
            await self._switch(at_s)
            machine = machines[number % len(machines)]
            messages = self._plant.messages(machine, at_s)
            if machine.alarm != self._alarms.get(machine.path):
                self._start(self._write_alarm(store, token, machine.alarm_key, self._changed_alarm(machine, at_s)))
            for message in messages:
                await self._in_flight.acquire()
                self._start(self._publish(self._clients[machine.path], message))
            if at_s >= progress_at:
                rate = shown_rate((self._sent - before) / _PROGRESS_S, "messages")
                self._say("progress", f"{shown_count(self._sent)} messages, {rate}", messages=self._sent)
                progress_at, before = progress_at + _PROGRESS_S, self._sent

    async def _switch(self, at_s: float) -> None:
        """Begin and end faults."""
        wanted, before = self._wanted, self._plant.faults
        if wanted is None:
            wanted = faults_in_turn(at_s)
        if wanted == before:
            return
        machine = self._plant.faulty["dead"]
        if "dead" in wanted - before:
            self._dead = self._clients[machine.path]
            await self._dead.disconnect(send_will=True)
        elif "dead" in before - wanted:
            try:
                await self._connect(machine)
            except UnavailableError:  # tried again with the next reading
                return
        self._plant.switch(wanted, at_s)
        for fault in sorted(wanted ^ before):
            path, active = self._plant.faulty[fault].path, fault in wanted
            text = f"fault {fault} of {path}{f': {FAULTS[fault]}' if active else ' ends'}"
            self._say("fault", text, fault=fault, machine=path, active=active)

    async def _publish(self, client: MqttClient, message: PlantMessage) -> None:
        from penstock.mqtt.codec.properties import Properties

        properties = Properties(user_properties=[("id", message.id)], content_type="application/json")
        try:
            await client.publish(message.topic, message.payload, properties=properties)
            self._sent += 1
        except UnavailableError:
            if client is not self._dead:
                raise
            self._lost += 1
        finally:
            self._in_flight.release()

    def _changed_alarm(self, machine: Machine, at_s: float) -> dict[str, object]:
        """Report a change of the alarm of a machine, and return the value of its key."""
        quantity = self._alarms[machine.path] = machine.alarm
        value: dict[str, object] = {"line": machine.line, "machine": machine.name, "time": self._plant.time(at_s)}
        if quantity is None:
            self._say("alarm", f"alarm of {machine.path} ends", machine=machine.path, active=False)
            return {**value, "state": "normal"}
        self._raised += 1
        limit = machine.limits[quantity]
        text = f"ALARM of {machine.path}: {quantity} above {limit:g}"
        self._say("alarm", text, machine=machine.path, quantity=quantity, limit=limit, active=True)
        return {**value, "state": "high", "quantity": quantity, "limit": limit}


def _shown_path(path: Path) -> str:
    """``path`` as a user types it in the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
