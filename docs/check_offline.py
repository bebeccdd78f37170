"""Fail if a page of the built documentation would load anything from another host.

    python docs/check_offline.py build/docs

Links that a reader may follow are not loaded, and may lead anywhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

LOADED_ATTRIBUTES = {"src", "srcset", "data", "poster"}
"""Attributes whose address the browser loads by itself, whichever element they are on."""
LOADED_RELATIONS = {
    "stylesheet",
    "icon",
    "preload",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
    "manifest",
}
"""Kinds of ``<link>`` that the browser acts on by itself; ``canonical``, ``next`` and ``prev`` are
only read."""
MERMAID = "https://unpkg.com/mermaid"
"""The theme's scripts load this where a page holds a diagram in Mermaid's language."""
CSS_ADDRESS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Loads(HTMLParser):
    """Collects the addresses on other hosts that a page loads.

    Attributes:
        found: The addresses, in the order of the page.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what one element loads."""
        given = {name: value or "" for name, value in attrs}
        addresses = [given[name] for name in LOADED_ATTRIBUTES & set(given)]
        if "mermaid" in given.get("class", "").split():
            addresses.append(MERMAID)
        if tag == "link" and LOADED_RELATIONS & set(given.get("rel", "").split()):
            addresses.append(given.get("href", ""))
        self.found += [
            address for address in addresses if address.startswith(("http://", "https://", "//"))
        ]
        self.found += CSS_ADDRESS.findall(given.get("style", ""))


def loads(text: str) -> list[str]:
    """Return the addresses on other hosts that a page, given as HTML, loads.

    Args:
        text: The page.
    """
    parser = Loads()
    parser.feed(text)
    styles = re.findall(r"<style.*?</style>", text, re.DOTALL)
    return parser.found + [address for style in styles for address in CSS_ADDRESS.findall(style)]


def external(site: Path) -> Iterator[tuple[Path, str]]:
    """Yield each page or style sheet of a site, and an address on another host that it loads.

    Args:
        site: The folder of the built site.
    """
    for path in sorted(site.rglob("*.html")):
        for address in loads(path.read_text()):
            yield path, address
    for path in sorted(site.rglob("*.css")):
        for address in CSS_ADDRESS.findall(path.read_text()):
            yield path, address


def main() -> int:
    """Check the site that the command line names; return the exit code."""
    site = Path(sys.argv[1])
    if not (site / "index.html").exists():
        print(f"{site} holds no site; build it with: make docs", file=sys.stderr)
        return 2
    found = list(external(site))
    for path, address in found:
        print(f"{path} loads {address} from another host", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
