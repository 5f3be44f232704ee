"""The comparison of two fingerprints: recorded ones, and ones with one changed figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from envbuild.report import fingerprint_comparison
from envbuild.report.fingerprint_comparison import Comparison
from envbuild.util.errors import UsageError
from unit.support import envbuild
from unit.testrun.fingerprints import NEW, OLD, Document, changed, load, model, op


def compared(b: Document, a: Document | None = None) -> Comparison:
    return fingerprint_comparison.compare_fingerprints(model(a or load()), model(b))


def test_one_and_the_same_are_identical() -> None:
    found = compared(load())
    assert (found.verdict, found.first, found.growth, found.notes) == ("identical", None, None, ())
    assert {row.kind for row in found.rows} == {"identical"}


def test_two_versions_of_torch_differ_by_rounding() -> None:
    """Both were recorded on one CPU; see the folder's README."""
    found = compared(load(NEW), load(OLD))
    assert (found.verdict, found.growth) == ("rounding", None)
    assert found.first is not None and (found.first.op, found.first.off) == ("fp32/gelu", frozenset())
    kinds = [row.kind for row in found.rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {"identical": 19, "rounding": 25, None: 15}
    apart = {
        row.op for row in found.rows for one in row.passes if one.name == "teacher-forced" and one.kind != "identical"
    }
    assert apart == {"fp32/layernorm", "fp32/sdpa", "fp32/softmax", "bf16/sdpa"}
    (note,) = found.notes
    assert note.startswith("a: 15 operations were not run or have no reference; the first: exact/linear.fp16: ")


def out_of_bound(name: str, which: str, **figures: object) -> Callable[[Document], None]:
    """Change the result of the operation in one pass; by default, change one element by a thousand times its bound."""

    def change(document: Document) -> None:
        seen = op(document, name)[which]
        seen["sha256"] = "0" * 64
        seen["against"].update({"ratio": 1000.0, "wrong": 1, "error": 0.1, "bound": 1e-4, "got": 1.1, **figures})

    return change


MANY = {"wrong": 20000, "count": 32768, "ratio": 40.0, "median": 3.0, "relative": 0.002}


@pytest.mark.parametrize(
    ("figures", "kind", "words"),
    [
        ({}, "breakage", "element ["),
        ({"got": "nan", "ratio": "inf", "relative": "nan"}, "breakage", "] is nan, should be "),
        ({**MANY}, "precision", "as if computed with about 8 bits"),
        ({**MANY, "relative": 2.0**-12.2}, "precision", "as if computed with about 11 bits"),
        ({**MANY, "wrong": 100}, "precision", "many elements have small errors"),
        ({**MANY, "wrong": 100, "ratio": 400.0}, "breakage", "(100 of 32768 wrong)"),
        ({**MANY, "relative": 0.5}, "breakage", "(20000 of 32768 wrong)"),
        ({**MANY, "relative": 0.0}, "breakage", "wrong)"),
        ({**MANY, "ratio": "inf"}, "breakage", "wrong)"),
    ],
)
def test_rounding_precision_and_breakage_are_distinguished(figures: Document, kind: str, words: str) -> None:
    found = compared(changed(out_of_bound("fp32/linear.up", "teacher", **figures)))
    assert found.first is not None
    assert (found.verdict, found.first.op, found.first.name) == (kind, "fp32/linear.up", "teacher-forced")
    assert (set(found.first.off), found.first.a.reason) == ({"b"}, None)
    assert words in str(found.first.b.reason)


def test_the_first_is_the_first_beyond_rounding_and_the_verdict_the_worst() -> None:
    def change(document: Document) -> None:
        out_of_bound("bf16/sdpa", "teacher")(document)
        out_of_bound("fp16/conv3d", "teacher", **MANY)(document)

    found = compared(changed(change), load(OLD))
    assert found.first is not None
    assert (found.verdict, found.first.op, found.first.kind) == ("breakage", "bf16/sdpa", "breakage")
    found = compared(changed(change))
    assert found.first is not None
    assert (found.verdict, found.first.op, found.first.kind) == ("breakage", "fp16/conv3d", "precision")


def test_a_fault_in_both_is_reported_for_both() -> None:
    spoiled = changed(out_of_bound("fp16/mean", "teacher"))
    found = compared(spoiled, spoiled)
    assert found.first is not None
    assert (found.verdict, set(found.first.off)) == ("breakage", {"a", "b"})


def test_an_error_on_golden_input_too_is_not_growth() -> None:
    def change(document: Document) -> None:
        out_of_bound("fp32/softmax", "teacher")(document)
        out_of_bound("fp32/softmax", "free")(document)
        out_of_bound("fp32/mean", "free")(document)

    found = compared(changed(change))
    assert found.growth is not None and found.first is not None
    assert (found.growth.op, found.growth.name, set(found.growth.off)) == ("fp32/mean", "free-running", {"b"})
    assert (found.first.op, found.first.name) == ("fp32/softmax", "teacher-forced")


@pytest.mark.parametrize("form", [{"dtype": "float32"}, {"shape": [1]}])
def test_an_output_of_another_form_is_breakage(form: Document) -> None:
    found = compared(changed(lambda d: op(d, "fp16/gelu")["teacher"].update(form)))
    assert found.first is not None
    assert (found.verdict, found.first.op) == ("breakage", "fp16/gelu")
    assert "should be float16 [4, 128, 8, 8]" in str(found.first.b.reason)


def test_exact_operations_must_have_equal_hashes() -> None:
    found = compared(changed(lambda d: op(d, "exact/sort")["teacher"].update(sha256="0" * 64)))
    assert found.first is not None and (found.verdict, found.first.op) == ("breakage", "exact/sort")


def test_bounded_operations_need_no_equal_hashes() -> None:
    found = compared(changed(lambda d: op(d, "bf16/sdpa")["teacher"].update(sha256="0" * 64)))
    assert found.first is not None and (found.verdict, found.first.kind) == ("rounding", "rounding")


def test_flags_and_golden_values_that_differ_are_noted() -> None:
    def change(document: Document) -> None:
        op(document, "fp32/linear.up")["flags"] = ["tf32.matmul"]
        op(document, "fp32/mean")["golden"] = "0" * 64

    notes = compared(changed(change)).notes
    assert notes[0] == "enabled only in b: tf32.matmul"
    assert notes[1].startswith("from fp32/mean on, the float64 results of the two hosts differ")


# models without a reference


def as_model(change: Callable[[Document], object] = lambda document: None) -> Document:
    """Return a document of a model's modules, without references."""

    def strip(document: Document) -> None:
        document["subject"] = "model"
        document["ops"] = [item for item in document["ops"] if item["id"].startswith("fp32/")]
        for item in document["ops"]:
            item["teacher"] = None
            item["free"].update(against=None, samples=[0.5, -1.0, 0.25, 1.0], rms=1.0, peak=2.0)
        change(document)

    return changed(strip)


def samples(*values: float, **more: object) -> Callable[[Document], None]:
    return lambda d: op(d, "fp32/linear.up")["free"].update(sha256="0" * 64, samples=list(values), **more)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (samples(0.5, -1.0, 0.25, 1.0), "rounding"),
        (samples(0.50001, -1.00001, 0.25001, 0.99999), "rounding"),
        (samples(0.502, -1.003, 0.251, 0.997), "precision"),
        (samples(0.52, -1.03, 0.26, 0.97), "breakage"),
        (samples(0.5, -1.0, 0.25, 1.01), "breakage"),
        (samples(0.5, -1.0, 0.25, 1.0, peak=2.1), "breakage"),
        (samples(0.5, -1.0, 0.25, 1.0, rms=1.01), "breakage"),
        (samples(0.5, -1.0, 0.25, 1.0, nonfinite=1), "breakage"),
        (samples(0.5, -1.0, 0.25), "breakage"),
        (samples(), "breakage"),
        (samples(9.0, 9.0, 9.0, 9.0, fed=1, nonfinite=5), "rounding"),
        (samples(0.52, -1.03, 0.26, 0.97, dtype="bfloat16"), "breakage"),
    ],
)
def test_half_of_the_bits_must_agree_without_a_reference(change: Callable[[Document], None], kind: str) -> None:
    found = compared(as_model(change), as_model())
    assert found.first is not None
    assert (found.verdict, found.first.op) == (kind, "fp32/linear.up")
    assert (
        found.notes[-1]
        == "some outputs have no reference: their samples and magnitudes are compared; half of the bits must agree"
    )


