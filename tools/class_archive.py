"""Archive the classes of Spark for the sessions of tests, which then need 11 instead of 20 s of processor time.

Usage: python -m tools.class_archive
"""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.spark.environment.java import SHORT_LIVED


def prepare() -> None:
    """Make the archive, which all sessions of this checkout then use, if it does not exist and can be made."""
    try:
        from penstock.spark.environment.class_archive import make_archive

        path, _ = make_archive(SHORT_LIVED)
        print(path)
    except (ImportError, PenstockError) as error:
        print(f"class_archive: Java starts without an archive: {error}")


if __name__ == "__main__":
    prepare()
