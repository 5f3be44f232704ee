"""Hooks for mkdocs: they add pages outside docs/ to the site, and rewrite links between files for the site.

A link to a file that is not a page of the site, such as a source file, becomes plain text. A link to a missing file is
left as it is, so that `mkdocs build` reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
_HOME = {"README.md": "index.md"}
_OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "evidence/README.md", "tests/attacks/README.md")
_RESULTS = "benchmarks/results/*.md"
# A code fence or a code span, in which links are not rewritten, or a link with its target.
_LINK = re.compile(
    r"(?P<code>^[ ]*```.*?^[ ]*```|``.+?``|`[^`\n]+`)|(?P<text>\[[^][]*\])\((?P<to>[^()\s]+)\)", re.M | re.S
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and their images, to the site."""
    results = [file.relative_to(ROOT).as_posix() for file in sorted(ROOT.glob(_RESULTS))]
    pictures = [file.relative_to(ROOT).as_posix() for file in sorted(ROOT.glob("benchmarks/results/*.svg"))]
    for path in (*_OUTSIDE, *results, *pictures):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the relative links of a page from paths in the repository to paths in the site."""
    here = repository_path(page.file.src_uri)

    def rewritten(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        path, mark, anchor = found["to"].partition("#")
        if not path or ":" in path:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        if (ROOT / target).is_dir() and (ROOT / target / "README.md").is_file():
            target += "/README.md"
        if files.get_file_from_path(site_path(target)):
            to = posixpath.relpath(site_path(target), posixpath.dirname(page.file.src_uri) or ".")
            return f"{found['text']}({to}{mark}{anchor})"
        return found["text"][1:-1] if (ROOT / target).exists() else found[0]

    return _LINK.sub(rewritten, markdown)


def site_path(path: str) -> str:
    """Convert a path in the repository to a path in the site, whose root is docs/ and whose first page is the
    README."""
    return _HOME.get(path, path.removeprefix(DOCS))


def repository_path(uri: str) -> str:
    """The inverse of `site_path`."""
    home = {site: path for path, site in _HOME.items()}
    return home.get(uri) or (f"{DOCS}{uri}" if (ROOT / DOCS / uri).exists() else uri)
