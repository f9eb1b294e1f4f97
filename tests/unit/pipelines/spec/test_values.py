from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from penstock.errors import RefusedError
from penstock.pipelines.spec import values
from penstock.pipelines.spec.values import Name, Stream, TemplatePart, duration_ms, template_parts


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500 milliseconds", 500),
        ("1 second", 1_000),
        ("90 seconds", 90_000),
        ("3 hours", 10_800_000),
        ("1 day", 86_400_000),
    ],
)
def test_a_duration_is_a_count_and_a_unit(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize(
    "text", ["", "3", "hours", "0 hours", "-1 hour", "3  hours", "3 weeks", "1 month", "3hours", "1 hour\n"]
)
def test_everything_else_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match="millisecond, second, minute, hour, day"):
        duration_ms(text)


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("plain", [TemplatePart("plain", column=False)]),
        ("{a}", [TemplatePart("a", column=True)]),
        (
            "x/{a}/{b.c}",
            [TemplatePart("x/", False), TemplatePart("a", True), TemplatePart("/", False), TemplatePart("b.c", True)],
        ),
        ("{{{a}}}", [TemplatePart("{", False), TemplatePart("a", True), TemplatePart("}", False)]),
        ("a{{b}}c", [TemplatePart("a{b}c", column=False)]),
    ],
)
def test_a_template_is_text_and_columns(template: str, parts: list[TemplatePart]) -> None:
    assert template_parts(template) == parts


@pytest.mark.parametrize("template", ["{", "}", "{a", "a}", "{}", "{a b}", "{a;drop}", "{1a}", "{a.}"])
def test_an_invalid_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        template_parts(template)


@pytest.mark.parametrize("kind", [TypeAdapter(Name), TypeAdapter(Stream)])
@pytest.mark.parametrize("name", ["..", "../x", "a/b", "/a", "a\0", "a\n", "", "a" * 64, ".a", "a.json"])
def test_a_name_is_a_file_name_of_the_state_directory(kind: TypeAdapter[str], name: str) -> None:
    with pytest.raises(ValidationError, match="expected"):
        kind.validate_python(name)


@pytest.mark.parametrize(("code", "hint"), [(0x87, "statestore.username"), (415, "statestore.username"), (411, "ask")])
def test_a_refused_login_names_the_settings_of_the_credentials(code: int, hint: str) -> None:
    with (
        pytest.raises(RefusedError) as raised,
        values.names_setting("statestore.broker", values.BROKER_VARIABLE, values.STORE_LOGIN),
    ):
        raise RefusedError("CONNECT was refused", code=code, hint="ask the operator")
    assert hint in (raised.value.hint or "")
