"""`penstock doctor`: check machine, configuration, data directory and running node; collect them for support."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.config import File, effective_yaml
from penstock.cli.context_file import ADDRESSES
from penstock.cli.node_api import NodeApi, NodeOptions, connects_to_node
from penstock.cli.options import Commands, Json
from penstock.cli.output import escape, fold, note, print_json, use_colour
from penstock.cli.parameters import source_of
from penstock.errors import ConfigError, PenstockError, RefusedError, UnavailableError

if TYPE_CHECKING:
    from penstock.node.doctor import CheckResult
    from penstock.spark.environment.java import Java

__all__ = ["app"]

_COLOURS = {"ok": 32, "warning": 33, "problem": 31}
_BUNDLED = (
    *("overview", "history", "rules", "topics", "groups", "events"),
    *("clients", "brokers", "pipelines", "log-levels", "cluster"),
)
"""Queries of the API whose data, of lists the first page, are in a bundle."""

app = Commands()

Bundle = Annotated[
    Path | None,
    typer.Option(
        help="Write a .tar.gz with the findings, the configuration without secrets, and the state and metrics of the "
        "running node.",
        metavar="FILE",
    ),
]


@app.add(
    "penstock doctor",
    "penstock doctor /etc/penstock/penstock.yaml",
    "penstock doctor --bundle support.tar.gz",
    "penstock doctor --http https://node:8080 --username ann --password-file secret",
)
@connects_to_node
def doctor(
    ctx: typer.Context, file: File = None, bundle: Bundle = None, as_json: Json = False, *, node: NodeOptions
) -> None:
    """Check machine, configuration, data directory, addresses, and the node that runs on them.

    Each finding has its cause and what to do. Nothing is changed. Run it as the user of the node, with the same
    environment variables. The exit status is 1 if there is a problem; warnings do not change it. `penstock fsck` checks
    the stored data.

    With --http, the node there is checked, and not the addresses of this machine. The variable and a context have the
    same effect if a node answers at their address, and neither a configuration nor a data directory is given or found.
    """
    from penstock.node.doctor import Level, diagnose

    if file == Path("bundle") and not file.exists():
        raise ConfigError(
            "doctor: there is no configuration file 'bundle'",
            hint="for a support bundle: penstock doctor --bundle FILE",
        )
    flags = {"data-dir": str(node.data_dir) if source_of(ctx, "data_dir") == "COMMANDLINE" else None}
    environment: Mapping[str, str] = os.environ
    other = _other_node(ctx, file, node)
    api = other or _node(file, flags, node)
    if other is not None:  # the variables of addresses are those of a client, and not of listeners
        environment = {name: text for name, text in environment.items() if name not in ADDRESSES.values()}

    def check() -> Iterator[CheckResult]:
        yield from diagnose(file, flags, environment, addresses=api is None)
        yield from _spark_checks()
        if api is not None:
            yield from _node_checks(api)

    findings: list[CheckResult] = []
    for finding in check():
        findings.append(finding)
        _print(finding, as_json=as_json)
    problems, warnings = (sum(each.level is level for each in findings) for level in (Level.PROBLEM, Level.WARNING))
    if not as_json:
        sys.stdout.write(f"\nproblems: {problems}, warnings: {warnings}\n")
    if bundle is not None:
        _write_bundle(bundle, findings, api, None if other else lambda: effective_yaml(file, flags))
    if problems:
        raise typer.Exit(1)


def _print(finding: CheckResult, *, as_json: bool) -> None:
    if as_json:
        print_json(finding._asdict())
        return
    level = f"{finding.level.value:<8}"
    if use_colour(sys.stdout):
        level = f"\x1b[{_COLOURS[finding.level.value]}m{level}\x1b[0m"
    out = sys.stdout.write
    out(fold(f"{level} ", f"{finding.part}: {escape(finding.what)}") + "\n")
    if finding.why:
        out(fold(f"{'':9}why: ", escape(finding.why)) + "\n")
    if finding.hint:
        out(fold(f"{'':9}hint: ", escape(finding.hint)) + "\n")


def _spark_checks() -> Iterator[CheckResult]:
    """The findings about the Spark of this environment, with which pipelines run; none if it is not installed."""
    if find_spec("pyspark") is None:
        return
    from penstock.cli.spark_host import host_problems, this_machine
    from penstock.node.doctor import CheckResult, Level
    from penstock.spark.environment.class_archive import archive_path, installation
    from penstock.spark.environment.java import find_java

    found: Java | None = None
    try:
        found = find_java(create=False)
        java, home = found.runtime, installation(create=False)
        archived = home is not None and archive_path(home, java).is_file()
    except (PenstockError, OSError) as error:
        failure = error if isinstance(error, PenstockError) else ConfigError(str(error))
        yield CheckResult(Level.WARNING, "spark", failure.what, failure.why, failure.hint)
    else:
        if archived or home is None:  # there is no archive for SPARK_HOME
            yield CheckResult(
                Level.OK, "spark", f"Java is {java}" + (", and its classes are archived" if archived else "")
            )
        else:
            yield CheckResult(
                Level.OK,
                "spark",
                f"Java is {java}, without an archive of Spark's classes",
                "each session reads and checks thousands of classes",
                "start pipelines faster: penstock pipeline warm-up",
            )
    for problem in host_problems(this_machine(), None if found is None else found.source):
        yield CheckResult(Level.WARNING, "spark", *problem)


def _other_node(ctx: typer.Context, file: Path | None, node: NodeOptions) -> NodeApi | None:
    """The API of the node that --http names; also the variable or a context, if it responds and nothing else names a
    node: the node's own environment has its listener in that variable."""
    from penstock.node.config.node import DEFAULT_FILE

    if node.http is None:
        return None
    if source_of(ctx, "http") == "COMMANDLINE":
        return node.connect()
    if file or DEFAULT_FILE.exists() or source_of(ctx, "data_dir") != "DEFAULT" or node.data_dir.exists():
        return None
    api = node.connect()
    try:
        api.get("overview")
    except UnavailableError:
        return None
    except RefusedError:
        pass  # a finding
    return api


