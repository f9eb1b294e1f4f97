"""The key with which a user signs in the TubeMQ protocol, derived from the password.

TubeMQ clients sign with HMAC-SHA1, so a server needs the signing key itself. With the password as that key, as in the
reference, the password file would have to hold passwords. Our clients sign with this key instead, and the file holds
it: whoever reads the file can use the tube as that user, but learns no password.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from typing import Final

__all__ = ["TUBE_KEY", "can_sign", "tube_key"]

ITERATIONS: Final = 10_000
"""Of PBKDF2: some 4 ms for each process that signs."""
LONGEST_NAME: Final = 64
TUBE_KEY: Final = re.compile(r"tube1\.[A-Za-z0-9_-]{43}")
"""Format of a key."""


def can_sign(user: str) -> bool:
    """True if the protocol can carry the name: 1 to 64 characters and no blank."""
    return 0 < len(user) <= LONGEST_NAME and " " not in user


@lru_cache(maxsize=256)
def tube_key(user: str, password: bytes) -> str:
    """The signing key of ``user``; the same at every client and server."""
    salt = b"penstock tubemq\n" + user.encode()
    digest = hashlib.pbkdf2_hmac("sha256", password, salt, ITERATIONS)
    return "tube1." + base64.urlsafe_b64encode(digest).decode().rstrip("=")
