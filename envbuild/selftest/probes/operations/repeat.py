"""repeat: calls a few operations many hundred times, to find faults that occur late, rarely, or only with concurrent
work.

Successive calls of an operation use different values (and arguments) of the same shapes, and small tensors alternate
with large ones. This detects a result, a plan or packed weights that were kept from an earlier call. On the host, the
first result of each input is compared with the exact one. On the device, every later result is compared with the first,
bit for bit.

The calls are made in several modes: with separate input tensors, with inputs copied into the same memory, under
inference_mode, under autocast (only operations that are exact in half precision), and together with other work. On a
CPU, the other work is a second thread or a second process, which makes the same kinds of calls and checks them. On a
GPU, every second operation runs on a second stream.

A fault that affects one call in N is found with a probability of 1 - (1 - 1 / N)^calls. On a CPU a run makes 7,652
calls at level quick, 63,720 at standard and 572,380 at full, and more in a second thread (the trait `calls` counts
all). One wrong element in a million calls is then found with a probability of 0.8%, 6% and 44%. One wrong element in a
million elements is found at each level, because level quick already compares 90 million elements (the trait
`elements`).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from envbuild.selftest.harness.forked_work import ForkedWork, Tell
from envbuild.selftest.harness.probe_context import Context, is_unsupported, short_name
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case, worst
from envbuild.selftest.probes.operations.repeat_cases import Repeated, repeated_operations, small_operations

ROUNDS = {"quick": 12, "standard": 100, "full": 900}
SECONDS = 20.0  # time limit for a second process to start, and again to end

SEPARATE, SAME_MEMORY, INFERENCE, AUTOCAST = "separate tensors", "the same memory", "inference mode", "autocast"
THREAD, PROCESS, STREAM = "a second thread", "a second process", "a second stream"
# commands to the second process (WAITS, WORKS, ENDS), and its answer when it has started (READY)
WAITS, WORKS, ENDS, READY = b"\0", b"\1", b"\2", b"\1"


def repeat(context: Context) -> None:
    """repeat: some operations give the same bits in hundreds of calls, also together with other work."""
    rounds = ROUNDS[context.job.level]
    flag = mmap.mmap(-1, 2)
    other = (
        ForkedWork(functools.partial(_second_process, flag=flag)) if context.on_cpu else None
    )  # forked before torch starts threads
    calls = Calls(context.device, repeated_operations())
    try:
        for mode in (SEPARATE, SAME_MEMORY, INFERENCE, AUTOCAST, *((THREAD, PROCESS) if context.on_cpu else (STREAM,))):
            with context.step(f"{rounds} rounds, {mode}"):
                with company(mode, calls, flag):
                    for number in range(rounds):
                        calls.round(number, mode)
                calls.read(mode)
            for kind, reason in calls.faults:
                context.fail(kind, reason)
            calls.faults.clear()
    finally:
        flag[:1] = ENDS
        ending = other.finish(other.elapsed() + SECONDS) if other else None
    for kind, reason in ending.reported.get("faults", []) if ending else []:
        context.fail(kind, f"in the second process: {reason}")
    if ending and ending.failure:
        context.fail("exception", f"the second process: {ending.failure}", ending.signal)
    context.traits.update(calls=calls.calls, elements=calls.elements)
    if calls.refused:
        context.traits["unsupported"] = calls.refused


class Calls:
    """Calls the operations repeatedly. Compares the first result with the exact one, and each later result with the
    first, bit by bit. `faults`: the kind and description of each fault."""

    def __init__(self, device: torch.device, operations: Sequence[Repeated], others: Calls | None = None) -> None:
        """`others`: a Calls object whose exact results are already known, and are used here too."""
        self.device = device
        self.faults: list[tuple[str, str]] = []
        self.refused: dict[str, str] = {}
        self.calls = self.elements = 0
        self._operations = operations
        self._given = {
            case.name: [values.to(device) for values in case.given] for each in operations for case in each.cases
        }
        self._memory = {
            each.name: [values.clone() for values in self._given[each.cases[0].name]] for each in operations
        }
        self._exact: dict[str, Mapping[str, Exact]] = others._exact if others else {}
        self._first: dict[tuple[str, ...], torch.Tensor] = {}
        self._different: dict[tuple[str, ...], torch.Tensor] = {}
        self._stream: Any = None

    def round(self, number: int, mode: str) -> None:
        for place, each in enumerate(self._operations):
            if number % each.every or each.name in self.refused or (mode == AUTOCAST and not each.narrow):
                continue
            for case in each.cases:
                given = self._given[case.name]
                if mode == SAME_MEMORY:
                    for memory, values in zip(self._memory[each.name], given):
                        memory.copy_(values)
                    given = self._memory[each.name]
                with self._on_stream(mode, place):
                    self._call(each, case, given, mode)

    @contextlib.contextmanager
    def _on_stream(self, mode: str, place: int) -> Iterator[None]:
        if mode == STREAM and place % 2:
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield
        else:
            yield

    def _surroundings(self, mode: str) -> contextlib.AbstractContextManager[Any]:
        if mode == INFERENCE:
            return torch.inference_mode()
        if mode == AUTOCAST:
            return torch.autocast(
                self.device.type, dtype=torch.bfloat16 if self.device.type == "cpu" else torch.float16
            )
        return contextlib.nullcontext()

    def _call(self, each: Repeated, case: Case, given: Sequence[torch.Tensor], mode: str) -> None:
        try:
            with self._surroundings(mode):
                got = case.run(*given)["output"]
        except (RuntimeError, TypeError) as error:
            if not is_unsupported(error):
                raise
            self.refused[each.name] = str(error).splitlines()[0][:200]
            return
        self.calls += 1
        self.elements += got.numel()
        key = (case.name, short_name(got.dtype), "" if each.whole else mode)
        if key not in self._first:
            self._begin(key, case, got, mode)
        # on a GPU, torch.equal would wait for the device
        elif not (self.device.type == "cpu" and torch.equal(_bits(got), self._first[key])):
            self._different[key].logical_or_(_bits(got) != self._first[key])

    def _begin(self, key: tuple[str, ...], case: Case, got: torch.Tensor, mode: str) -> None:
        """Compare a first result with the exact one."""
        if case.name not in self._exact:
            self._exact[case.name] = case.expected()
        if not torch.equal(got.cpu().to(torch.float64), self._exact[case.name]["output"].value):
            found = worst({"output": got}, self._exact[case.name])["output"]
            if found.wrong:
                self.faults.append(
                    (found.kind if found.bound else "mismatch", f"{case.name}, first call, {mode}: {found}")
                )
        self._first[key] = _bits(got).clone()
        self._different[key] = torch.zeros_like(self._first[key], dtype=torch.bool)

    def read(self, mode: str) -> None:
        """Record the results that differed since the last call of this method."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for key, different in self._different.items():
            places = different.cpu().nonzero()
            if len(places):
                what = f"{len(places)} of {different.numel()} elements, the first {places[0].tolist()}, differ"
                self.faults.append(("mismatch", f"{key[0]}, {mode}: {what} from those of the first call"))
                different.zero_()


