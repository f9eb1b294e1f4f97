"""Reference pages whose source is the code say what the code says."""

from __future__ import annotations

import subprocess
import sys

from tests.docs.pages import ROOT


def test_reference_pages_are_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reference.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
