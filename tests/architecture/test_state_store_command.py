"""A state store command has four places, and a test names the one that is missing.

They are a row of ``COMMANDS`` with the parser next to it, the engine, the client, and a rule of the model. Reference
pages, extension names and access follow from the row; the docstring of ``commands.py`` lists what some commands need
besides (a new error, BATCH, a shell command).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.statestore.codec.commands import COMMANDS, Command, Example, Extension, Verb, parse
from penstock.statestore.codec.dialects import SDK
from penstock.statestore.engine.requests import Context
from penstock.statestore.engine.store import Engine
from tests.architecture.copies import ROOT, copy_tree, run_in

STATESTORE = ROOT / "src" / "penstock" / "statestore"
NOW = 1_700_000_000_000

ROW = """
        CommandSpec(
            Verb.TESTED,
            2,
            2,
            Access.READ,
            "TESTED key",
            "answer a test",
            extension=Extension.TESTED,
            text="A command that this test adds.",
            examples=(Example("the key exists", "TESTED k", _SET_KEY),),
        ),
"""


@pytest.mark.parametrize("verb", Verb)
def test_the_table_describes_the_command(verb: Verb) -> None:
    spec = COMMANDS.get(verb)
    assert spec is not None, f"{verb} has no row of COMMANDS in statestore/codec/commands.py"
    assert spec.syntax.split(" ")[0] == verb
    assert spec.text.strip(), f"{verb}: the row has no text"
    assert spec.examples, f"{verb}: the row has no example"


@pytest.mark.parametrize(("verb", "example"), [(spec.verb, e) for spec in COMMANDS.values() for e in spec.examples[:1]])
def test_parser_and_engine_execute_the_command(verb: Verb, example: Example) -> None:
    engine = Engine(extensions=~Extension.NONE, secret=bytes(16))
    for words in (*example.before, example.request):
        try:
            command = parse([b"" if word == "''" else word.encode() for word in words.split(" ")], ~Extension.NONE)
        except (AssertionError, UnboundLocalError) as error:
            pytest.fail(f"{verb}: _parse in statestore/codec/commands.py has no branch for it ({error!r})")
        assert isinstance(command, Command), f"{verb}: the parser refuses its example {words!r}: {command}"
        context = Context("c", SDK, f"{NOW}:0:c".encode())
        try:
            answer, _ = engine.execute(command, context, NOW, NOW)
        except (AssertionError, TypeError) as error:
            pytest.fail(f"{verb}: Engine._carry_out in statestore/engine/store.py has no branch for it ({error!r})")
        assert answer.error is None, f"{verb}: the engine refuses its example {words!r}: {answer.error}"


@pytest.mark.parametrize("verb", Verb)
def test_the_client_sends_the_command(verb: Verb) -> None:
    """Sent commands are byte strings in the client's modules."""
    sources = [path.read_text(encoding="utf-8") for path in (STATESTORE / "client").glob("*.py")]
    assert any(f'b"{verb}"' in text for text in sources), (
        f"{verb}: no method of StateStoreClient in statestore/client/client.py sends it"
    )


def test_a_command_is_described_once(tmp_path: Path) -> None:
    """Reference pages, lists in other pages and names of the extension follow from a row, with parser and engine."""
    copy_tree(tmp_path, "src", "tools", "benchmarks", "examples", "docs/reference", "docs/security")
    commands = tmp_path / "src" / "penstock" / "statestore" / "codec" / "commands.py"
    text = commands.read_text(encoding="utf-8")
    text = text.replace('    BATCH = "BATCH"\n', '    BATCH = "BATCH"\n    TESTED = "TESTED"\n')
    text, extensions = re.subn(r"    BATCH = (\d+)\n", r"    BATCH = \1\n    TESTED = 1 << 20\n", text)
    text = text.replace("    for spec in (\n", f"    for spec in ({ROW}", 1)
    text = text.replace("or verb is Verb.PTTL", "or verb is Verb.PTTL or verb is Verb.TESTED", 1)
    assert extensions == 1
    commands.write_text(text, encoding="utf-8")
    engine = tmp_path / "src" / "penstock" / "statestore" / "engine" / "store.py"
    text = engine.read_text(encoding="utf-8").replace("if verb is Verb.PTTL:", "if verb in (Verb.PTTL, Verb.TESTED):")
    engine.write_text(text, encoding="utf-8")
    program = (
        "from penstock.node.config.statestore import StateStoreSection\n"
        "from penstock.statestore.codec.commands import COMMANDS, Extension\n"
        "from tools import reference\n"
        "options = StateStoreSection(extensions=['tested']).options(strict_read=False)\n"
        "assert options.extensions & Extension.TESTED\n"
        "pages = reference.generated()\n"
        "assert 'A command that this test adds.' in pages['state-store/tested.md']()\n"
        "for page, expected in (\n"
        "    ('state-store.md', '`TESTED key`'), ('state-store.md', '| `tested` |'), ('cli.md', ', tested'),\n"
        "    ('configuration.md', '`tested`'), ('features.md', 'TESTED'), ('../security/authorization.md', 'TESTED'),\n"
        "):\n"
        "    assert expected in pages[page](), (page, expected)\n"
    )
    run_in(tmp_path, program)
