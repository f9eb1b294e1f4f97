"""The dialect table says what the document and the SDKs say."""

from __future__ import annotations

from penstock.statestore.codec.dialects import DIALECTS, OLDER, PUBLISHED, SDK
from tests.vectors.statestore import vectors


def test_the_sdk_form_is_what_the_sdks_match() -> None:
    assert SDK.fence_lower in vectors()["errors"]["texts_matched_exactly"]
    assert SDK.condition_not_met == b":-1\r\n"
    assert SDK.delete_event == b"DELETE"


def test_the_published_form_is_what_the_document_prints() -> None:
    assert "a lower version that the fencing token" in PUBLISHED.fence_lower
    assert PUBLISHED.condition_not_met == b"-1\r\n"
    assert PUBLISHED.delete_event == b"DEL"


def test_the_older_form_differs_from_the_published_one_in_the_property_names_only() -> None:
    names = [name for name in dir(OLDER) if not name.startswith("__") and not callable(getattr(OLDER, name))]
    different = {name for name in names if getattr(OLDER, name) != getattr(PUBLISHED, name)}
    assert different == {
        "name",
        "timestamp_property",
        "timestamp_wire",
        "answer_head",
        "answer_heads",
        "fence_property",
        "fence_wire",
    }
    assert set(DIALECTS) == {"sdk", "published", "older"}
