"""What a probe is; and which there are, by catalogue order, in `envbuild.selftest.probes.probe_catalogue`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from envbuild.selftest.harness.probe_context import Context


@dataclass(frozen=True)
class Probe:
    """One check: `level` is the lowest that runs it, or "asked" where none does but only a job that names it; `timeout`
    in seconds.

    `needs`: "cpu" (any device), "cuda", or "script": any device, and a script of the profile's own.
    `least_capability`: the lowest compute capability of a GPU that has what is tested; on an older one it is skipped,
    and a profile for an older one cannot require it.
    `untouched`: nothing of torch was called in its process when it begins, not even the question whether there is a
    GPU, which starts CUDA. It judges the driver itself, or forks processes that are to use torch.
    `alone`: no other probe works or starts CUDA meanwhile, as it measures time or takes all the memory there is.
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
        """Whether CUDA may be started in its process before its turn; a script may want to do that itself."""
        return not self.untouched and self.needs != "script"

    @property
    def may_accompany(self) -> bool:
        """Whether it may work while another probe works; what a script does is unknown."""
        return not self.alone and self.needs != "script"

    @property
    def does(self) -> str:
        """Its sentence: the first line of its function's docstring, after the probe's name."""
        return (self.function.__doc__ or "").partition("\n")[0].partition(": ")[2]
