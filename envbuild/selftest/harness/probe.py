"""The definition of a probe. `envbuild.selftest.probes.probe_catalogue` lists all probes in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from envbuild.selftest.harness.probe_context import Context


@dataclass(frozen=True)
class Probe:
    """A probe: its name, its function and the conditions under which it runs.

    `level`: the lowest level that runs it, or "on-request" for a probe that only runs when a job names it. `timeout`
    is in seconds, and five times as long at level full.
    `needs`: "cpu" (any device), "cuda", or "script" (any device, and a script from the profile).
    `least_capability`: the lowest compute capability that supports the tested feature. On an older GPU the probe is
    skipped, and a profile for an older GPU cannot require it.
    `untouched`: no torch function was called in the probe's process before it begins, not even the check for a GPU,
    which starts CUDA. For probes that test the driver itself, or fork processes that will use torch.
    `alone`: no other probe runs or starts CUDA at the same time, because this one measures time or takes all memory.
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
        """Whether CUDA may be started in the probe's process before its turn; a script may want to start it itself."""
        return not self.untouched and self.needs != "script"

    @property
    def may_accompany(self) -> bool:
        """Whether the probe may run while another one runs; what a script does is unknown."""
        return not self.alone and self.needs != "script"

    @property
    def does(self) -> str:
        """The one-line description: the first line of the function's docstring, without the probe's name."""
        return (self.function.__doc__ or "").partition("\n")[0].partition(": ")[2]
