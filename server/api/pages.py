"""Routes of the web page at ``/`` and of its files."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request, Response

from ..problem import clip, no_such
from ..web.replies import etag, has_tag

router = APIRouter(include_in_schema=False)

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def _files() -> dict[str, tuple[bytes, str, str]]:
    """Return content, media type and ETag of each file by name."""
    found = {}
    for file in (files("placer_server") / "page").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = (content, kind, etag(content))
    return found


# Read once at import: the files do not change while the service runs.
FILES = _files()


@router.get("/")
async def get_page(request: Request) -> Response:
    """Return the page."""
    return _reply(request, "index.html")


@router.get("/page/{name}")
async def get_file(request: Request, name: str) -> Response:
    """Return a file of the page."""
    if name not in FILES:
        raise no_such("path", f"the page has no file {clip(name, 80)!r}")
    return _reply(request, name)


def _reply(request: Request, name: str) -> Response:
    content, kind, tag = FILES[name]
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if has_tag(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)
