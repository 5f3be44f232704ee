"""Uses the folders and settings of the unit tests."""

from __future__ import annotations

from unit.conftest import isolated, project

__all__ = ["isolated", "project"]
