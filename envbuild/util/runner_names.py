"""The runners by name, as an option or a setting chooses one. Pure; the command line's help needs it."""

from __future__ import annotations

RUNNERS = ("local", "slurm", "kubernetes")
