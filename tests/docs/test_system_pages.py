"""Every command, program and file of the pages about operations, pipelines and Spark; test_pages.py has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import follow, pages


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages(system=True))
def test_page(page: Path, tmp_path: Path) -> None:
    follow(page, tmp_path)
