"""Folders and settings as in the unit tests."""

from __future__ import annotations

from unit.conftest import isolated, project

__all__ = ["isolated", "project"]