def _node(file: Path | None, flags: dict[str, str | None], node: NodeOptions) -> NodeApi | None:
    """The API of the node that uses the data directory; None if there is none, or the configuration is invalid."""
    from penstock.node.config.node import load_config
    from penstock.node.data_dir import running_node

    try:
        data_dir = load_config(file, flags, os.environ).data_dir
    except PenstockError:  # reported by the checks of the configuration
        return None
    return None if running_node(data_dir) is None else replace(node, http=None, data_dir=data_dir).connect()


def _node_checks(node: NodeApi) -> Sequence[CheckResult]:
    """The findings of the node about itself."""
    from penstock.console.snapshots import Overview
    from penstock.node.doctor import CheckResult, Level

    try:
        found = node.snapshot(Overview, "overview")
    except PenstockError as error:
        return [CheckResult(Level.PROBLEM, "node", error.what, error.why, error.hint)]
    reasons = [
        CheckResult(Level(reason.severity.value), reason.part, reason.what, reason.why, reason.hint)
        for reason in found.health.reasons
    ]
    about = f"pid {found.node.pid} at {node.address}"
    if found.health.ready:
        return [CheckResult(Level.OK, "node", f"ready, {about}"), *reasons]
    return [CheckResult(Level.PROBLEM, "node", f"{found.health.state}, but not ready, {about}", None, None), *reasons]


def _write_bundle(
    target: Path, findings: Sequence[CheckResult], node: NodeApi | None, configuration: Callable[[], str] | None
) -> None:
    """Write the files of a support bundle. ``configuration``: None for a node that is not here."""
    files = {"findings.jsonl": "".join(json.dumps(finding._asdict()) + "\n" for finding in findings)}
    if configuration is not None:
        try:
            files["configuration.yaml"] = configuration()
        except PenstockError as error:
            files["configuration.txt"] = f"{error}\n"
    if node is not None:
        for name in _BUNDLED:
            try:
                files[f"{name}.json"] = json.dumps(node.get(name), indent=1) + "\n"
            except PenstockError as error:
                if not (isinstance(error, RefusedError) and error.code == HTTPStatus.NOT_FOUND):  # no cluster
                    files[f"{name}.txt"] = f"{error}\n"
        try:
            files["metrics.txt"] = node.metrics()
        except PenstockError as error:
            files["metrics.error.txt"] = f"{error}\n"
    now = int(time.time())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"penstock-{now}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), now, 0o600
            archive.addfile(entry, io.BytesIO(data))
    try:
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)  # also of a file that existed
            file.write(packed.getvalue())
    except OSError as error:
        raise ConfigError(
            f"doctor: --bundle {target} cannot be written",
            option="--bundle",
            why=error.strerror,
            hint="choose a file in a directory that you may write to",
        ) from error
    note(
        f"{target}: {', '.join(files)}; they have no passwords and no payloads, but names of clients, topics, users "
        "and keys, and errors may quote values"
    )
