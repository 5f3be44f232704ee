"""The names of the runners for options and settings. Without other imports, because the command line's help needs
it."""

from __future__ import annotations

RUNNERS = ("local", "slurm", "kubernetes")
