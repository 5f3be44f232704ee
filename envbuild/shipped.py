"""Where shipped profiles and templates lie: in the checkout, or as data of the installed package."""

from __future__ import annotations

from pathlib import Path

_INSTALLED = Path(__file__).parent / "shipped"
ROOT = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parent.parent
PROFILES = ROOT / "profiles"
DOCKERFILES = ROOT / "dockerfiles"
