"""Images of the documentation: they exist, are small, are described, and screenshots come from tests that exist."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, page_paths
from tools.screenshots import FOLDER, IMAGES, MAX_BYTES

PNG = b"\x89PNG\r\n\x1a\n"
PALETTE = 3
"""Colour type of a PNG, at byte 25."""


def test_every_image_of_a_page_exists_and_is_described() -> None:
    shown = set()
    for page in page_paths():
        for text, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            image = (page.parent / target).resolve()
            assert image.is_file(), f"{page.relative_to(ROOT)} shows {target}, which does not exist"
            assert len(text.split()) >= 3, f"{page.relative_to(ROOT)}: describe {target} for those who do not see it"
            shown.add(image)
    assert {path for path in FOLDER.iterdir() if path.suffix == ".png"} <= shown, "an image is on no page"


def test_screenshots_are_small_and_taken_by_a_test() -> None:
    assert {path.name for path in FOLDER.glob("*.png")} == set(IMAGES), "make screenshots renews those of the table"
    for name, image in IMAGES.items():
        data = (FOLDER / name).read_bytes()
        assert data.startswith(PNG), name
        assert data[25] == PALETTE, f"{name} has no palette: make screenshots"
        assert len(data) <= MAX_BYTES, name
        path, _, test = image.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), image.test
