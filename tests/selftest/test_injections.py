"""benchmarks/injections.py: the effect of each fault, the counts, and that a broken comparison lowers the score."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import element_comparison, tensor_digests
from envbuild.selftest.probes.probe_catalogue import PROBES as CATALOGUE

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import injections
from fault_injection import model, records, report, statistics, worker
from fault_injection.injector import InjectedContext, Injector, Shot
from fault_injection.model import Fault
from fault_injection.records import MASKED, PARTIAL, STOPPED, WHOLE, Record
from fault_injection.runner import Observed, Result, Runner, effect
from fault_injection.units import PROBES, Unit

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COUNT = 200
JOB = JobDocument(nonce="0" * 32, level="standard", threads=1)


def values(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in which neighbours differ and, except for bool, no element is 0."""
    return (torch.arange(COUNT) % 2 == 0) if dtype == torch.bool else (torch.arange(COUNT) % 100 + 1).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS[x.itemsize])


def drawn(kind: str, place: str, dtype: torch.dtype) -> list[tuple[int, Fault]]:
    """Return five faults of this kind at this place, each with the element for which it was drawn."""
    generator = random.Random(1)
    found = []
    while len(found) < 5:
        element = generator.randrange(COUNT)
        fault = model.draw(generator, COUNT, dtype, element)
        if (fault.kind, fault.place) == (kind, place):
            found.append((element, fault))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [share.name for share in model.KINDS])
def test_each_kind_does_what_it_says(kind: str, dtype: torch.dtype) -> None:
    """A fault changes only the elements of its place, in a copy: the tensor to which the fault is applied stays as it
    was."""
    if (kind == model.SPECIAL and not dtype.is_floating_point) or (kind == model.TWO_BITS and dtype == torch.bool):
        draws = {model.draw(random.Random(seed), COUNT, dtype, 0).kind for seed in range(500)}
        assert kind not in draws
        return
    before = values(dtype)
    for place in model.PLACES:
        for _, fault in drawn(kind, place.name, dtype):
            after = model.apply(fault, before)
            assert torch.equal(before, values(dtype))
            struck = torch.zeros(COUNT, dtype=torch.bool)
            struck[fault.start : fault.end : fault.step] = True
            assert torch.equal(bits(after)[~struck], bits(before)[~struck])
            flipped = (bits(after) ^ bits(before))[struck].tolist()
            if kind == model.ZERO:
                assert not bits(after)[struck].any()
            elif kind == model.SPECIAL:
                assert not after[struck].isfinite().any()
            elif kind == model.OTHER_ELEMENT:
                places = torch.arange(COUNT)[struck]
                away = torch.where(places < fault.step, (places + fault.step).clamp(max=COUNT - 1), places - fault.step)
                assert torch.equal(after[struck], before[away])
            elif kind in (model.ONE_BIT, model.TWO_BITS) and fault.flip:
                most = 1 if kind == model.ONE_BIT else 2
                found = {number & (1 << 8 * dtype.itemsize) - 1 for number in flipped}
                assert len(found) == 1
                assert f"{found.pop():b}".rstrip("0") == "1" * most
            else:  # stuck: the bits of the mask have one value in all elements
                assert len({number & fault.mask for number in bits(after)[struck].tolist()}) == 1
                assert not any(number & ~fault.mask & (1 << 8 * dtype.itemsize) - 1 for number in flipped)


