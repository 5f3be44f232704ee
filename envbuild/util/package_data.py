"""The folders of the shipped profiles and templates: in a checkout of the repository, or in the data of the installed
package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_INSTALLED = _PACKAGE / "shipped"
ROOT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent
PROFILES = ROOT / "profiles"
DOCKERFILES = ROOT / "dockerfiles"
