"""Dead letters, plans, ledgers and samples of the pipelines in the configuration, for the console.

Each request runs a command of ``penstock pipeline`` in a process of its own: tables need pyarrow, which is not loaded
into the node, and a large table or an unreadable file does not affect it. One process runs at a time.

A job is a command that may take minutes and prints its results one by one. It continues without a browser, and its
results are kept until the next one. One job of each kind runs at a time, next to the other commands.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio import StreamReader
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.console.pipeline_jobs import ledger_sink, reconciled_sink, sampled_step
from penstock.console.snapshots import JobError, LedgerSink, PipelineJob, ReconciledSink, SampledStep
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError
from penstock.node.config.node import PipelineSection
from penstock.runtime.io.clock import wall_clock_ms
from penstock.runtime.io.process_end import END_S, parent_pipe

__all__ = ["CommandResult", "JobKind", "PipelineCommands", "missing_files"]

TIMEOUT_S: Final = 120.0
"""Time limit of a command; a redrive waits for the acknowledgements of the source."""
MAX_OUTPUT: Final = 64 << 20
"""Limit of the output of a command in bytes: the letters of a page with their records."""
JOB_TIMEOUT_S: Final = 3600.0
"""Time limit of a job: a reconciliation counts all records and rows again."""
MAX_JOB_OUTPUT: Final = 8 << 20
"""Limit of the output of a job in bytes, which is kept."""
_PROGRAM: Final = (sys.executable, "-m", "penstock.cli")
_NEEDS_STATE_DIR: Final = frozenset({"redrive", "plan", "status", "reconcile"})


class CommandResult(NamedTuple):
    """Rows that a command printed, and its notes for people."""

    rows: list[dict[str, Any]]
    notes: list[str]


class JobKind(StrEnum):
    """Command of a job."""

    RECONCILE = "reconcile"
    SAMPLE = "sample"


class _Job:
    """A job, and what it has printed."""

    def __init__(self, kind: JobKind, name: str, parameters: Mapping[str, str]) -> None:
        self.name = name
        self.kind = kind
        self.task: asyncio.Task[None] | None = None
        self.state = "running"
        self.error: JobError | None = None
        self._parameters = parameters
        self._started_at = wall_clock_ms()
        self._started_s = time.monotonic()
        self._ended_s: float | None = None
        self._sinks: list[ReconciledSink] = []
        self._steps: list[SampledStep] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a result."""
        if self.kind is JobKind.RECONCILE:
            self._sinks.append(reconciled_sink(row))
        else:
            self._steps.append(sampled_step(row))

    @property
    def is_off(self) -> bool:
        """Whether a sink has differences, which is the exit status 1 of the command."""
        return any(not sink.ok for sink in self._sinks)

    def end(self, state: str, error: PenstockError | None = None) -> None:
        """Keep how the job ended."""
        self.state, self._ended_s = state, time.monotonic()
        self.error = None if error is None else JobError(error.what, error.why, error.hint)

    def snapshot(self) -> PipelineJob:
        """Return the job with its results so far."""
        now_s = time.monotonic() if self._ended_s is None else self._ended_s
        return PipelineJob(
            pipeline=self.name,
            job=self.kind.value,
            state=self.state,
            started_at=self._started_at,
            duration_s=now_s - self._started_s,
            parameters=self._parameters,
            sinks=tuple(self._sinks),
            steps=tuple(self._steps),
            error=self.error,
        )


def missing_files(pipelines: Mapping[str, PipelineSection]) -> list[ConfigError]:
    """Return an error for each pipeline whose file does not exist: only the console needs it, so the node starts."""
    return [
        ConfigError(
            f"the file of pipeline {name!r} does not exist: {section.file}",
            option=f"pipelines.{name}.file",
            why="the console cannot show its dead letters, changes and ledger",
            hint="correct `file`, which is relative to the configuration file",
        )
        for name, section in pipelines.items()
        if not section.file.is_file()
    ]


