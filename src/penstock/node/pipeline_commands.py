"""Dead letters and plans of the pipelines in the configuration, for the console.

Each request runs a command of ``penstock pipeline`` in a process of its own: tables need pyarrow, which is not loaded
into the node, and a large table or an unreadable file does not affect it. One process runs at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio import StreamReader
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.errors import ConfigError, RefusedError, UnavailableError
from penstock.node.config.node import PipelineSection

__all__ = ["CommandResult", "PipelineCommands", "missing_files"]

TIMEOUT_S: Final = 120.0
"""Time limit of a command; a redrive waits for the acknowledgements of the source."""
MAX_OUTPUT: Final = 64 << 20
"""Limit of the output of a command in bytes: the letters of a page with their records."""
_PROGRAM: Final = (sys.executable, "-m", "penstock.cli")
_NEEDS_STATE_DIR: Final = frozenset({"redrive", "plan"})


class CommandResult(NamedTuple):
    """Rows that a command printed, and its notes for people."""

    rows: list[dict[str, Any]]
    notes: list[str]


def missing_files(pipelines: Mapping[str, PipelineSection]) -> list[ConfigError]:
    """Return an error for each pipeline whose file does not exist: only the console needs it, so the node starts."""
    return [
        ConfigError(
            f"the file of pipeline {name!r} does not exist: {section.file}",
            option=f"pipelines.{name}.file",
            why="the console cannot show its dead letters and changes",
            do="correct `file`, which is relative to the configuration file",
        )
        for name, section in pipelines.items()
        if not section.file.is_file()
    ]


class PipelineCommands:
    """Runs commands for ``pipelines``, by name."""

    def __init__(self, pipelines: Mapping[str, PipelineSection]) -> None:
        self.pipelines = pipelines
        self._one = asyncio.Lock()
        self._process: Process | None = None
        self._closed = False

    async def close(self) -> None:
        """End the command that runs, and refuse further ones."""
        self._closed = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
        async with self._one:
            pass

    async def plan(self, name: str) -> dict[str, Any]:
        """Run ``penstock pipeline plan`` for the pipeline ``name``, and return the plan.

        Raises:
            RefusedError, UnavailableError: as :meth:`dead_letters`.
        """
        # Status 1 with a plan: the file has a change with which a run cannot continue.
        return (await self._command(name, "plan", ["plan"], [], rows_if=(0, 1))).rows[0]

    async def dead_letters(self, name: str, verb: str, options: Sequence[str], payload: bytes = b"") -> CommandResult:
        """Run ``penstock pipeline dead-letter VERB`` with ``options`` for the pipeline ``name``.

        Options are given as ``--name=value``, so that no value is taken for an option. ``payload``: standard input.

        Raises:
            RefusedError: the command failed; the error has its text.
            UnavailableError: it took too long, or printed too much.
        """
        return await self._command(name, verb, ["dead-letter", verb], options, payload)

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
        section = self.pipelines[name]
        arguments = ["pipeline", *command, str(section.file.absolute()), "--json", *options]
        if section.state_dir is not None and verb in _NEEDS_STATE_DIR:
            state = section.state_dir
            arguments.append(f"--state-dir={state.absolute() if isinstance(state, Path) else state}")
        directory = section.file.parent if section.directory is None else section.directory
        try:
            async with self._one, asyncio.timeout(TIMEOUT_S):
                if self._closed:
                    raise UnavailableError("the node is shutting down", applied=False)
                status, out, err = await self._run(arguments, directory, payload)
        except TimeoutError:
            raise UnavailableError(
                f"pipeline {name!r}: `{verb}` took longer than {TIMEOUT_S:.0f} s", do=_ON_THE_MACHINE
            ) from None
        except OSError as error:
            raise RefusedError(
                f"pipeline {name!r}: `{verb}` cannot run in {directory}",
                why=error.strerror,
                do="correct `pipelines` in the configuration of the node, and restart it",
            ) from error
        if status not in rows_if or (status != 0 and not out):
            raise _failure(err)
        return CommandResult([json.loads(line) for line in out.splitlines()], err.splitlines())

    async def _run(self, arguments: Sequence[str], directory: Path, payload: bytes) -> tuple[int, str, str]:
        process = self._process = await asyncio.create_subprocess_exec(
            *_PROGRAM,
            *arguments,
            cwd=directory,
            env={**os.environ, "NO_COLOR": "1"},
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        output = asyncio.create_task(_read(process.stdout))
        errors = asyncio.create_task(_read(process.stderr))
        tasks = (output, errors, asyncio.create_task(_write(process, payload)))
        try:
            await asyncio.gather(*tasks)
            return await process.wait(), output.result().decode(), errors.result().decode(errors="replace")
        finally:
            self._process = None
            for task in tasks:
                task.cancel()
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await asyncio.wait(tasks)
                # A process whose pipes are not read to their end is never reported as ended.
                await process.communicate()


_ON_THE_MACHINE: Final = "run the command on the machine: penstock pipeline"


async def _read(stream: StreamReader) -> bytes:
    data = bytearray()
    while chunk := await stream.read(1 << 16):
        data += chunk
        if len(data) > MAX_OUTPUT:
            raise UnavailableError(f"the output is larger than {MAX_OUTPUT >> 20} MiB", do=_ON_THE_MACHINE)
    return bytes(data)


async def _write(process: Process, payload: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it failed before it read; its error says why
        process.stdin.write(payload)
        await process.stdin.drain()
        process.stdin.close()


def _failure(text: str) -> RefusedError:
    """Return the error that a command printed last, as JSON; the end of its text if it printed none."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError, TypeError, KeyError):
            error = json.loads(line)["error"]
            return RefusedError(error["what"], why=error["why"], do=error["hint"])
    return RefusedError(text.strip()[-2000:] or "the command failed")