def test_places() -> None:
    for element, fault in drawn(model.ZERO, model.SINGLE_ELEMENT, torch.float32):
        assert (fault.start, fault.end) == (element, element + 1)
    for element, fault in drawn(model.ZERO, model.LANE, torch.float32):
        assert (fault.start, fault.end, fault.step) == (element % 32, COUNT, 32)
    periods = set()
    for element, fault in drawn(model.ZERO, model.PERIODIC, torch.float32):
        struck = range(fault.start, fault.end, fault.step)
        assert element in struck
        assert {place // 32 for place in struck} == {element // 32}
        periods.add(fault.step)
    assert periods <= set(model.PERIODS)


def test_draws_follow_the_shares() -> None:
    assert sum(share.value for share in model.KINDS) == pytest.approx(1, abs=1e-9)
    assert sum(share.value for share in model.PLACES) == pytest.approx(1)
    generator, count = random.Random(2), 20000
    faults = [model.draw(generator, COUNT, torch.float32, 0) for _ in range(count)]
    for shares, name in ((model.KINDS, "kind"), (model.PLACES, "place")):
        for share in shares:
            found = sum(getattr(fault, name) == share.name for fault in faults)
            assert abs(found - count * share.value) < 5 * math.sqrt(count * share.value)


def test_only_computed_outputs_of_steps_are_sites() -> None:
    injector = Injector()
    context = InjectedContext(JOB, injector)
    x = torch.ones(4, 6)
    x + x  # before the step
    with context.step("work"):
        y = x.t().reshape(-1).view(3, 8)  # a copy, between views
        y.mul_(2)
        torch._foreach_add_([y, x], 1)
        torch.empty(7)
        torch.layer_norm(x, (6,))
        with injector.on_host():
            x + x
    expected = [("clone", 24), ("mul_", 24), ("_foreach_add_", 24), ("_foreach_add_", 24)]
    assert [(site.operator, site.count) for site in injector.sites] == [
        *expected,
        ("native_layer_norm", 24),
        ("native_layer_norm", 4),
        ("native_layer_norm", 4),
    ]


def test_an_intermediate_product_is_changed() -> None:
    """The changed value is also used in the backward pass."""
    shot = Shot(0, Fault(model.ZERO, model.SINGLE_ELEMENT, 1, 2, 1, mask=0xFFFFFFFF))
    injector = Injector(shot)
    x = torch.ones(3, requires_grad=True)
    with InjectedContext(JOB, injector).step("work"):
        y = (x * 2) * x
        y.sum().backward()
    assert injector.hit == "mul"
    assert y.tolist() == [2, 0, 2]
    assert x.grad is not None and x.grad.tolist() == [4, 2, 4]


def softmaxes() -> list[Unit]:
    return [unit for unit in PROBES["operations"](Context(JOB)) if "softmax of 37 rows of 33 over rows" in unit.name]


@pytest.fixture(scope="module")
def runner():
    with Runner(JOB) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("place", (0, -1))
def test_a_large_fault_is_detected_and_a_clean_run_is_not(runner: Runner, place: int) -> None:
    """In the output of softmax and in its gradient, one element is changed: far beyond its tolerance, or by less than
    rounding may change it."""
    for unit in softmaxes():
        clean = runner.clean(unit)
        assert clean is not None and not clean.detected and len(clean.results) == 2
        number = clean.sites[place].number
        wide = 0x7FFF if clean.sites[place].dtype != torch.float32 else 0x7FFFFFFF
        large = runner.run(
            unit, Shot(number, Fault(model.ONE_BIT, model.SINGLE_ELEMENT, 7, 8, 1, mask=wide, flip=True))
        )
        assert large.detected
        assert effect(clean, large).outcome == PARTIAL
        none = runner.run(unit, Shot(number, Fault(model.ONE_BIT, model.SINGLE_ELEMENT, 7, 8, 1, mask=1, flip=True)))
        assert not none.detected
        assert effect(clean, none).outcome in (MASKED, PARTIAL)
        again = runner.run(unit)
        assert (effect(clean, again).outcome, again.faults) == (MASKED, [])


def test_effects() -> None:
    """The outcome depends on how many elements of a result change by more than rounding may change them."""

    def ran(*results: Result, **more: object) -> Observed:
        return Observed(results=list(results), **more)  # type: ignore[arg-type]

    allowed = torch.full((3,), 0.5, dtype=torch.float64)
    clean = ran(Result(torch.tensor([1.0, 2.0, math.inf]), allowed), Result(torch.tensor([1, 2])))

    def outcome(first: list[float], second: list[int], **more: object) -> tuple[str, int]:
        found = effect(clean, ran(Result(torch.tensor(first)), Result(torch.tensor(second)), **more))
        return found.outcome, found.changed

    assert outcome([1.4, 2, math.inf], [1, 2]) == (MASKED, 0)
    assert outcome([1.6, 2, math.inf], [1, 2]) == (PARTIAL, 1)
    assert outcome([math.nan, 2, 3], [1, 2]) == (PARTIAL, 2)
    assert outcome([1, 2, math.inf], [1, 3]) == (PARTIAL, 1)
    assert outcome([1, 2, math.inf], [2, 3]) == (WHOLE, 2)
    assert outcome([9, 9, 9], [1, 2]) == (WHOLE, 3)
    assert outcome([1, 2, math.inf], [1, 2], error="IndexError") == (STOPPED, 0)


def test_how_far_a_result_moves() -> None:
    """The distance is in units of the last place of the result's largest element, in the coarser dtype."""

    def units(after: list[float], dtype: torch.dtype = torch.float32) -> float:
        clean, faulty = (Observed(results=[Result(torch.tensor(values))]) for values in ([1.0, -4.0], after))
        return effect(clean, faulty, dtype).units

    eps = torch.finfo(torch.float32).eps
    assert units([1 + 8 * eps, -4]) == 2
    assert units([1, -4]) == 0
    assert units([1.5, -4], torch.float16) == 0.125 / torch.finfo(torch.float16).eps
    assert units([math.nan, -4]) == units([math.inf, -4]) == math.inf


@pytest.mark.slow
def test_a_broken_comparison_lowers_the_detected_share() -> None:
    """The same injections are judged by the self-test's comparison, and by a comparison that leaves out every second
    element."""
    shares = []
    for compare in (element_comparison.compare, worker.every_second):
        with Runner(JOB, compare) as runner:
            campaign = worker.Campaign(runner, "fft")
            shares.append(statistics.detected(map(campaign.inject, range(150))))
            campaign.check()
    right, broken = shares
    assert right.count == broken.count > 100
    assert right.interval[0] > 0.85
    assert broken.interval[1] < right.interval[0]


def test_a_unit_that_ends_with_an_error_is_not_left_out(runner: Runner) -> None:
    def fails(context: Context) -> None:
        raise AttributeError("no such name")

    with pytest.raises(ValueError, match="fails: AttributeError: no such name"):
        runner.learned(Unit("fails", fails))


def test_leftovers_of_a_fault_are_noticed(runner: Runner) -> None:
    x = torch.ones(64)

    def grows(context: Context) -> None:
        with context.step("work"):
            x.mul_(1 if len(kept) < 3 else 2)
        kept.append(tensor_digests.raw_digest(x))

    kept: list[str] = []
    campaign = SimpleNamespace(runner=runner, probe="one", units=[])
    unit = Unit("grows", grows, ("mul_",))
    campaign.units = [(unit, runner.clean(unit))]
    worker.Campaign.check(campaign)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grows differs after"):
        worker.Campaign.check(campaign)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_campaign_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """A continued campaign makes the same injections as an uninterrupted campaign. An incomplete line is dropped.
    Results of different sources are refused."""
    whole, parts = tmp_path / "whole" / "fft.jsonl", tmp_path / "fft.jsonl"
    worker.run_injections("fft", 12, whole)
    worker.run_injections("fft", 5, parts)
    parts.write_bytes(parts.read_bytes()[:-9])
    worker.run_injections("fft", 12, parts)
    found = records.injections(tmp_path, "fft")
    assert len(found) == 12
    assert found == records.injections(whole.parent, "fft")
    lines = parts.read_text().splitlines()
    parts.write_text("\n".join([json.dumps({"sources": "others"}), *lines[1:]]) + "\n")
    with pytest.raises(records.OtherSources, match=r"fft\.jsonl"):
        worker.run_injections("fft", 12, parts)


@pytest.mark.slow
def test_clean_runs(tmp_path: Path) -> None:
    """There is one run for each setting: the level, one or two threads, inputs at different addresses. Settings with a
    result in the file do not run again."""
    file = tmp_path / "clean-all-gemm.accumulator.jsonl"
    worker.run_clean("gemm.accumulator", 3, file, "all")
    worker.run_clean("gemm.accumulator", 100, file, "all")
    found = records.clean_runs(tmp_path, "gemm.accumulator")
    kinds = [(run.level, run.threads, run.offset) for run in found]
    assert kinds[:3] == [("quick", 1, 0), ("quick", 1, 1), ("quick", 1, 3)]
    assert len(kinds) == len(set(kinds)) == 16
    assert not any(run.faults for run in found)


@pytest.mark.slow
@pytest.mark.parametrize("probe", ("fft", "train.repeat"))
def test_a_right_machine_passes_with_every_setting(probe: str, tmp_path: Path) -> None:
    """Complex views need an even offset, and two threads give different bits than one thread."""
    worker.run_clean(probe, 100, tmp_path / f"clean-all-{probe}.jsonl", "all")
    found = records.clean_runs(tmp_path, probe)
    assert {run.threads for run in found} == {1, 2}
    assert [fault for run in found for fault in run.faults] == []


@pytest.mark.parametrize("avx512", (True, False))
def test_instructions_that_the_processor_lacks_are_left_out(
    avx512: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL would use these instructions all the same, and the process would die of SIGILL."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": avx512})
    found = {work.configuration for work in injections._clean(tmp_path)}
    assert (injections.AVX_512 in found) is avx512
    assert len(found) == 3 + avx512


