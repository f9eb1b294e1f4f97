"""`penstock passwd`: the password file of a node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import command_group
from penstock.cli.output import escape, note, print_table
from penstock.errors import ConfigError, RefusedError

if TYPE_CHECKING:
    from penstock.security.passwords import Credential

__all__ = ["app"]

app = command_group("""Keep the password file of a node: its users, for MQTT and TubeMQ alike.

    The password is asked for at the terminal, or read from standard input: one line, without its line end. It is
    never an argument, which every user of the machine could see. SIGHUP has a running node read the file again.""")

File = Annotated[Path, typer.Argument(help="The password file; made where it is not there.", metavar="FILE")]
User = Annotated[str, typer.Argument(help="The user's name.", metavar="USER")]
MOST_READ = 4096


@app.command()
def create(file: File, user: User) -> None:
    """Add USER to FILE.

    Exit status 1 when the user is already there.
    """
    _put(file, user, new=True)


@app.command(name="set")
def set_command(file: File, user: User) -> None:
    """Give USER another password.

    Exit status 1 when there is no such user.
    """
    _put(file, user, new=False)


@app.command()
def delete(file: File, user: User) -> None:
    """Take USER out of FILE.

    Exit status 1 when there is no such user.
    """
    from penstock.security.passwords import edit_passwords

    def change(old: dict[str, Credential]) -> dict[str, Credential]:
        _check(old, file, user, new=False)
        return {name: credential for name, credential in old.items() if name != user}

    _existing(file)
    edit_passwords(file, change)


@app.command()
def verify(file: File, user: User) -> None:
    """Check a password.

    Exit status 1 when it is not the user's, or there is no such user.
    """
    from penstock.security.passwords import read_passwords, verify_password

    users = read_passwords(file)
    if not verify_password(users.get(user), _password(twice=False)):
        raise RefusedError(f"passwd: this is not the password of user '{escape(user)}'")
    note("the password is right")


@app.command(name="list")
def list_command(
    file: File, as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False
) -> None:
    """List the users of FILE, and whether each can use SCRAM and TubeMQ."""
    from penstock.security.passwords import read_passwords

    rows: list[dict[str, str | int | float | bool | None]] = [
        {"user": c.name, "scram": c.verifier() is not None, "tube": bool(c.tube)} for c in read_passwords(file).values()
    ]
    print_table(rows, ("user", "scram", "tube"), as_json=as_json)


@app.command(name="tube-key")
def tube_key_command(user: User) -> None:
    """Print the key with which USER signs in the TubeMQ protocol.

    Penstock's own clients derive it from the password; a stock Java producer takes it as its password. It is secret: it
    is all that it takes to use the tube as USER.
    """
    from penstock.security.tube_key import can_sign, tube_key

    if not can_sign(user):
        raise ConfigError(
            f"passwd: user '{escape(user)}' cannot use TubeMQ",
            option="USER",
            why="the protocol carries names of 1 to 64 characters without blanks",
        )
    sys.stdout.write(tube_key(user, _password(twice=False)) + "\n")


def _put(file: Path, user: str, *, new: bool) -> None:
    from penstock.security.passwords import edit_passwords, make_credential, read_passwords

    if not new:
        _existing(file)
    # Said before a password is asked for, and checked again under the lock.
    _check(read_passwords(file) if file.exists() else {}, file, user, new=new)
    credential = make_credential(user, _password(twice=True))

    def change(old: dict[str, Credential]) -> dict[str, Credential]:
        _check(old, file, user, new=new)
        return {**old, user: credential}

    edit_passwords(file, change)


def _existing(file: Path) -> None:
    from penstock.security.passwords import read_passwords

    read_passwords(file)  # says what is wrong where it is not there


def _check(users: dict[str, Credential], file: Path, user: str, *, new: bool) -> None:
    if new and user in users:
        raise RefusedError(
            f"passwd: {file} has a user '{escape(user)}' already", do="give another password with `penstock passwd set`"
        )
    if not new and user not in users:
        raise RefusedError(
            f"passwd: {file} has no user '{escape(user)}'", do="`penstock passwd list` shows who is there"
        )


def _password(*, twice: bool) -> bytes:
    """What the user types, or the first line of standard input."""
    if sys.stdin.isatty():
        password: str = typer.prompt("Password", hide_input=True, confirmation_prompt=twice, err=True)
        return password.encode()
    line = sys.stdin.buffer.readline(MOST_READ)
    if not line:
        raise ConfigError(
            "passwd: there is no password on standard input", option="stdin", do="write one line: `printf %s ... |`"
        )
    return line.removesuffix(b"\n").removesuffix(b"\r")
