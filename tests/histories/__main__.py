"""Check histories: ``python -m tests.histories FILE ...``; 1 if one is refused, with its picture next to it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.histories.porcupine import check


def main() -> int:
    status = 0
    for name in sys.argv[1:]:
        try:
            sys.stdout.write(f"{name}: {check(Path(name), Path(name).parent)}\n")
        except AssertionError as refused:
            sys.stdout.write(f"{refused}\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