def test_a_false_alarm_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Runner.judged
    monkeypatch.setattr(Runner, "judged", lambda runner, unit: [*judged(runner, unit), "wrong"])
    worker.run_clean("tf32.mode", 1, tmp_path / "clean-all-tf32.mode.jsonl", "all")
    assert [run.faults for run in records.clean_runs(tmp_path, "tf32.mode")] == [("all: wrong",)]


def test_displaced_tensors_are_equal_and_elsewhere() -> None:
    x = torch.arange(10.0)
    with worker.Displaced(3):
        moved = x.to(torch.device("cpu"))
    assert torch.equal(moved, x)
    assert moved.storage_offset() == 3
    with worker.Displaced(0):
        assert x.to(torch.device("cpu")) is x


@pytest.mark.parametrize(
    ("part", "count", "low", "high"), [(0, 10, 0, 0.2775), (8, 10, 0.4902, 0.9433), (1000, 1000, 0.9962, 1)]
)
def test_wilson(part: int, count: int, low: float, high: float) -> None:
    assert statistics.Share(part, count).interval == pytest.approx((low, high), abs=1e-4)


def record(outcome: str, detected: bool, units: float = 9.0) -> Record:
    return Record("case", "mm", "float32", model.ZERO, model.LANE, "", outcome, detected, 1, 9, units)


