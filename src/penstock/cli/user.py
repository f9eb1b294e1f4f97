"""`penstock user`: the users in a password file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Commands, Json
from penstock.cli.output import escape, note, print_table
from penstock.errors import ConfigError, PenstockError, RefusedError

if TYPE_CHECKING:
    from penstock.security.passwords import Credential

__all__ = ["app"]

app = Commands("""Manage the users in a password file, for MQTT, TubeMQ and HTTP.

    The password is read from the terminal, or from one line of standard input. It is never an argument, because every
    user of the machine can see arguments. A running node reads the file again after penstock reload.""")

MOST_READ = 4096


def complete_user(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the users of FILE whose names begin with ``incomplete``."""
    from penstock.security.passwords import read_passwords

    try:
        users = read_passwords(Path(ctx.params["file"]))
    except (PenstockError, KeyError):  # no file to read
        return []
    return sorted(name for name in users if name.startswith(incomplete))


File = Annotated[Path, typer.Argument(help="Password file; created if it does not exist.", metavar="FILE")]
NewUser = Annotated[str, typer.Argument(help="Name of the user.", metavar="USER")]
User = Annotated[str, typer.Argument(help="Name of the user.", metavar="USER", autocompletion=complete_user)]


@app.add("penstock user create passwords alice")
def create(file: File, user: NewUser) -> None:
    """Add USER to FILE.

    Exit status 1 if the user exists.
    """
    _put(file, user, new=True)


@app.add("penstock user update passwords alice")
def update(file: File, user: User) -> None:
    """Change the password of USER.

    Exit status 1 if the user does not exist.
    """
    _put(file, user, new=False)


@app.add("penstock user delete passwords alice")
def delete(file: File, user: User) -> None:
    """Delete USER from FILE.

    Exit status 1 if the user does not exist.
    """
    from penstock.security.passwords import edit_passwords

    def change(old: dict[str, Credential]) -> dict[str, Credential]:
        _check(old, file, user, new=False)
        return {name: credential for name, credential in old.items() if name != user}

    _existing(file)
    edit_passwords(file, change)
    note(f"user '{escape(user)}' was deleted from {file}")
    _note_reload()


@app.add("penstock user verify passwords alice")
def verify(file: File, user: User) -> None:
    """Check the password of USER.

    Exit status 1 if it is wrong or the user does not exist.
    """
    from penstock.security.passwords import read_passwords, verify_password

    users = read_passwords(file)
    if not verify_password(users.get(user), _password(twice=False)):
        raise RefusedError(f"user: wrong password of '{escape(user)}'")
    note("the password is correct")


@app.add("penstock user list passwords", name="list")
def list_command(file: File, as_json: Json = False) -> None:
    """List the users of FILE, and whether each can use SCRAM and TubeMQ."""
    from penstock.security.passwords import read_passwords

    rows: list[dict[str, str | int | float | bool | None]] = [
        {"user": c.name, "scram": c.verifier() is not None, "tube": bool(c.tube)} for c in read_passwords(file).values()
    ]
    print_table(rows, ("user", "scram", "tube"), as_json=as_json)


@app.add("penstock user tube-key java-client", name="tube-key")
def tube_key_command(user: User) -> None:
    """Print the key with which USER signs in the TubeMQ protocol.

    Penstock's clients derive it from the password; Apache's Java clients use it as their password. It is a secret: with
    it, anyone can authenticate as USER.
    """
    from penstock.security.tube_key import can_sign, tube_key

    if not can_sign(user):
        raise ConfigError(
            f"user: user '{escape(user)}' cannot use TubeMQ",
            option="USER",
            why="the protocol supports names of 1 to 64 characters without blanks",
        )
    sys.stdout.write(tube_key(user, _password(twice=False)) + "\n")


def _put(file: Path, user: str, *, new: bool) -> None:
    from penstock.security.passwords import edit_passwords, make_credential, read_passwords

    if not new:
        _existing(file)
    # Checked before the password prompt, and again under the lock.
    _check(read_passwords(file) if file.exists() else {}, file, user, new=new)
    credential = make_credential(user, _password(twice=True))

    def change(old: dict[str, Credential]) -> dict[str, Credential]:
        _check(old, file, user, new=new)
        return {**old, user: credential}

    edit_passwords(file, change)
    note(f"user '{escape(user)}' was {'added to' if new else 'updated in'} {file}")
    _note_reload()


def _note_reload() -> None:
    note("a running node reads the file when it is reloaded: penstock reload")


def _existing(file: Path) -> None:
    from penstock.security.passwords import read_passwords

    read_passwords(file)  # raises an error if the file does not exist


def _check(users: dict[str, Credential], file: Path, user: str, *, new: bool) -> None:
    if new and user in users:
        raise RefusedError(
            f"user: {file} has a user '{escape(user)}' already",
            hint=f"change the password: penstock user update {escape(str(file))} {escape(user)}",
        )
    if not new and user not in users:
        raise RefusedError(
            f"user: {file} has no user '{escape(user)}'", hint=f"list the users: penstock user list {escape(str(file))}"
        )


def _password(*, twice: bool) -> bytes:
    """Read the password from the terminal, or from the first line of standard input."""
    if sys.stdin.isatty():
        try:
            password: str = typer.prompt("Password", hide_input=True, confirmation_prompt=twice, err=True)
        except typer.Abort:  # Ctrl-C or Ctrl-D
            note("")  # the error begins a line
            raise ConfigError("user: no password was entered, and nothing was changed") from None
        return password.encode()
    line = sys.stdin.buffer.readline(MOST_READ)
    if not line:
        raise ConfigError("user: no password on standard input", option="stdin", hint="write one line: printf %s ... |")
    return line.removesuffix(b"\n").removesuffix(b"\r")
