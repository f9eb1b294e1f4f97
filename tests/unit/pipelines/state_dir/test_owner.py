from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.pipelines.state_dir.layout import check_owner, claim


def test_a_directory_belongs_to_the_first_that_claims_it(tmp_path: Path) -> None:
    check_owner(tmp_path / "new", "one")
    for _ in range(2):
        claim(tmp_path, "one")
    for look in (claim, check_owner):
        with pytest.raises(ConfigError, match="is the state directory of the pipeline 'one', not of 'two'"):
            look(tmp_path, "two")
    check_owner(tmp_path, "one")
