"""Exact results that one probe's process computes and later processes read."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.shared_reference_results import SharedResults, Tensors


class Counted:
    """Computes the result of a key, and counts its computations."""

    def __init__(self, *results: torch.Tensor) -> None:
        self.results = results
        self.calls = 0

    def __call__(self) -> Tensors:
        self.calls += 1
        return self.results


A = Counted(torch.arange(6, dtype=torch.float64).view(2, 3), torch.tensor(0.1, dtype=torch.float64))
B = Counted(torch.full((5, 1), -torch.inf, dtype=torch.float64))


@pytest.fixture(autouse=True)
def _not_yet_called() -> None:
    A.calls = B.calls = 0


def in_process(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; return its exit status: 0 if `work` raised nothing, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def equal(found: Tensors, wanted: Tensors) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_a_result_is_computed_once_and_read_by_processes_forked_before_and_after() -> None:
    results = SharedResults()
    assert in_process(lambda: (results.get("a", A), results.get("b", B))) == 0
    assert equal(results.get("a", A), A.results) and equal(results.get("b", B), B.results)
    assert in_process(lambda: results.get("c", B)) == 0
    assert equal(results.get("c", A), B.results)
    assert A.calls == B.calls == 0, "another process had computed them"


def test_incomplete_output_of_a_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    results = SharedResults()
    copied: list[torch.Tensor] = []

    def killed(target: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(source)
        if len(copied) == 2:  # of the result's two tensors
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", killed)
        assert in_process(lambda: results.get("a", A)) == -signal.SIGKILL
    assert equal(results.get("a", A), A.results) and A.calls == 1


def test_without_room_each_process_computes_for_itself() -> None:
    results = SharedResults(size=1 << 10)
    long = Counted(torch.ones(200, dtype=torch.float64))
    assert in_process(lambda: results.get("long", long)) == 0
    for _ in range(2):
        assert equal(results.get("long", long), long.results)
    assert long.calls == 1
    assert in_process(lambda: results.get("a", A)) == 0
    assert equal(results.get("a", B), A.results), "there was room for this one"


def test_without_memory_each_call_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    results = SharedResults()
    assert equal(results.get("a", A), A.results) and equal(results.get("a", A), A.results)
    assert A.calls == 2


def test_processes_that_write_at_the_same_time_do_not_overwrite_each_other() -> None:
    """Both read up to the same end before either appends: each result takes longer to compute than to write."""
    results, both_ready = SharedResults(), multiprocessing.Barrier(2)

    def fill(name: str, value: float) -> None:
        def compute() -> Tensors:
            both_ready.wait(10)
            return (torch.full((500_000,), value, dtype=torch.float64),)

        for index in range(20):
            (found,) = results.get(f"{name} {index}", compute)
            assert bool((found == value).all())
        for index in range(20):
            assert bool((results.get(f"{name} {index}", compute)[0] == value).all())

    with ThreadPoolExecutor(2) as pool:
        statuses = list(pool.map(lambda given: in_process(lambda: fill(*given)), [("a", 1.0), ("b", 2.0)]))
    assert statuses == [0, 0]
    for index in range(20):
        assert bool((results.get(f"a {index}", A)[0] == 1).all()) and bool((results.get(f"b {index}", A)[0] == 2).all())
    assert A.calls == 0


def test_a_python_for_an_old_glibc_computes_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    results = SharedResults()
    assert equal(results.get("a", A), A.results) and equal(results.get("a", A), A.results)
    assert A.calls == 2
