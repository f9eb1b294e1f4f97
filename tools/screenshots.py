"""Save the screenshots of the documentation, as the browser tests of the console take them.

The tests run in ``make test`` as well, so every page that the documentation shows is opened there. Colours are reduced
to a palette: a page of the console has few of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["FOLDER", "IMAGES", "MAX_BYTES", "Screenshot"]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
MAX_BYTES = 100_000
COLOURS = 64
MARGIN = 16
"""Rows of background kept below the last line of a page, in pixels."""


class Screenshot(NamedTuple):
    """An image of the documentation: the test that takes it, and the name under which the test saves it.

    ``height``: rows that are shown, in pixels; by default all.
    """

    test: str
    saved: str
    height: int | None = None


_CONSOLE = "tests/end_to_end/test_console"
IMAGES = {
    "console.png": Screenshot(f"{_CONSOLE}.py::test_every_page_in_every_look[light]", "light-overview", 684),
    "console-pipelines.png": Screenshot(f"{_CONSOLE}.py::test_every_page_in_every_look[light]", "light-pipelines"),
    "console-pipeline.png": Screenshot(
        f"{_CONSOLE}.py::test_every_page_in_every_look[light]", "light-pipelines-bottling"
    ),
    "console-topic-tree.png": Screenshot(
        f"{_CONSOLE}.py::test_the_topic_tree_shows_counts_and_the_last_payload_of_each_level", "topic-tree"
    ),
    "console-key-changes.png": Screenshot(
        f"{_CONSOLE}.py::test_a_key_is_changed_after_a_preview_and_has_a_history", "key-changes"
    ),
    "console-records.png": Screenshot(
        f"{_CONSOLE}_records.py::test_records_are_filtered_paged_opened_and_exported[light]", "light-records-filtered"
    ),
    "console-cluster.png": Screenshot(
        f"{_CONSOLE}.py::test_the_cluster_is_a_page_only_of_a_node_in_one", "light-cluster"
    ),
    "console-dead-letters.png": Screenshot(
        f"{_CONSOLE}_dead_letters.py::test_letters_are_corrected_redriven_and_discarded[light]", "light-dead-letters"
    ),
    "console-ledger.png": Screenshot(
        f"{_CONSOLE}_dead_letters.py::test_letters_are_corrected_redriven_and_discarded[narrow]", "light-ledger"
    ),
}
"""Images by file name in ``docs/images``."""


def _reduce(source: Path, target: Path, height: int | None) -> int:
    """Write ``source`` with a palette and without the empty rows at its end; return the size in bytes."""
    from PIL import Image, ImageChops

    with Image.open(source) as opened:
        picture = opened.convert("RGB").crop((0, 0, opened.width, height or opened.height))
    # The background of the last row.
    background = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    box = ImageChops.difference(picture, background).getbbox()
    if box is not None:
        picture = picture.crop((0, 0, picture.width, min(picture.height, box[3] + MARGIN)))
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)
    return target.stat().st_size


def main() -> int:
    """Run the tests and replace the images; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        tests = list(dict.fromkeys(each.test for each in IMAGES.values()))
        environment = os.environ | {"PENSTOCK_SCREENSHOTS": folder, "PENSTOCK_REQUIRE": "all"}
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            return done.returncode
        for name, (_, saved, height) in IMAGES.items():
            size = _reduce(Path(folder) / f"{saved}.png", FOLDER / name, height)
            print(f"docs/images/{name}: {size} bytes")
            if size > MAX_BYTES:
                print(f"docs/images/{name} is larger than {MAX_BYTES} bytes: show less in the test", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
