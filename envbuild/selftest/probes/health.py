"""hw.health: what the driver knows of a card's faults, before and after work on it. Asked of NVML, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from envbuild.selftest.context import Context
from envbuild.selftest.libcuda import Driver
from envbuild.selftest.nvml import Handle, Nvml, Refused, Unavailable
from envbuild.selftest.outcome import ProbeFailure, Skip

WORK = 4096  # of the products in between
DRAIN = "drain the card"
# Xid errors that an application causes, maybe another process's: NVIDIA/k8s-device-plugin leaves a card in use after
# them (its issue #1340 and pull request #1165).
APPLICATION_XIDS = frozenset((13, 31, 43, 45, 68, 109))


@dataclass(frozen=True)
class Health:
    """A card's faults as NVML tells them; None where it does not.

    `uncorrected`: memory errors since the driver was loaded; `ever`: since the card was made, which include those of
    rows that were replaced long ago. `pending`: a bad row or page waits for a reset. `failed`: no spare row was left.
    """

    uncorrected: int | None = None
    ever: int | None = None
    pending: bool | None = None
    failed: bool | None = None

    def faults(self) -> Iterator[str]:
        """What makes the card unfit."""
        if self.uncorrected:
            yield f"{self.uncorrected} uncorrected memory errors since the driver was loaded: {DRAIN} and reset it"
        if self.pending:
            yield f"memory that went bad waits to be replaced: {DRAIN} and reset it"
        if self.failed:
            yield f"memory that went bad could not be replaced: {DRAIN} for good"


class Watch:
    """The health of the cards that this process may use, and the Xid errors since the watch began.

    Raises Unavailable where libcuda or NVML cannot be asked, Refused where NVML says that a card is at fault.
    """

    def __init__(self) -> None:
        self._nvml = Nvml()
        try:
            driver = Driver()
        except OSError as error:
            raise Unavailable(str(error)) from None
        if driver.start() != 0:
            raise Unavailable("the driver does not start")
        self._application_xids: list[int] = []
        found = {bus_id: self._nvml.handle(bus_id) for bus_id in driver.bus_ids()}
        self._cards = {bus_id: card for bus_id, card in found.items() if card is not None}
        self._events = self._nvml.watch(list(self._cards.values())) if self._cards else None

    def cards(self) -> dict[str, Health]:
        """Each card's health now, by PCI bus id."""
        return {bus_id: self._health(card) for bus_id, card in self._cards.items()}

    def xids(self) -> list[int] | None:
        """The numbers of the Xid errors so far; None where the driver tells none."""
        return None if self._events is None else self._nvml.xids(self._events)

    def told(self) -> dict[str, Any]:
        """What is no fault of the card, to be told among the traits."""
        return {"nvml_unanswered": dict(self._nvml.unanswered), "application_xids": list(self._application_xids)}

    def _health(self, card: Handle) -> Health:
        errors, rows = self._nvml.uncorrected(card), self._nvml.remapping(card)
        if rows is None:
            return Health(*errors, pending=self._nvml.retiring(card))
        return Health(*errors, pending=rows.pending, failed=rows.failed)

    def faults(self) -> Iterator[str]:
        """What is wrong by now, each with the card it is about."""
        for bus_id, found in self.cards().items():
            yield from (f"GPU {bus_id}: {fault}" for fault in found.faults())
        found_xids = self.xids() or []
        self._application_xids += [number for number in found_xids if number in APPLICATION_XIDS]
        numbers = [number for number in found_xids if number not in APPLICATION_XIDS]
        if numbers:
            yield f"the driver reported Xid {', '.join(map(str, numbers))} meanwhile: see the host's log, and {DRAIN}"


def health(context: Context) -> None:
    """hw.health: no uncorrected memory errors, no memory waiting to be replaced, no Xid of the card while products run.

    Xid errors of before are in the host's log only. Where torch sees no GPU, the driver is asked all the same.
    """
    try:
        context.step("health before")
        watch = Watch()
        before = watch.cards()
        context.traits.update(watch.told())
        if not any(value is not None for card in before.values() for value in asdict(card).values()):
            raise Skip("NVML tells nothing of this card's memory")
        context.step("products on every GPU")
        worked = _work()
        context.step("health after")
        context.traits.update(_document(before, watch.cards()), worked=worked)
        report(context, watch)
    except Unavailable as error:
        raise Skip(str(error)) from None
    except Refused as error:
        raise ProbeFailure("hardware", f"{error}: {DRAIN}") from None


def report(context: Context, watch: Watch) -> None:
    """Fail for each fault, and tell the rest; raises Refused."""
    for fault in watch.faults():
        context.fail("hardware", fault)
    context.traits.update(watch.told())


def _work() -> int:
    """Multiply on each GPU that torch sees; how many there are."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        a = torch.ones((WORK, WORK), dtype=torch.float16, device=f"cuda:{index}")
        for _ in range(10):
            torch.mm(a, a)
    for index in range(count):
        torch.cuda.synchronize(index)
    return count


def _document(before: dict[str, Health], after: dict[str, Health]) -> dict[str, Any]:
    return {"cards": {bus_id: [asdict(before[bus_id]), asdict(after[bus_id])] for bus_id in before}}
