"""Hooks of mkdocs.yml: pages from outside of docs/, and files of the tree that pages link to, as parts of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}
"""In the tree, and in the site."""
TREE: Final = "tree"
"""The folder of the site with files of the tree."""

_ABOVE: Final = re.compile(r"\]\(\.\./([^)#\s]+)")
_BELOW: Final = re.compile(r"""(\]\(|src="|srcset=")docs/""")


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_BELOW.sub(r"\1", (ROOT / source).read_text())))
    linked = {name for page in (ROOT / "docs").glob("*.md") for name in _ABOVE.findall(page.read_text())}
    for name in sorted(linked - set(PAGES)):
        files.append(File.generated(config, f"{TREE}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _ABOVE.sub(lambda found: f"]({PAGES.get(found[1], f'{TREE}/{found[1]}')}", markdown)
