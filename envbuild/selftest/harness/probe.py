"""The definition of a probe, one test of the self-test. `envbuild.selftest.probes.probe_catalogue` lists all probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from envbuild.selftest.harness.probe_context import Context


@dataclass(frozen=True)
class Probe:
    """A probe: its name, its function and the conditions under which it runs.

    `level`: the lowest level that runs the probe, or "on-request" for a probe that runs only if a job names it.
    `timeout`: the time limit in seconds; at level full, the limit is five times as long.
    `needs`: "cpu" (runs on any device), "cuda" (needs a GPU), or "script" (needs a script in the profile; runs on any
    device).
    `least_capability`: the lowest compute capability that supports the tested feature. On an older GPU the probe is
    skipped, and a profile for an older GPU cannot require the probe.
    `untouched`: the harness calls no torch function in the probe's process before the probe begins, not even the check
    for a GPU, which starts CUDA. It is set for probes that test the driver itself, or fork processes that use torch.
    `alone`: no other probe runs or starts CUDA at the same time, because this probe measures time or uses all memory.
    """

    name: str
    level: str
    needs: str
    timeout: float
    function: Callable[[Context], None]
    untouched: bool = False
    least_capability: tuple[int, int] = (0, 0)
    alone: bool = False

    @property
    def may_start_ahead(self) -> bool:
        """Whether the harness may start CUDA in the probe's process before the probe begins.

        It may not for a script, because a script may have to set up its process before CUDA starts.
        """
        return not self.untouched and self.needs != "script"

    @property
    def may_accompany(self) -> bool:
        """Whether the probe may run at the same time as other probes. A script may not: its effects are unknown."""
        return not self.alone and self.needs != "script"

    @property
    def does(self) -> str:
        """The probe's one-line description: the first line of its function's docstring, after "NAME: "."""
        return (self.function.__doc__ or "").partition("\n")[0].partition(": ")[2]
