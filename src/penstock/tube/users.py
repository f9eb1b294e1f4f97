"""The users file of a tube: a line a user, ``name:password``. The protocol's signature needs the password itself.

So the file has to be its owner's alone. Empty lines and lines that begin with ``#`` are skipped.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError

__all__ = ["read_users"]

MAX_NAME = 64
MAX_USERS = 100_000


def read_users(path: Path) -> dict[str, str]:
    """Passwords by name.

    Raises:
        ConfigError: the file cannot be read, others may read it, or a line is not ``name:password``.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tube: the users file {path} cannot be read: {error}", option="tube.access.users") from None
    if mode & 0o077:
        raise ConfigError(
            f"tube: the users file {path} may be read by others",
            option="tube.access.users",
            why="it holds passwords, which the protocol's signature needs as they are",
            do=f"chmod 600 {path}",
        )
    users: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, separator, password = line.partition(":")
        if not separator or not name or not password or len(name) > MAX_NAME or " " in name:
            raise ConfigError(
                f"tube: {path}, line {number} is not name:password",
                option="tube.access.users",
                why=f"a name has 1 to {MAX_NAME} characters and no blank, a password one at least",
            )
        if name in users:
            raise ConfigError(f"tube: {path}, line {number}: user {name!r} is there twice", option="tube.access.users")
        users[name] = password
    if len(users) > MAX_USERS:
        raise ConfigError(f"tube: {path} has {len(users)} users, at most {MAX_USERS} are possible")
    return users
