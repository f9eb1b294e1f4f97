from __future__ import annotations

from pathlib import Path

import pytest

from penstock.spark.environment.java import cache_directory


def test_the_users_cache_follows_the_environment(tmp_path: Path) -> None:
    assert cache_directory("jars", {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "penstock" / "jars"


@pytest.mark.parametrize("environ", [{}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}])
def test_the_default_cache_is_in_the_home_directory(environ: dict[str, str]) -> None:
    assert cache_directory("jars", environ) == Path.home() / ".cache" / "penstock" / "jars"
