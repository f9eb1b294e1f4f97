"""Every command, program and file of the pages about Spark and pipelines, as test_pages.py does for the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import follow, pages


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages(spark=True))
def test_page(page: Path, tmp_path: Path) -> None:
    follow(page, tmp_path)
