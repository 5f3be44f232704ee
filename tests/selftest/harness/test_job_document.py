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
ATTENTION_WORDS = "dtype must be one of fp32, fp16, bf16, causal true or false"
WORDS = "dtype must be one of fp64, fp32, fp16, bf16, layout one of nn, nt, tn, tt, bias true or false"
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
        ({"version": 2}, "version: expected 1, got 2"),
        (
            {"expect": {"cards": {"x": {}}}},
            'expect.cards.x.compute_capability: expected a value such as "9.0", got None',
        ),
        (
            {"expect": {"cards": {"x": {"compute_capability": 9.0}}}},
            'expect.cards.x.compute_capability: expected a value such as "9.0", got 9.0',
        ),
        (
            {"expect": {"cards": {"x": {"compute_capability": "9.0", "sms": 0}}}},
            "expect.cards.x.sms: expected a whole number above zero, got 0",
        ),
        ({"expect": {"cards": {"x": {"compute_capability": "9.0", "sm": 1}}}}, "expect.cards.x.sm: unknown key"),
        ({"nonce": "short"}, "nonce: expected 32 lower-case hexadecimal digits"),
        ({"level": "deep"}, "level: expected one of quick, standard, full, got 'deep'"),
        ({"level": ["quick"]}, "level: expected one of quick, standard, full, got ['quick']"),
        ({"device": "tpu"}, "device: expected one of cpu, cuda, got 'tpu'"),
        ({"probes": ["a", "x"]}, "probes: unknown probe 'x'"),
        ({"probes": "a"}, "probes: expected a list of names, got 'a'"),
        ({"require": ["y"]}, "require: unknown probe 'y'"),
        ({"require": None}, "require: expected a list of names, got None"),
        ({"expect": {"torch": "2"}}, "expect.torch: unknown key"),
        ({"expect": {"distributions": {"torch": 2}}}, "expect.distributions.torch: expected a string, got 2"),
        ({"expect": {"python": 3.11}}, "expect.python: expected a string, got 3.11"),
        ({"expect": {"gpu_count": 0}}, "expect.gpu_count: expected a whole number above zero, got 0"),
        (
            {"expect": {"transport": "pcie"}},
            "expect.transport: expected one of p2p, nvls, shm, ib, net, socket, got 'pcie'",
        ),
        ({"expect": {"driver": {"gpu": "580"}}}, "expect.driver.gpu: unknown key"),
        ({"expect": {"driver": {"cuda": "5x"}}}, "expect.driver.cuda: expected numbers and dots, got '5x'"),
        ({"settings": {"tf32": True}}, "settings.tf32: unknown key"),
        ({"settings": {"allow_tf32": 1}}, "settings.allow_tf32: expected true or false, got 1"),
        ({"timeouts": {"a": 0}}, "timeouts.a: expected seconds above zero, got 0"),
        ({"timeouts": {"a": float("nan")}}, "timeouts.a: expected seconds above zero, got nan"),
        ({"timeouts": {"x": 1}}, "timeouts.x: unknown key"),
        ({"floors": {"speed": 1}}, "floors.speed: unknown key"),
        ({"floors": {"gemm": 0}}, "floors.gemm: expected a number above zero, got 0"),
        ({"expect": {"datasheets": {"X": {"int4": 1}}}}, "expect.datasheets.X.int4: unknown key"),
        ({"expect": {"datasheets": ["X"]}}, "expect.datasheets: expected a mapping, got ['X']"),
        ({"timeouts": [1]}, "timeouts: expected a mapping, got [1]"),
        ({"threads": 0}, "threads: expected a whole number above zero, got 0"),
        ({"memory_mb": True}, "memory_mb: expected a whole number above zero, got True"),
        ({"own": []}, "own: expected a mapping with shapes and script"),
        ({"own": {"more": 1}}, "own: expected a mapping with shapes and script"),
        ({"own": {"shapes": {}}}, "own.shapes: expected a list"),
        (
            {"own": {"shapes": [{"heads": 1}]}},
            "own.shapes[0]: expected a mapping with heads, length, depth, dtype and causal",
        ),
        (
            {"own": {"shapes": [{**HEADS, "heads": 0}]}},
            "own.shapes[0]: heads, length and depth must be whole numbers above zero",
        ),
        ({"own": {"shapes": [{**HEADS, "dtype": "fp64"}]}}, f"own.shapes[0]: {ATTENTION_WORDS}"),
        ({"own": {"shapes": [{**HEADS, "dtype": []}]}}, f"own.shapes[0]: {ATTENTION_WORDS}"),
        ({"own": {"shapes": [{**HEADS, "causal": 1}]}}, f"own.shapes[0]: {ATTENTION_WORDS}"),
        ({"own": {"shapes": [SHAPE, 5]}}, "own.shapes[1]: expected a mapping with m, k, n, dtype, layout and bias"),
        ({"own": {"shapes": [{**SHAPE, "m": 0}]}}, "own.shapes[0]: m, k and n must be whole numbers above zero"),
        ({"own": {"shapes": [{**SHAPE, "k": True}]}}, "own.shapes[0]: m, k and n must be whole numbers above zero"),
        ({"own": {"shapes": [{**SHAPE, "dtype": "int8"}]}}, f"own.shapes[0]: {WORDS}"),
        ({"own": {"shapes": [{**SHAPE, "dtype": []}]}}, f"own.shapes[0]: {WORDS}"),
        ({"own": {"shapes": [{**SHAPE, "layout": "no"}]}}, f"own.shapes[0]: {WORDS}"),
        ({"own": {"shapes": [{**SHAPE, "bias": 1}]}}, f"own.shapes[0]: {WORDS}"),
        ({"own": {"script": "print()"}}, "own.script.name: expected the name of a .py file"),
        ({"own": {"script": {**SCRIPT, "name": "../a.py"}}}, "own.script.name: expected the name of a .py file"),
        (
            {"own": {"script": {**SCRIPT, "text": None}}},
            "own.script.text: expected source code of at most 262144 characters",
        ),
        (
            {"own": {"script": {**SCRIPT, "text": "#" * 262145}}},
            "own.script.text: expected source code of at most 262144 characters",
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
