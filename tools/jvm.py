"""Compile penstock's Java classes for Spark, ``src/penstock/spark/jvm/*.java``, into the jar next to them.

Usage: jvm.py

Needs a JDK (17 or later) and the packages that ``make setup`` installs. The jar is part of the repository, so that
neither users nor tests need a compiler; a test compares its record of the sources with these. The same compiler
produces the same bytes.
"""

from __future__ import annotations

import subprocess
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path

import pyspark

FOLDER = Path(__file__).resolve().parent.parent / "src" / "penstock" / "spark" / "jvm"
RELEASE = "17"
"""Java release of Spark's class files."""
EPOCH = (1980, 1, 1, 0, 0, 0)


def main() -> None:
    sources = sorted(FOLDER.glob("*.java"))
    digest = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    jars = Path(pyspark.__file__).parent / "jars"
    with tempfile.TemporaryDirectory() as folder:
        options = ["--release", RELEASE, "-proc:none", "-g:none", "-cp", f"{jars}/*", "-d", folder]
        subprocess.run(["javac", *options, *map(str, sources)], check=True)
        classes = sorted(Path(folder).rglob("*.class"))
        with zipfile.ZipFile(FOLDER / "penstock.jar", "w") as jar:
            manifest = f"Manifest-Version: 1.0\r\nSources: {digest}\r\n\r\n".encode()
            jar.writestr(zipfile.ZipInfo("META-INF/MANIFEST.MF", EPOCH), manifest)
            for path in classes:
                jar.writestr(zipfile.ZipInfo(str(path.relative_to(folder)), EPOCH), path.read_bytes())


if __name__ == "__main__":
    main()