class PipelineCommands:
    """Runs commands for ``pipelines``, by name."""

    def __init__(self, pipelines: Mapping[str, PipelineSection]) -> None:
        self.pipelines = pipelines
        self._one = asyncio.Lock()
        self._command_task: asyncio.Task[tuple[int, str]] | None = None
        self._jobs: dict[tuple[JobKind, str], _Job] = {}
        self._closed = False

    async def close(self) -> None:
        """End the commands that run, and refuse further ones."""
        self._closed = True
        await asyncio.gather(*map(_cancelled, (self._command_task, *(job.task for job in self._jobs.values()))))
        async with self._one:
            pass

    async def plan(self, name: str) -> dict[str, Any]:
        """Run ``penstock pipeline plan`` for the pipeline ``name``, and return the plan.

        Raises:
            RefusedError, UnavailableError: as :meth:`dead_letters`.
        """
        # Status 1 with a plan: the file has a change with which a run cannot continue.
        return (await self._command(name, "plan", ["plan"], [], rows_if=(0, 1))).rows[0]

    async def ledger(self, name: str) -> list[LedgerSink]:
        """Run ``penstock pipeline status`` for the pipeline ``name``, and return the counts of its ledger.

        Raises:
            RefusedError, UnavailableError: as :meth:`dead_letters`.
        """
        return [ledger_sink(row) for row in (await self._command(name, "status", ["status"], [])).rows]

    async def dead_letters(self, name: str, verb: str, options: Sequence[str], payload: bytes = b"") -> CommandResult:
        """Run ``penstock pipeline dead-letter VERB`` with ``options`` for the pipeline ``name``.

        Options are given as ``--name=value``, so that no value is taken for an option. ``payload``: standard input.

        Raises:
            RefusedError: the command failed; the error has its text.
            UnavailableError: it took too long, or printed too much.
        """
        return await self._command(name, verb, ["dead-letter", verb], options, payload)

    # Jobs

    def start_job(self, kind: JobKind, name: str, parameters: Mapping[str, str]) -> PipelineJob:
        """Start a job for the pipeline ``name``; ``parameters`` are options of its command by name.

        Raises:
            RefusedError: one of this kind runs already.
            UnavailableError: the node is shutting down.
        """
        if self._closed:
            raise _closing()
        for job in self._jobs.values():
            if job.kind is kind and job.state == "running":
                raise RefusedError(
                    f"`{kind}` of pipeline {job.name!r} is running", hint="wait until it has ended, or cancel it there"
                )
        job = self._jobs[kind, name] = _Job(kind, name, parameters)
        job.task = asyncio.create_task(self._run_job(job, [f"--{key}={value}" for key, value in parameters.items()]))
        return job.snapshot()

    def job(self, kind: JobKind, name: str) -> PipelineJob | None:
        """Return the running or last job of this kind for the pipeline ``name``; None if there was none."""
        job = self._jobs.get((kind, name))
        return None if job is None else job.snapshot()

    async def cancel_job(self, kind: JobKind, name: str) -> PipelineJob | None:
        """End the running job of this kind for the pipeline ``name``; return :meth:`job`."""
        job = self._jobs.get((kind, name))
        await _cancelled(None if job is None else job.task)
        return self.job(kind, name)

    async def _run_job(self, job: _Job, options: Sequence[str]) -> None:
        rest = bytearray()
        total = 0

        def received(chunk: bytes) -> None:
            nonlocal rest, total
            total += len(chunk)
            if total > MAX_JOB_OUTPUT:
                raise _too_much(MAX_JOB_OUTPUT)
            rest += chunk
            if b"\n" in chunk:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    job.add(json.loads(line))

        try:
            arguments, directory = self._arguments(job.name, job.kind, [job.kind], options)
            async with asyncio.timeout(JOB_TIMEOUT_S):
                status, err = await self._run(job.name, job.kind, arguments, directory, b"", received)
            if status == 0 or (status == 1 and job.is_off and _printed_error(err) is None):
                job.end("done")
            else:
                job.end("failed", _failure(job.kind, status, err))
        except asyncio.CancelledError:
            job.end("cancelled")
            raise
        except TimeoutError:
            job.end("failed", _too_long(job.name, job.kind, JOB_TIMEOUT_S))
        except PenstockError as error:
            job.end("failed", error)
        except (ValueError, TypeError, KeyError) as error:
            what, hint = f"`{job.kind}` printed an unknown result", "restart the node: another version was installed"
            job.end("failed", RefusedError(what, why=repr(error), hint=hint))

    # Processes

    async def _command(
        self,
        name: str,
        verb: str,
        command: Sequence[str],
        options: Sequence[str],
        payload: bytes = b"",
        *,
        rows_if: Collection[int] = (0,),
    ) -> CommandResult:
        """Run a command; ``rows_if``: exit statuses with which it printed its rows."""
        arguments, directory = self._arguments(name, verb, command, options)
        out = bytearray()

        def received(chunk: bytes) -> None:
            out.extend(chunk)
            if len(out) > MAX_OUTPUT:
                raise _too_much(MAX_OUTPUT)

        try:
            async with self._one, asyncio.timeout(TIMEOUT_S):
                if self._closed:
                    raise _closing()
                run = self._run(name, verb, arguments, directory, payload, received)
                self._command_task = asyncio.create_task(run)
                status, err = await self._command_task
        except TimeoutError:
            raise _too_long(name, verb, TIMEOUT_S) from None
        except asyncio.CancelledError:
            if self._closed:
                raise _closing() from None
            raise
        if status not in rows_if or (status != 0 and not out):
            raise _failure(verb, status, err)
        return CommandResult([json.loads(line) for line in out.decode().splitlines()], err.splitlines())

    def _arguments(
        self, name: str, verb: str, command: Sequence[str], options: Sequence[str]
    ) -> tuple[list[str], Path]:
        """Return the arguments and the working directory of a command. Raises RefusedError."""
        if any("\0" in option for option in options):
            raise RefusedError(
                f"an option of `{verb}` contains the character NUL",
                hint="use names of steps, and ids, as they are shown",
            )
        section = self.pipelines[name]
        arguments = ["pipeline", *command, str(section.file.absolute()), "--json", *options]
        if section.state_dir is not None and verb in _NEEDS_STATE_DIR:
            state = section.state_dir
            arguments.append(f"--state-dir={state.absolute() if isinstance(state, Path) else state}")
        return arguments, section.file.parent if section.directory is None else section.directory

    async def _run(
        self,
        name: str,
        verb: str,
        arguments: Sequence[str],
        directory: Path,
        payload: bytes,
        received: Callable[[bytes], None],
    ) -> tuple[int, str]:
        """Run a process, and pass on its standard output; return its exit status and its standard error.

        It ends with the node, also if the node is killed.
        """
        with parent_pipe() as (descriptor, variable):
            try:
                process = await asyncio.create_subprocess_exec(
                    *_PROGRAM,
                    *arguments,
                    cwd=directory,
                    env={**os.environ, **variable, "NO_COLOR": "1"},
                    pass_fds=(descriptor,),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    start_new_session=True,  # so that its process group has Java as well
                )
            except OSError as error:
                raise RefusedError(
                    f"pipeline {name!r}: `{verb}` cannot run in {directory}",
                    why=error.strerror,
                    hint="correct `pipelines` in the configuration of the node, and restart it",
                ) from error
            assert process.stdout is not None
            assert process.stderr is not None
            err = bytearray()

            def complained(chunk: bytes) -> None:
                err.extend(chunk)
                if len(err) > MAX_OUTPUT:
                    raise _too_much(MAX_OUTPUT)

            tasks = [
                asyncio.create_task(each)
                for each in (
                    _read(process.stdout, received), _read(process.stderr, complained), _write(process, payload),
                )
            ]  # fmt: skip
            try:
                await asyncio.gather(*tasks)
                return await process.wait(), err.decode(errors="replace")
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await _end(process)
                raise