def _bits(values: torch.Tensor) -> torch.Tensor:
    return (
        values.detach()
        .contiguous()
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    )


@contextlib.contextmanager
def company(mode: str, calls: Calls, flag: mmap.mmap) -> Iterator[None]:
    """Return a context in which a second thread or process makes calls, if the mode requires it."""
    if mode == PROCESS:
        flag[:1], latest = WORKS, time.monotonic() + SECONDS
        while flag[1:] != READY and time.monotonic() < latest:
            time.sleep(0.001)
        yield
        flag[:1] = WAITS
        return
    if mode != THREAD:
        yield
        return
    second, end = Calls(calls.device, small_operations(), calls), threading.Event()
    thread = threading.Thread(target=_second_thread, args=(second, end))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    second.read(SEPARATE)
    calls.faults += [(kind, f"in the second thread: {reason}") for kind, reason in second.faults]
    calls.calls += second.calls
    calls.elements += second.elements


def _second_thread(calls: Calls, end: threading.Event) -> None:
    number = 0
    try:
        while not end.is_set():
            calls.round(number, SEPARATE)
            number += 1
    except Exception as error:
        calls.faults.append(("exception", f"{type(error).__name__}: {error}"))


def _second_process(tell: Tell, flag: mmap.mmap) -> None:
    """Make calls while the flag requests them. Return when the flag requests the end, or when the parent process is
    gone."""
    torch.set_num_threads(1)
    parent, number = os.getppid(), 1
    calls = Calls(torch.device("cpu"), small_operations())
    calls.round(0, SEPARATE)
    flag[1:] = READY
    while flag[:1] != ENDS and os.getppid() == parent:
        if flag[:1] == WAITS:
            time.sleep(0.001)
            continue
        calls.round(number, SEPARATE)
        number += 1
    calls.read(SEPARATE)
    tell("faults", calls.faults)
