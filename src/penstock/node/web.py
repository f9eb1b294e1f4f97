"""The web console: a page at ``/`` for browsers, and its files below ``/assets``.

The page consists of ES modules in ``console/web`` that read ``/api/v1``. All URLs are relative, so that it works
below a path of a proxy. The Content Security Policy permits files of this node only: no inline script or style except
the import map, whose hash is in the policy. The path of the files has a digest of all of them, so that browsers cache
them indefinitely and never mix two versions.
"""

from __future__ import annotations

import base64
import re
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

import penstock.console

__all__ = ["WebConsole"]

FOLDER: Final = Path(penstock.console.__file__).with_name("web")
_TYPES: Final = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_IMPORT_MAP: Final = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)
_NEEDED: Final = ("preact.mjs", "hooks.mjs", "htm.mjs", "uplot.js", "uplot.css", "pico.css", "dagre.mjs")


class _File(NamedTuple):
    data: bytes
    media_type: str


class WebConsole:
    """The files in ``folder``, which are read once. ``cluster``: the page has a view of the node's cluster."""

    def __init__(self, folder: Path = FOLDER, *, cluster: bool = False) -> None:
        self.available = all((folder / "vendor" / name).is_file() for name in _NEEDED)
        """False in a checkout whose libraries were not downloaded (``make setup``)."""
        self._files: dict[str, _File] = {}
        self._page = ""
        self._headers: dict[str, str] = {}
        if self.available:
            self._read(folder, "yes" if cluster else "")

    def _read(self, folder: Path, cluster: str) -> None:
        digest = blake2b(digest_size=8)
        for path in sorted(folder.rglob("*")):
            if path.suffix in _TYPES:
                name, data = path.relative_to(folder).as_posix(), path.read_bytes()
                self._files[name] = _File(data, _TYPES[path.suffix])
                digest.update(name.encode() + b"\0" + data)
        page = (folder / "index.html").read_text(encoding="utf-8")
        self._page = page.replace("{assets}", f"assets/{digest.hexdigest()}").replace("{cluster}", cluster)
        found = _IMPORT_MAP.search(self._page)
        assert found is not None, "the page has an import map"
        map_hash = base64.b64encode(sha256(found[1].encode()).digest()).decode()
        self._headers = {
            "Content-Security-Policy": (
                f"default-src 'none'; script-src 'self' 'sha256-{map_hash}'; style-src 'self'; img-src 'self' data:; "
                "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def page(self) -> Response:
        """The page, if it is available."""
        return HTMLResponse(self._page, headers=self._headers)

    def routes(self) -> list[Route]:
        """Route of the files."""
        return [Route("/assets/{version}/{name:path}", self._asset)]

    async def _asset(self, request: Request) -> Response:
        file = self._files.get(request.path_params["name"])
        if file is None:
            return PlainTextResponse("the console has no such file\n", status_code=404)
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
        return Response(file.data, media_type=file.media_type, headers=headers)
