"""`penstock keygen`: create a key pair for encrypted backups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Commands, Json
from penstock.cli.output import print_json

__all__ = ["app"]

app = Commands()


@app.add("penstock keygen backup.key > backup.pub")
def keygen(
    file: Annotated[
        Path, typer.Argument(help="New file for the secret key; readable by its owner only.", metavar="FILE")
    ],
    as_json: Json = False,
) -> None:
    """Create a key pair of age for backups. The secret key is written to FILE, the public key to standard output.

    Keep the secret key where backups are restored, not on the host that backs up, and a second copy: without it an
    encrypted backup cannot be restored. It can be the output of age-keygen as well, or a key of SSH.
    """
    from penstock.node.backup_encryption import create_identity

    public = create_identity(file)
    if as_json:
        print_json({"public_key": public, "file": str(file)})
    else:
        sys.stdout.write(f"{public}\n")
