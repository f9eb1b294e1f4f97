"""The grammar of the command line (CONTRIBUTING, "Command line"), checked on every command."""

from __future__ import annotations

import importlib
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import typer

from penstock.cli.main import COMMANDS, main
from penstock.cli.parser import typer_command


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from _leaves(child, (*path, name))


LEAVES = dict(
    leaf
    for name, entry in COMMANDS.items()
    for leaf in _leaves(typer_command(importlib.import_module(entry.module).app), tuple(name.split()))
)


def _options() -> Iterator[tuple[str, str, Any]]:
    for path, command in LEAVES.items():
        for parameter in command.params:
            for name in parameter.opts:
                if name.startswith("--"):
                    yield " ".join(path), name, parameter


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_an_example_that_parses(path: tuple[str, ...]) -> None:
    examples = (LEAVES[path].epilog or "").splitlines()
    assert examples
    for example in examples:
        words = shlex.split(re.split(r" [|<>] ", example)[0])
        assert tuple(words[: len(path) + 1]) == ("penstock", *path)
        context = LEAVES[path].make_context(path[-1], words[len(path) + 1 :])
        assert context.params is not None


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_no_line_of_the_help_is_wider_than_80_or_ends_in_a_hyphen(path: tuple[str, ...]) -> None:
    context = LEAVES[path].make_context("penstock " + " ".join(path), [], resilient_parsing=True)
    for line in LEAVES[path].get_help(context).splitlines():
        assert len(line) <= 80, line
        assert not re.search(r"\w-$", line), line


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_the_usage_line_has_conventional_brackets_and_no_types(path: tuple[str, ...]) -> None:
    context = typer.Context(LEAVES[path], info_name="penstock " + " ".join(path))
    for piece in LEAVES[path].collect_usage_pieces(context):
        assert re.fullmatch(r"\[OPTIONS\]|([A-Z|]+|\[[A-Z|]+\])(\.\.\.)?", piece)
    shown = LEAVES[path].get_help(context)
    assert not re.search(r"<(str|path|list)|default: \(", shown)


def test_units_are_in_values_and_not_in_names() -> None:
    wrong = [(path, name) for path, name, _ in _options() if re.search(r"-(s|ms|seconds|bytes|mib|mb)$", name)]
    assert wrong == []


def test_an_option_means_the_same_in_every_command() -> None:
    kinds: dict[str, set[object]] = defaultdict(set)
    for _, name, parameter in _options():
        kinds[name].add(parameter.metavar or str(parameter.bare_type))
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def test_durations_and_sizes() -> None:
    found = {name: parameter for _, name, parameter in _options() if parameter.metavar in ("DURATION", "SIZE")}
    assert {"--timeout", "--ttl", "--wait", "--watch", "--retention", "--max-store-size"} <= set(found)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("10s", 10), ("1.5m", 90), ("2h", 7200), ("1d", 86_400), ("7", 7)],
)
def test_a_duration(text: str, seconds: float) -> None:
    context = LEAVES["kv", "get"].make_context("get", ["key", "--timeout", text])
    assert context.params["timeout"] == seconds


def test_every_duration_accepts_a_unit_and_a_bare_number() -> None:
    """Among them ``pipeline status --watch 5``."""
    found = [option for option in _options() if option[2].metavar == "DURATION"]
    assert ("pipeline status", "--watch") in [(path, name) for path, name, _ in found]
    for path, _, parameter in found:
        context = typer.Context(LEAVES[tuple(path.split())])
        assert [parameter.process_value(context, text) for text in ("5", "5s", "5000ms", "2m")] == [5, 5, 5, 120]


def test_forever_is_accepted_only_where_a_command_can_do_without_an_end() -> None:
    """Elsewhere it would be a number that no request has: an interval of MQTT, a time to live, a pause."""
    found = {}
    for path, name, parameter in _options():
        if parameter.metavar == "DURATION":
            with suppress(typer.BadParameter):
                found[path, name] = parameter.process_value(typer.Context(LEAVES[tuple(path.split())]), "forever")
    assert found == dict.fromkeys(
        [
            ("pipeline dead-letter purge", "--older-than"),
            ("pipeline maintain", "--retention"),
            ("pipeline run", "--wait"),
            ("tube produce", "--wait"),
        ],
        math.inf,
    )


@pytest.mark.parametrize(("text", "size"), [("512KiB", 1 << 19), ("64MiB", 1 << 26), ("4GiB", 1 << 32), ("7", 7)])
def test_a_size(text: str, size: int) -> None:
    context = LEAVES["tube", "topic", "create"].make_context("create", ["topic", "--max-message-size", text])
    assert context.params["max_message_size"] == size


@pytest.mark.parametrize(
    "arguments",
    [("kv", "get", "k", "--timeout", "soon"), ("tube", "topic", "create", "t", "--max-message-size", "1MB")],
)
def test_the_error_of_an_invalid_value_names_accepted_values(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert re.search(r"is not a (duration: write 500ms, 10s|size: write 512KiB)", capsys.readouterr().err)
