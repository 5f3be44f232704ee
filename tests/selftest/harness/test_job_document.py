"""The job document: all its faults are reported at once, and a valid one is accepted."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envbuild.selftest.harness.cpu_count import processors
from envbuild.selftest.harness.job_document import JobError, parse
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_scheduler import plan
from envbuild.selftest.harness.project_test_spec_reader import AttentionSpec, ScriptSpec, ShapeSpec
from selftest.reading import job

KNOWN = frozenset(("a", "b"))
SHAPE = {"m": 1, "k": 2, "n": 3, "dtype": "fp16"}
SCRIPT = {"name": "a.py", "text": "x"}
HEADS = {"heads": 2, "length": 100, "depth": 64, "dtype": "bf16"}
ATTENTION_WORDS = "dtype is one of fp32, fp16, bf16, causal true or false"
WORDS = "dtype is one of fp64, fp32, fp16, bf16, layout one of nn, nt, tn, tt, bias true or false"
CATALOGUE = (
    Probe("a", "quick", "cpu", 1, lambda context: None),
    Probe("b", "standard", "cpu", 1, lambda context: None),
    Probe("c", "full", "cuda", 1, lambda context: None),
    Probe("s", "quick", "script", 1, lambda context: None),
)


def faults(document: Any) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        parse(document, KNOWN)
    return caught.value.faults


def test_the_least_document_is_enough() -> None:
    parsed = parse({"version": 1, "nonce": "0" * 32}, KNOWN)
    assert (parsed.level, parsed.device, parsed.probes, parsed.require) == ("quick", "cpu", None, ())
    assert (parsed.gpu_count, parsed.transport) == (1, None)
    assert parsed.thread_count >= 1


def test_every_field_is_taken() -> None:
    parsed = parse(
        job(
            level="full",
            device="cuda",
            probes=["b"],
            require=["a"],
            expect={
                "distributions": {"torch": "2.3.1"},
                "python": "3.11",
                "gpus": ["NVIDIA H20"],
                "gpu_count": 4,
                "transport": "p2p",
                "driver": {"cuda": "580"},
                "cards": {"NVIDIA H20": {"compute_capability": "9.0", "sms": 78}},
            },
            settings={"allow_tf32": True},
            timeouts={"a": 3},
            threads=3,
            memory_mb=4096,
            own={"shapes": [SHAPE, HEADS], "script": SCRIPT},
        ),
        KNOWN,
    )
    assert (parsed.level, parsed.device, parsed.probes, parsed.require) == ("full", "cuda", ("b",), ("a",))
    assert (parsed.distributions, parsed.python, parsed.gpus) == ({"torch": "2.3.1"}, "3.11", ("NVIDIA H20",))
    assert (parsed.gpu_count, parsed.transport) == (4, "p2p")
    assert parsed.driver == {"cuda": "580"}
    assert parsed.cards == {"NVIDIA H20": {"compute_capability": "9.0", "sms": 78}}
    assert (parsed.settings, parsed.timeouts) == ({"allow_tf32": True}, {"a": 3.0})
    assert (parsed.thread_count, parsed.memory_mb) == (3, 4096)
    assert parsed.own.shapes == (ShapeSpec(1, 2, 3, "float16", "nn", False),)
    assert parsed.own.attentions == (AttentionSpec(2, 100, 64, "bfloat16", False),)
    assert parsed.own.script == ScriptSpec("a.py", "x")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"version": 2}, "version: 1 expected, not 2"),
        ({"expect": {"cards": {"x": {}}}}, 'expect.cards.x.compute_capability: as "9.0" expected, not None'),
        (
            {"expect": {"cards": {"x": {"compute_capability": 9.0}}}},
            'expect.cards.x.compute_capability: as "9.0" expected, not 9.0',
        ),
        (
            {"expect": {"cards": {"x": {"compute_capability": "9.0", "sms": 0}}}},
            "expect.cards.x.sms: a whole number above zero expected, not 0",
        ),
        ({"expect": {"cards": {"x": {"compute_capability": "9.0", "sm": 1}}}}, "expect.cards.x.sm: unknown key"),
        ({"nonce": "short"}, "nonce: 32 lower-case hexadecimal digits expected"),
        ({"level": "deep"}, "level: one of quick, standard, full expected, not 'deep'"),
        ({"level": ["quick"]}, "level: one of quick, standard, full expected, not ['quick']"),
        ({"device": "tpu"}, "device: one of cpu, cuda expected, not 'tpu'"),
        ({"probes": ["a", "x"]}, "probes: unknown probe 'x'"),
        ({"probes": "a"}, "probes: a list of names expected, not 'a'"),
        ({"require": ["y"]}, "require: unknown probe 'y'"),
        ({"require": None}, "require: a list of names expected, not None"),
        ({"expect": {"torch": "2"}}, "expect.torch: unknown key"),
        ({"expect": {"distributions": {"torch": 2}}}, "expect.distributions.torch: a string expected, not 2"),
        ({"expect": {"python": 3.11}}, "expect.python: a string expected, not 3.11"),
        ({"expect": {"gpu_count": 0}}, "expect.gpu_count: a whole number above zero expected, not 0"),
        (
            {"expect": {"transport": "pcie"}},
            "expect.transport: one of p2p, nvls, shm, ib, net, socket expected, not 'pcie'",
        ),
        ({"expect": {"driver": {"gpu": "580"}}}, "expect.driver.gpu: unknown key"),
        ({"expect": {"driver": {"cuda": "5x"}}}, "expect.driver.cuda: numbers and dots expected, not '5x'"),
        ({"settings": {"tf32": True}}, "settings.tf32: unknown key"),
        ({"settings": {"allow_tf32": 1}}, "settings.allow_tf32: true or false expected, not 1"),
        ({"timeouts": {"a": 0}}, "timeouts.a: seconds above zero expected, not 0"),
        ({"timeouts": {"a": float("nan")}}, "timeouts.a: seconds above zero expected, not nan"),
        ({"timeouts": {"x": 1}}, "timeouts.x: unknown key"),
        ({"floors": {"speed": 1}}, "floors.speed: unknown key"),
        ({"floors": {"gemm": 0}}, "floors.gemm: a number above zero expected, not 0"),
        ({"expect": {"datasheets": {"X": {"int4": 1}}}}, "expect.datasheets.X.int4: unknown key"),
        ({"expect": {"datasheets": ["X"]}}, "expect.datasheets: a mapping expected, not ['X']"),
        ({"timeouts": [1]}, "timeouts: a mapping expected, not [1]"),
        ({"threads": 0}, "threads: a whole number above zero expected, not 0"),
        ({"memory_mb": True}, "memory_mb: a whole number above zero expected, not True"),
        ({"own": []}, "own: a mapping of shapes and script expected"),
        ({"own": {"more": 1}}, "own: a mapping of shapes and script expected"),
        ({"own": {"shapes": {}}}, "own.shapes: a list expected"),
        (
            {"own": {"shapes": [{"heads": 1}]}},
            "own.shapes[0]: a mapping of heads, length, depth, dtype and causal expected",
        ),
        (
            {"own": {"shapes": [{**HEADS, "heads": 0}]}},
            "own.shapes[0]: heads, length and depth are whole numbers above zero",
        ),
        ({"own": {"shapes": [{**HEADS, "dtype": "fp64"}]}}, f"own.shapes[0]: {ATTENTION_WORDS}"),
        ({"own": {"shapes": [{**HEADS, "dtype": []}]}}, f"own.shapes[0]: {ATTENTION_WORDS}"),
        ({"own": {"shapes": [{**HEADS, "causal": 1}]}}, f"own.shapes[0]: {ATTENTION_WORDS}"),
        ({"own": {"shapes": [SHAPE, 5]}}, "own.shapes[1]: a mapping of m, k, n, dtype, layout and bias expected"),
        ({"own": {"shapes": [{**SHAPE, "m": 0}]}}, "own.shapes[0]: m, k and n are whole numbers above zero"),
        ({"own": {"shapes": [{**SHAPE, "k": True}]}}, "own.shapes[0]: m, k and n are whole numbers above zero"),
        ({"own": {"shapes": [{**SHAPE, "dtype": "int8"}]}}, f"own.shapes[0]: {WORDS}"),
        ({"own": {"shapes": [{**SHAPE, "dtype": []}]}}, f"own.shapes[0]: {WORDS}"),
        ({"own": {"shapes": [{**SHAPE, "layout": "no"}]}}, f"own.shapes[0]: {WORDS}"),
        ({"own": {"shapes": [{**SHAPE, "bias": 1}]}}, f"own.shapes[0]: {WORDS}"),
        ({"own": {"script": "print()"}}, "own.script.name: the name of a .py file expected"),
        ({"own": {"script": {**SCRIPT, "name": "../a.py"}}}, "own.script.name: the name of a .py file expected"),
        (
            {"own": {"script": {**SCRIPT, "text": None}}},
            "own.script.text: source of at most 262144 characters expected",
        ),
        (
            {"own": {"script": {**SCRIPT, "text": "#" * 262145}}},
            "own.script.text: source of at most 262144 characters expected",
        ),
        ({"colour": "red"}, "colour: unknown key"),
    ],
)
def test_a_fault_is_named(fields: dict[str, Any], fault: str) -> None:
    assert faults(job(**fields)) == (fault,)


def test_all_faults_are_named_at_once() -> None:
    assert len(faults({"version": 0, "nonce": 1, "level": "x", "device": "y", "threads": "z", "extra": 1})) == 6


@pytest.mark.parametrize("document", [None, [], "text", 1])
def test_a_document_that_is_not_a_mapping_is_refused(document: Any) -> None:
    assert faults(document) == ("the job document is not a mapping",)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["a"]),
        ({"level": "standard"}, ["a", "b"]),
        ({"level": "full"}, ["a", "b", "c"]),
        ({"require": ["c"]}, ["a", "c"]),
        ({"probes": ["b", "a"]}, ["a", "b"]),
        ({"probes": ["b"], "require": ["a"]}, ["b"]),
        ({"probes": []}, []),
        ({"own": {"script": SCRIPT}}, ["a", "s"]),
        ({"own": {"script": SCRIPT}, "probes": ["a"]}, ["a"]),
        ({"require": ["s"]}, ["a", "s"]),
        ({"probes": ["s"]}, ["s"]),
    ],
)
def test_the_plan_is_the_levels_and_the_required_or_those_named(fields: dict[str, Any], names: list[str]) -> None:
    parsed = parse(job(**fields), frozenset("abcs"))
    assert [probe.name for probe in plan(CATALOGUE, parsed)] == names


@pytest.mark.parametrize(("text", "least"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", 0), ("", 0)])
def test_a_quota_limits_the_processors(tmp_path: Path, text: str, least: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert processors(tmp_path / "cpu.max") == (least or processors(tmp_path / "absent"))