def test_a_models_other_dtype_and_inputs_are_noted() -> None:
    def change(document: Document) -> None:
        document["inputs"] = "0" * 64
        item = op(document, "fp32/linear.up")
        item["dtype"] = "bfloat16"
        samples(0.52, -1.03, 0.26, 0.97, dtype="bfloat16")(document)

    found = compared(as_model(change), as_model())
    assert found.verdict == "rounding"
    assert found.notes[0].startswith("the inputs are not bitwise equal")
    assert "different dtypes: float32 in fingerprint a but bfloat16 in fingerprint b" in found.notes


# what cannot be compared


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(inputs="0" * 64), "recorded on different inputs"),
        (lambda d: d["ops"].pop(), "the first has 59 operations, the second 58"),
        (lambda d: d["ops"].reverse(), "operation 0 is exact/linear.fp32 in the first and bf16/sum in the second"),
        (
            lambda d: d["ops"][0].update(shape=[1]),
            r"exact/linear.fp32 has the shape \[67, 83\] in the first and \[1\] in the second",
        ),
        (
            lambda d: d["ops"][0].update(exact=not d["ops"][0]["exact"]),
            "exact/linear.fp32 is an exact operation in only one of the fingerprints",
        ),
        (lambda d: d.update(subject="model"), "the first fingerprint is of operations, the second of model"),
        (lambda d: [item.update(teacher=None, free=None) for item in d["ops"]], "no operation is in both fingerprints"),
    ],
)
def test_fingerprints_of_different_operations_are_refused(change: Callable[[Document], object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        compared(changed(change))
    assert caught.value.hint


# the command


def test_diff_prints_the_verdict_and_exits_with_0(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(changed(out_of_bound("fp16/linear.up", "teacher"))), encoding="utf-8")
    done = envbuild("diff", str(NEW), str(wrong))
    assert (done.code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "a: AMD EPYC AVX512, torch 2.13.0+cpu"
    assert lines[2] == "verdict: breakage"
    assert lines[3].startswith("first: fp16/linear.up, teacher-forced: breakage, ")
    assert lines[4] == "  a: within its tolerance"
    assert lines[5].startswith("  b: element [")
    assert lines[-1] == "59 operations, 58 identical, 1 breakage"
    assert envbuild("diff", str(OLD), str(NEW)).stdout.splitlines()[-1] == (
        "59 operations, 19 identical, 25 rounding, 15 not compared"
    )


def test_the_document_has_all_of_it(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    change = out_of_bound("fp16/linear.up", "free", got="nan", ratio="inf", relative="nan")
    wrong.write_text(json.dumps(changed(change)), encoding="utf-8")
    found = envbuild("diff", str(NEW), str(wrong), "--json").document
    assert (found["state"], found["first"]["operation"], found["growth"]["operation"]) == (
        "breakage",
        *["fp16/linear.up"] * 2,
    )
    assert (found["first"]["pass_name"], found["first"]["b"]["ratio"]) == ("free-running", "inf")
    assert found["a"]["machine"]["torch"] == "2.13.0+cpu" and found["b"]["file"] == str(wrong)
    assert len(found["operations"]) == 59
    assert {len(row["passes"]) for row in found["operations"]} == {1, 2}
    assert envbuild("diff", str(NEW), str(NEW), "--json").document["first"] is None


def test_an_invalid_file_exits_with_3_and_incompatible_files_with_2(tmp_path: Path) -> None:
    bad, other = tmp_path / "bad.json", tmp_path / "other.json"
    bad.write_text('{"version": 1}\n', encoding="utf-8")
    other.write_text(json.dumps(changed(lambda d: d["ops"].pop())), encoding="utf-8")
    done = envbuild("diff", str(NEW), str(bad))
    assert (done.code, done.stdout) == (3, "")
    assert f"{bad}:1: inputs: Field required" in done.stderr
    assert envbuild("diff", str(tmp_path / "none.json"), str(NEW)).code == 3
    assert envbuild("diff", str(NEW), str(other)).code == 2
    assert envbuild("diff", str(NEW)).code == 2
