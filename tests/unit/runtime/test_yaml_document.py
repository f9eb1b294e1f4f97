"""YAML 1.2 with locations: values of scalars, refused input, and the location in each message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.runtime.config.yaml_document import parse_document, path_text, read_document


def value_of(text: str, **environment: str) -> Any:
    return parse_document(f"x: {text}\n", "f.yaml", environment).data["x"]


# YAML 1.2.2 section 10.3.2 (core schema), and what YAML 1.1 would have made of it.
SCALARS: list[tuple[str, object]] = [
    ("", None),
    ("~", None),
    ("null", None),
    ("true", True),
    ("FALSE", False),
    ("yes", "yes"),
    ("on", "on"),
    ("12", 12),
    ("-7", -7),
    ("+7", 7),
    ("0o17", 15),
    ("017", 17),
    ("0xff", 255),
    ("1_000", "1_000"),
    ("1:30", "1:30"),
    ("2026-11-21", "2026-11-21"),
    ("1.5", 1.5),
    (".5", 0.5),
    ("1e3", 1000.0),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("'12'", "12"),
    ('"true"', "true"),
    ("!!str 12", "12"),
    ("!!float 12", 12.0),
    ("!!int 12", 12),
    ("127.0.0.1:1883", "127.0.0.1:1883"),
    ("[1, two]", [1, "two"]),
    ("{a: 1}", {"a": 1}),
    ("9" * 5000, "9" * 5000),
]


@pytest.mark.parametrize(("text", "value"), SCALARS, ids=[text[:12] or "empty" for text, _ in SCALARS])
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(value_of(".nan"))


def test_every_value_and_key_has_its_place() -> None:
    document = parse_document("a: 1\nrules:\n  - filter: x/#\n    topic: t\n", "f.yaml", {})
    assert document.data == {"a": 1, "rules": [{"filter": "x/#", "topic": "t"}]}
    assert document.where(("a",)) == "f.yaml:1:4"
    assert document.where(("rules", 0, "topic")) == "f.yaml:4:12"
    assert document.where_key(("rules", 0, "topic")) == "f.yaml:4:5"
    assert document.where(("rules", 0, "nothing", "here")) == "f.yaml:3:5"
    assert document.where(("absent",)) == "f.yaml:1:1"


@pytest.mark.parametrize("text", ["a: [\n", "a: [1,", "a: {b: 1\n\n", "[", "a:\n  - [x, {y:\n"])
def test_an_unclosed_bracket_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml:\d+:\d+: ") as caught:
        parse_document(text, "f.yaml", {})
    assert "close the bracket" in str(caught.value.hint)


def test_an_empty_file_is_an_empty_mapping() -> None:
    for text in ("", "\n", "# only a comment\n", "---\n", "---\n...\n"):
        assert parse_document(text, "f.yaml", {}).data == {}


def test_variables_are_replaced_before_a_value_gets_its_type() -> None:
    assert value_of("${PORT:-1883}") == 1883
    assert value_of("${PORT:-1883}", PORT="0") == 0
    assert value_of("'${PORT:-1883}'") == "1883"
    assert value_of("${HOST}:${PORT:-1883}", HOST="::1") == "::1:1883"
    assert value_of("${EMPTY:-fallback}", EMPTY="") == "fallback"
    assert value_of("${NOTHING:-}") is None
    assert value_of("a$${b}c") == "a${b}c"
    assert value_of("['${A}', $A]", A="1") == ["1", "$A"]


def test_a_variable_cannot_add_structure() -> None:
    assert value_of("${A}", A="{b: 1}\nc: 2") == "{b: 1}\nc: 2"


def test_a_secret_is_the_first_line_of_a_file_and_is_text(tmp_path: Path) -> None:
    (tmp_path / "pin").write_bytes(b"0042\r\nmore\n")
    (tmp_path / "f.yaml").write_text(f"x: ${{file:pin}}\ny: 'mqtt://${{WHO}}:${{file:{tmp_path / 'pin'}}}@host'\n")
    document = read_document(tmp_path / "f.yaml", {"WHO": "ann"})
    assert document.data == {"x": "0042", "y": "mqtt://ann:0042@host"}
    assert document.without_secrets("got '0042'") == "got '***'"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"", "its first line is empty"),
        (b"\nx", "its first line is empty"),
        (b"\xff", "it is not UTF-8"),
        (b"x" * 70_000, "it has more than 65536 bytes"),
    ],
)
def test_a_secret_that_cannot_be_read(tmp_path: Path, content: bytes | None, why: str) -> None:
    if content is not None:
        (tmp_path / "pin").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        parse_document("a: ${file:pin}", "f.yaml", {}, tmp_path)
    assert caught.value.what == f"f.yaml:1:4: option 'a': the file '{tmp_path / 'pin'}' cannot be used: {why}"


def test_a_secret_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "pin").write_text("hush")
    with pytest.raises(ConfigError) as caught:
        parse_document("a: !!int ${file:pin}", "f.yaml", {}, tmp_path)
    assert "'***' is not of the type !!int" in caught.value.what


def test_aliases_copy_values_and_point_at_themselves() -> None:
    document = parse_document("a: &x {b: [1]}\nc: *x\n", "f.yaml", {})
    assert document.data["c"] == {"b": [1]}
    assert document.data["c"] is not document.data["a"]
    assert document.where(("c", "b", 0)) == "f.yaml:2:4"


ERRORS = [
    ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: option 'a' is given twice (first at f.yaml:1:1)"),
    ("r:\n  - f: 1\n    f: 2\n", "f.yaml:3:5: option 'r[0].f' is given twice (first at f.yaml:2:5)"),
    ("a: 1\n b: 2\n", "f.yaml:2:3: mapping values are not allowed here"),
    ("a:\n\tb: 1\n", "f.yaml:2:1: found character '\\t'"),
    ("a: [1\nb: 2", "f.yaml:2:2: expected ',' or ']'"),
    ("a: [${B}]\n", "f.yaml:1:6: expected ',' or ']'"),
    ("a: 'x", "f.yaml:1:6: found unexpected end of stream"),
    ("a: *x\n", "f.yaml:1:4: *x refers to nothing"),
    ("a: &x [*x]\n", "f.yaml:1:8: *x refers to a value that contains it"),
    ("--- {a: 1}\n--- {b: 1}\n", "f.yaml:2:1: a second document begins here"),
    ("- a\n- b\n", "f.yaml:1:1: the file is a list, expected options"),
    ("just text\n", "f.yaml:1:1: the file is the single value 'just text'"),
    ("? [a]\n: 1\n", "f.yaml:1:3: an option's name must be plain text"),
    ("a: !secret x\n", "f.yaml:1:4: option 'a': the type !secret is not known here"),
    ("a: !!int x\n", "f.yaml:1:4: 'x' is not of the type !!int"),
    ("a: !!seq {b: 1}\n", "the type !tag:yaml.org,2002:seq is not known here"),
    ("a: ${NOPE}\n", "f.yaml:1:4: option 'a': the environment variable NOPE is not set"),
    ("a: ${1x}\n", "f.yaml:1:4: option 'a': '${' begins no ${NAME}"),
    ("a: \x00\n", "f.yaml: is not YAML"),
    ("a: " + "[" * 70 + "]" * 70, "more than 100000 values or 64 levels"),
    ("a: " + "[" * 5000, "f.yaml"),
    ("a: &a [x,x,x,x,x,x,x,x,x,x]\n"
     + "".join(f"{c}: &{c} [{','.join([f'*{p}'] * 10)}]\n" for p, c in zip("abcdef", "bcdefg", strict=True)),
     "aliases unfold to more than 100000 values"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), ERRORS, ids=[m[:40] for _, m in ERRORS])
def test_errors_point_at_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f.yaml", {})
    assert message in caught.value.what
    assert caught.value.where.startswith("f.yaml")


def test_a_variable_in_a_flow_list_needs_quotes() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document("a: [${B}]\n", "f.yaml", {"B": "1"})
    assert caught.value.hint == 'quote ${...} inside [ ] and { }: "${NAME}"'


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_document(tmp_path / "absent.yaml", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        read_document(tmp_path, {})
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="byte 3 is not UTF-8"):
        read_document(latin, {})
    marked = tmp_path / "marked.yaml"
    marked.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_document(marked, {}).data == {"a": 1, "b": 2}


def test_values_put_over_a_file_name_their_own_place() -> None:
    document = parse_document("mqtt: {bind: a}\nhttp: b\n", "f.yaml", {})
    document.put(("mqtt", "bind"), "c", "--mqtt")
    document.put(("http", "bind"), "d", "PENSTOCK_HTTP")
    document.put(("tube", "topics"), "e", "--topic")
    assert document.data == {"mqtt": {"bind": "c"}, "http": {"bind": "d"}, "tube": {"topics": "e"}}
    assert document.where(("mqtt", "bind")) == "--mqtt"
    assert document.where(("http",)) == "PENSTOCK_HTTP"
    assert document.where(("tube", "topics")) == "--topic"


def test_paths_read_as_people_write_them() -> None:
    assert path_text(("rules", 0, "map", "key")) == "rules[0].map.key"
    assert path_text(()) == ""


@given(st.text(max_size=200))
def test_any_text_gives_a_document_or_our_error(text: str) -> None:
    try:
        parse_document(text, "f.yaml", {})
    except ConfigError:
        return
