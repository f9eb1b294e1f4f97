"""The parser: typer's commands, built from the descriptions in :mod:`penstock.cli.declarations`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, Signature
from typing import Annotated, Any, Final, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.context_file import ADDRESSES
from penstock.cli.declarations import REQUIRED, Argument, Command, Commands, DeclaredCommand, Description, parameters_of
from penstock.cli.options import context_values, start_collecting
from penstock.cli.parameters import PlainParameters, source_of

__all__ = ["command_name", "help_record", "typer_command"]

_PYTHON_TYPE: Final = re.compile(r" <(?:str|path|file|directory|list\[\w+\])>$")
_TEXT_DEFAULT: Final = re.compile(r"\bdefault: \(([^()]*)\)(?=[;\]])")

_GIVEN: Final = ("COMMANDLINE", "ENVIRONMENT")
"""Sources of values that have precedence over a context."""


def typer_command(group: Commands, called: str | None = None) -> Any:
    """Build the command of a module, or its group of commands: only the command ``called``, if it has that name.

    Typer builds all commands of a group, which for ``kv get`` takes longer than the rest of the parser.
    """
    return typer.main.get_command(_typer(group, called))


def command_name(command: DeclaredCommand) -> str:
    """Return the name with which a command of a group is called."""
    return command.name or command.function.__name__.replace("_", "-")


def _typer(group: Commands, called: str | None = None) -> typer.Typer:
    # Plain help: half the start-up time, and the text of the reference page.
    settings: dict[str, Any] = {"rich_markup_mode": None, "add_completion": False}
    if group.help_text is not None:
        settings |= {"cls": CommandGroup, "no_args_is_help": True, "help": group.help_text}
    app = typer.Typer(**settings)
    commands, groups = group.commands, group.groups
    if group.help_text is not None:
        app.callback()(_no_group_options)  # without it, typer would turn a group of one command into that command
        if any(command_name(each) == called for each in commands):
            commands, groups = [each for each in commands if command_name(each) == called], {}
        elif called in groups:
            commands, groups = [], {called: groups[called]}
    for each in commands:
        epilog = "\n".join(each.examples)
        app.command(each.name, cls=CommandWithExamples, epilog=epilog)(_ForTyper(each.function))
    for name, inner in groups.items():
        app.add_typer(_typer(inner), name=name)
    return app


def _no_group_options() -> None:
    pass


class _ForTyper:
    """A command with the signature that typer reads: options and arguments are typer's."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.__name__ = command.__name__
        self.__doc__ = command.__doc__
        self.__module__ = command.__module__
        self.__signature__ = Signature(list(_signature(command)))
        self.__annotations__ = {name: each.annotation for name, each in self.__signature__.parameters.items()}

    def __call__(self, **given: Any) -> int | None:
        return self._command(**given)


def _signature(command: Command) -> Iterator[Parameter]:
    for name, annotation, default in parameters_of(command):
        for_typer = annotation
        if get_origin(annotation) is Annotated:
            kind, *descriptions = get_args(annotation)
            for_typer = Annotated[(kind, *map(_for_typer, descriptions))]
        value = Parameter.empty if default is REQUIRED else default
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=for_typer)


def _for_typer(description: Any) -> Any:
    """Return typer's description of an option or argument; any other annotation unchanged."""
    if not isinstance(description, Description):
        return description
    settings = dict(description.settings)
    if (parse := settings.get("parser")) is not None:
        settings["parser"] = _explained(parse)
    if isinstance(description, Argument):
        return typer.Argument(**settings)
    return typer.Option(*description.names, **settings)


def _explained(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a parser whose errors are typer's, which the parser prints with the name of the option."""

    def parser(value: Any) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


class CommandGroup(PlainParameters, TyperGroup):
    """Group of commands whose list shows the first paragraph of each help text completely."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write one row per command, in the order in which they were added."""
        rows = [(name, _first_paragraph(command.help or "")) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def help_record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """Return name and help of a parameter, without what typer adds: the Python type after the name of an argument, and
    parentheses around a default that is given as text."""
    record: tuple[str, str] | None = parameter.get_help_record(ctx)
    if record is None:
        return None
    names, text = record
    if parameter.param_type_name == "argument":
        names = _PYTHON_TYPE.sub("", names)
    return names, _TEXT_DEFAULT.sub(r"default: \1", text)


class CommandWithExamples(PlainParameters, TyperCommand):
    """Command whose epilog is a list of examples, one per line; its options have the values of the selected context."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with one pair of brackets around optional arguments and no braces around
        required ones, which mean a choice elsewhere."""
        pieces = super().collect_usage_pieces(ctx)
        plain = (re.sub(r"^(?:\{(.+?)\}|\[(\[.+?\])\])", r"\1\2", piece) for piece in pieces)
        return [piece.replace("......", "...") for piece in plain]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := help_record(parameter, ctx)) is not None:
                sections["Arguments" if parameter.param_type_name == "argument" else "Options"].append(record)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments; for options that are not set, the values of the context are the defaults, and without a
        context the addresses of the node that runs here."""
        variables = {each.name: each.envvar for each in self.params if isinstance(each.envvar, str) and each.name}
        connects = not set(ADDRESSES.values()).isdisjoint(variables.values())
        if parent is not None and connects:
            # Parsed first without them, because the credentials of a context are for its own addresses only.
            parsed = super().make_context(info_name, list(args), parent, **{**extra, "resilient_parsing": True})
            given = {name: source_of(parsed, name) in _GIVEN for name in variables}
            found = context_values(parent.find_root().obj, variables, given, parsed.params)
            extra["default_map"] = {**found, **self._unknown_http(parsed.params, given, found)}
        return super().make_context(info_name, args, parent, **extra)

    def _unknown_http(
        self, params: Mapping[str, Any], given: Mapping[str, bool], found: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return an empty HTTP address if that of the set master is not known: the default is that of another node."""
        if given.get("http") is not False or "http" in found or "tube_master" not in given:
            return {}
        standard = next(each.default for each in self.params if each.name == "tube_master")
        master = params["tube_master"] if given["tube_master"] else found.get("tube_master", standard)
        return {} if master == standard else {"http": ""}

    def invoke(self, ctx: Any) -> Any:
        """Call the command; garbage collection, which its process starts without, leaves out all objects until then."""
        start_collecting()
        return super().invoke(ctx)

    def format_epilog(self, _ctx: Any, formatter: Any) -> None:
        """Write the examples as a section, without wrapping."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _first_paragraph(text: str) -> str:
    """Return the first paragraph of a docstring, as one line."""
    return " ".join(text.partition("\n\n")[0].split())