def test_the_detected_share_counts_what_can_escape() -> None:
    found = [record(PARTIAL, True)] * 3 + [record(PARTIAL, False), record(WHOLE, True), record(STOPPED, True)]
    assert statistics.detected([*found, record(MASKED, False)]) == statistics.Share(3, 4)
    assert statistics.detected_large([*found, record(PARTIAL, False, units=7)]) == statistics.Share(3, 4)


def test_the_page_says_what_was_measured() -> None:
    injections = {"fft": [record(PARTIAL, True), record(PARTIAL, False), record(MASKED, False)]}
    runs = [
        records.CleanRun("all", "quick", 1, 0, ()),
        records.CleanRun("all", "quick", 2, 0, ("fft: wrong",)),
    ]
    page = "\n".join(
        report.page(
            report.Campaign("a machine", "2.13", {"fft": 0.5}, injections, [record(PARTIAL, False)], {"fft": runs})
        )
    )
    assert "every figure holds under this model only" in page
    assert (
        "| fft | 3 | 1 | 0 | 0 | 0 | 2 | 50.00% (9.45 to 90.55) | 50.00% (9.45 to 90.55) of 2 | 0.50 | 100.0% |" in page
    )
    assert "1 with a false alarm" in page
    assert "- fft, all: fft: wrong" in page


def test_every_probe_is_covered_or_named_as_not_covered() -> None:
    page = "\n".join(report.page(report.Campaign("", "", {}, {}, [], {})))
    missing = page[page.index("## Not covered") :]
    for probe in CATALOGUE:
        if probe.level in ("quick", "standard") and probe.name not in PROBES:
            named = (probe.name, probe.name.partition(".")[0] + ".*")
            assert any(name in missing for name in named), (
                f"{probe.name}: add its cases to PROBES in benchmarks/fault_injection/units.py, "
                "or name it under 'Not covered' in benchmarks/fault_injection/report.py"
            )
