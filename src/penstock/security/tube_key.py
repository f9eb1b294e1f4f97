"""Key with which a user signs in the TubeMQ protocol, derived from the password.

TubeMQ clients sign with HMAC-SHA1, so a server needs the signing key itself. Apache's clients use the password as that
key, so the server would have to store passwords. Penstock's clients use this derived key, which is stored in the
password file: a reader of the file can use TubeMQ as the user, but does not learn the password.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from typing import Final

__all__ = ["TUBE_KEY", "can_sign", "tube_key"]

ITERATIONS: Final = 10_000
"""Iterations of PBKDF2, about 4 ms per process."""
LONGEST_NAME: Final = 64
TUBE_KEY: Final = re.compile(r"tube1\.[A-Za-z0-9_-]{43}")
"""Format of a key."""


def can_sign(user: str) -> bool:
    """True if the protocol supports the name: 1 to 64 characters without blanks."""
    return 0 < len(user) <= LONGEST_NAME and " " not in user


@lru_cache(maxsize=256)
def tube_key(user: str, password: bytes) -> str:
    """Signing key of ``user``, the same on clients and servers."""
    salt = b"penstock tubemq\n" + user.encode()
    digest = hashlib.pbkdf2_hmac("sha256", password, salt, ITERATIONS)
    return "tube1." + base64.urlsafe_b64encode(digest).decode().rstrip("=")