_ON_THE_MACHINE: Final = "run the command on the machine: penstock pipeline"


def _too_much(limit: int) -> UnavailableError:
    return UnavailableError(f"the output is larger than {limit >> 20} MiB", hint=_ON_THE_MACHINE)


def _too_long(name: str, verb: str, limit_s: float) -> UnavailableError:
    return UnavailableError(f"pipeline {name!r}: `{verb}` took longer than {limit_s:.0f} s", hint=_ON_THE_MACHINE)


def _closing() -> UnavailableError:
    return UnavailableError("the node is shutting down", applied=False)


async def _cancelled(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task once, and wait for its end: a second time would disturb the end of its process."""
    if task is not None and not task.done():
        if not task.cancelling():
            task.cancel()
        await asyncio.wait([task])


async def _end(process: Process) -> None:
    """End a process and those that it has started by SIGTERM, and by SIGKILL if they do not end.

    Java as well: Python waits for the answer of Spark, which comes after the job or when Java has ended.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(END_S):
            await _ended(process)
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await _ended(process)


async def _ended(process: Process) -> None:
    """Wait for the end. A process whose pipes are not read to their end is never reported as ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    await asyncio.gather(*(_read(each, lambda _: None) for each in (process.stdout, process.stderr)), process.wait())


async def _read(stream: StreamReader, received: Callable[[bytes], None]) -> None:
    while chunk := await stream.read(1 << 16):
        received(chunk)


async def _write(process: Process, payload: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it failed before it read; its error says why
        process.stdin.write(payload)
        await process.stdin.drain()
        process.stdin.close()


def _printed_error(text: str) -> RefusedError | None:
    """Return the error that a command printed last, as JSON; None if it printed none."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError, TypeError, KeyError):
            error = json.loads(line)["error"]
            return RefusedError(error["what"], why=error["why"], hint=error["hint"])
    return None


def _failure(verb: str, status: int, text: str) -> RefusedError:
    """Return the error that a command printed last, or its exit status and the end of its text if it printed none."""
    if (printed := _printed_error(text)) is not None:
        return printed
    said = text.strip()[-2000:]
    if status < 0:
        return RefusedError(
            f"`{verb}` was ended by signal {-status} ({signal.strsignal(-status)})",
            why=said or None,
            hint="look into the log of the machine, which may have no memory left",
        )
    return RefusedError(said or f"`{verb}` failed with exit status {status}, without a message", hint=_ON_THE_MACHINE)
