"""The names of the runners in options and settings. This module imports nothing, so that `--help` stays fast."""

from __future__ import annotations

RUNNERS = ("local", "slurm", "kubernetes")
