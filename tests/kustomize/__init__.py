"""kustomize, which renders ``deploy/kubernetes`` as ``kubectl apply --kustomize`` does.

It is built from the Go module proxy once, into the user's cache folder (:mod:`tests.go_programs`). Its OpenAPI module
is newer than the one that its release names.
"""

from __future__ import annotations

from pathlib import Path

from tests.go_programs import prepare_program

__all__ = ["prepare"]

_PACKAGE = "sigs.k8s.io/kustomize/kustomize/v5"


def prepare(*, download: bool = True) -> Path:
    """The program; without ``download`` the test is skipped where it was not built."""
    return prepare_program("kustomize", "kustomize", Path(__file__).parent, "kustomize", _PACKAGE, download=download)
