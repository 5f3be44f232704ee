"""The program of a worker process, which runs injections or clean runs of one probe: python -m fault_injection.worker
..."""

from __future__ import annotations

import argparse
import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context, dtype_name
from envbuild.selftest.numerics import element_comparison
from envbuild.selftest.probes.probe_catalogue import PROBES as CATALOGUE

from . import model
from .injector import Shot, Site
from .records import STOPPED, CleanRun, Lines, Record
from .runner import Effect, Observed, Runner, effect
from .units import PROBES, Unit

LEVEL = "standard"
CONTROL = "control"  # stands for the probe operations with a broken comparison, which skips every second element
CONTROLLED = "operations"
OFFSETS = (0, 1, 3, 6)  # number of elements by which inputs are shifted in memory
EVEN_OFFSETS = (0, 2, 6, 12)  # for probes that view pairs of numbers as complex ones
THREADS = (1, 2)
_right = element_comparison.compare  # the original: Runner replaces it


class Campaign:
    """The units of one probe, and the result of each unit without a fault."""

    def __init__(self, runner: Runner, probe: str) -> None:
        self.runner, self.probe = runner, probe
        found = ((unit, runner.clean(unit)) for unit in PROBES[probe](Context(runner.job)))
        self.units: list[tuple[Unit, Observed]] = [(unit, clean) for unit, clean in found if clean is not None]

    def inject(self, number: int) -> Record:
        """Make the injection with this number. A number always gives the same injection: a unit, one of the elements
        that its operators compute (both drawn with equal probability), and a fault drawn from the model."""
        unit, site, fault, clean = self.drawn(number)
        dtype = site.dtype if site.dtype.is_floating_point else torch.float64
        found = effect(clean, self.runner.run(unit, Shot(site.number, fault)), dtype)
        return _record(unit, site, fault, found)

    def died(self, number: int) -> Record:
        """Return the record of an injection that ended the process."""
        unit, site, fault, _ = self.drawn(number)
        return _record(unit, site, fault, Effect(STOPPED, True))

    def drawn(self, number: int) -> tuple[Unit, Site, model.Fault, Observed]:
        generator = random.Random(f"{self.probe} {number}")
        unit, clean = generator.choice(self.units)
        place = generator.randrange(sum(site.count for site in clean.sites))
        for site in clean.sites:
            if place < site.count:
                return unit, site, model.draw(generator, site.count, site.dtype, place), clean
            place -= site.count
        raise AssertionError("an element beyond the last")

    def check(self) -> None:
        """Raise ValueError if a run without a fault differs from the earlier run without a fault: then an injected
        fault has remained."""
        for unit, clean in self.units:
            again = self.runner.run(unit)
            if again.detected or effect(clean, again).changed:
                raise ValueError(f"{self.probe}: {unit.name} differs after the injections: {again.faults}")


def _record(unit: Unit, site: Site, fault: model.Fault, found: Effect) -> Record:
    bits = model.field(fault, site.dtype)
    where = (unit.name, site.operator, dtype_name(site.dtype))
    return Record(
        *where, fault.kind, fault.place, bits, found.outcome, found.detected, found.changed, found.count, found.units
    )


def every_second(
    got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None = None
) -> element_comparison.Worst:
    """A broken comparison, which skips every second element."""
    limit = None if bound is None else bound.expand(got.shape).reshape(-1)[::2]
    return _right(got.detach().reshape(-1)[::2], expected.reshape(-1)[::2], limit)


class Displaced(TorchFunctionMode):
    """Make Tensor.to return tensors that begin `offset` elements after the start of an allocation."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self._offset = offset

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not torch.Tensor.to or not self._offset or result.requires_grad or not result.is_contiguous():
            return result
        whole = torch.empty(result.numel() + self._offset, dtype=result.dtype)
        moved = whole[self._offset :].view(result.shape)
        return moved.copy_(result)


def run_injections(name: str, count: int, file: Path) -> None:
    """Continue the injections of a probe until there are `count` injections."""
    lines = Lines(file)
    done = lines.open()
    compare = every_second if name == CONTROL else element_comparison.compare
    with Runner(JobDocument(nonce="0" * 32, level=LEVEL, threads=1), compare) as runner:
        campaign = Campaign(runner, CONTROLLED if name == CONTROL else name)
        for number in range(done, count):
            lines.add(campaign.inject(number))
        campaign.check()


def run_died(name: str, file: Path) -> None:
    """Record the injection that ended the process."""
    lines = Lines(file)
    with Runner(JobDocument(nonce="0" * 32, level=LEVEL, threads=1)) as runner:
        lines.add(Campaign(runner, CONTROLLED if name == CONTROL else name).died(lines.open()))


def clean_settings(name: str) -> list[tuple[str, int, int]]:
    """Return (level, number of threads, offset) of each clean run of a probe. The levels are the first level that
    contains the probe, and standard."""
    first = next(probe.level for probe in CATALOGUE if probe.name == name)
    return list(itertools.product(dict.fromkeys((first, LEVEL)), THREADS, EVEN_OFFSETS if name == "fft" else OFFSETS))


def run_clean(name: str, count: int, file: Path, configuration: str) -> None:
    """Continue the clean runs of a probe until there are `count` clean runs. Each setting is run at most once, because
    a CPU repeats a run bit for bit."""
    lines = Lines(file)
    done = lines.open()
    units: dict[str, list[Unit]] = {}
    with Runner(JobDocument(nonce="0" * 32, level=LEVEL, threads=1)) as runner:
        for level, threads, offset in clean_settings(name)[done:count]:
            runner.job = JobDocument(nonce="0" * 32, level=level, threads=1)
            if level not in units:
                torch.set_num_threads(1)
                found = PROBES[name](Context(runner.job))
                units[level] = [unit for unit in found if runner.learned(unit) is not None]
            torch.set_num_threads(threads)
            with Displaced(offset):
                wrong = [f"{unit.name}: {fault}" for unit in units[level] for fault in runner.judged(unit)]
            lines.add(CleanRun(configuration, level, threads, offset, tuple(wrong)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("injections", "died", "clean"))
    parser.add_argument("name", choices=(*PROBES, CONTROL))
    parser.add_argument("count", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("configuration", nargs="?", default="")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.what == "injections":
        run_injections(arguments.name, arguments.count, arguments.file)
    elif arguments.what == "died":
        run_died(arguments.name, arguments.file)
    else:
        run_clean(arguments.name, arguments.count, arguments.file, arguments.configuration)


if __name__ == "__main__":
    main()
