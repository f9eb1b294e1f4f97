"""`__all__` of every module is its public names, sorted, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.sources import modules, read


@pytest.mark.parametrize(("module", "path"), modules(), ids=str)
def test_all_is_the_public_names(module: str, path: Path) -> None:
    source = read(path)
    names = source.declared
    if path.name == "__init__.py" and names is None:
        assert not source.defined, f"{module}: a package defines {source.defined} and has no __all__"
        return
    assert names is not None, f"{module} has no __all__"
    assert len(set(names)) == len(names), f"{module}: __all__ repeats a name"
    assert set(names) <= source.bound, f"{module}: __all__ names what is not there: {set(names) - source.bound}"
    # A command's function is public for typer alone; everything else that others may use is listed.
    missing = set() if module.startswith("penstock.cli.") else source.defined - set(names)
    assert not missing, f"{module}: public but not in __all__: {missing}"
