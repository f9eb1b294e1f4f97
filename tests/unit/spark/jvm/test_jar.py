"""The jar in the repository holds what the sources beside it say."""

from __future__ import annotations

import zipfile
from hashlib import sha256
from pathlib import Path

import penstock.spark.jvm

FOLDER = Path(penstock.spark.jvm.__file__).parent


def test_the_jar_was_compiled_from_the_sources() -> None:
    sources = sorted(FOLDER.glob("*.java"))
    digest = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    with zipfile.ZipFile(FOLDER / "penstock.jar") as jar:
        assert f"Sources: {digest}" in jar.read("META-INF/MANIFEST.MF").decode(), "run python tools/jvm.py"
        names = {name.removesuffix(".class").partition("$")[0] for name in jar.namelist() if name.endswith(".class")}
    assert names == {f"penstock/spark/{path.stem}" for path in sources}
