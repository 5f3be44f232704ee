"""fingerprint: every operation of a chain against float64, in a document for comparison with other machines.

Each operation runs in two passes; operations on integers run in the first one only. Teacher-forced: its input is
golden, which is the exact output of the previous operation, rounded to the dtype. Its error is therefore only its own.
Free-running: its input is the actual output of the previous operation. Its result is checked against the exact result
for that input. "drift" is the distance of this result from the golden output, which shows how errors grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable

import torch

from envbuild.selftest.harness.probe_context import Context, dtype_name, is_unsupported, short_name
from envbuild.selftest.numerics import fingerprint_document, fingerprint_integer_operations, fingerprint_operation_chain
from envbuild.selftest.numerics.fingerprint_operation_chain import Op
from envbuild.selftest.numerics.float64_reference_operations import Arithmetic
from envbuild.selftest.numerics.output_statistics import judged, not_finite, output_fault, relative_error
from envbuild.selftest.numerics.reference_products import one_thread
from envbuild.selftest.numerics.tensor_digests import raw_digest

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PASSES = {"teacher": "teacher-forced", "free": "free-running"}
_ATTENTION = {0: ":math", 1: ":flash", 2: ":efficient", 3: ":cudnn"}

Entry = dict[str, Any]


def fingerprint(context: Context) -> None:
    """fingerprint: a small video model's operations against float64, as a document for comparing machines."""
    with one_thread():  # so that results on the CPU do not depend on the number of processors
        ops = [*_integers(context), *(entry for dtype in DTYPES for entry in run_chain(context, dtype))]
        made = fingerprint_document.document(fingerprint_document.OPERATIONS, _inputs(), context.device, ops)
    context.send_fingerprint(made)


def _inputs() -> str:
    """Return the sha256 of all inputs and weights. Only fingerprints with equal hashes can be compared."""
    weights = [part for op in fingerprint_operation_chain.operation_chain() for part in op.weights]
    return raw_digest(
        fingerprint_operation_chain.input_video(),
        *weights,
        *(part for op in fingerprint_integer_operations.integer_operations() for part in op.given),
    )


def run_chain(context: Context, dtype: torch.dtype) -> Iterator[Entry]:
    """Run the chain's operations in one dtype, with both passes side by side.

    If an operation has no kernel or gives a wrong shape, the free-running pass continues from its golden output.
    """
    golden = actual = fingerprint_operation_chain.input_video().to(dtype)
    for op in fingerprint_operation_chain.operation_chain():
        entry, rounded, free = _step(context, op, dtype, golden, actual)
        yield entry
        golden, actual = rounded, free.to(dtype) if free.shape == rounded.shape else rounded


def _step(
    context: Context, op: Op, dtype: torch.dtype, golden: torch.Tensor, actual: torch.Tensor
) -> tuple[Entry, torch.Tensor, torch.Tensor]:
    """Run one operation. Return its entry in the document, its golden output, and its output for the input `actual`."""
    how = Arithmetic(dtype, context.job.allow_tf32, half_sums=not context.on_cpu)
    weights = [part.to(dtype) for part in op.weights]
    wide = [part.to(torch.float64) for part in weights]
    expected = op.exact(how, golden.to(torch.float64), *wide)
    rounded = expected.value.to(dtype)
    entry = _entry(context, f"{short_name(dtype)}/{op.name}", rounded, exact=False)
    try:
        if op.name == "sdpa":
            entry["backend"] += _attention(golden.to(context.device))
        forced, forced_seconds = _run(context, entry, "teacher", op.run, (golden, *weights))
        free, free_seconds = _run(context, entry, "free", op.run, (actual, *weights))
    except RuntimeError as error:
        _missing(context, entry, error)
        return entry, rounded, rounded
    own = op.exact(how, actual.to(torch.float64), *wide)
    drift = relative_error(free, rounded) if free.shape == rounded.shape else "inf"
    _note(context, entry, "teacher", judged(forced, 0, expected.value, expected.bound), forced_seconds)
    _note(context, entry, "free", judged(free, not_finite(actual), own.value, own.bound), free_seconds)
    entry["free"]["drift"] = drift
    return entry, rounded, free


def _integers(context: Context) -> Iterator[Entry]:
    for op in fingerprint_integer_operations.integer_operations():
        expected = op.expected.to(torch.float64)
        entry = _entry(context, f"exact/{op.name}", op.expected.to(op.given[-1].dtype), exact=True)
        try:
            got, seconds = _run(context, entry, "teacher", op.run, op.given)
        except RuntimeError as error:
            _missing(context, entry, error)
        else:
            _note(context, entry, "teacher", judged(got, 0, expected, torch.zeros_like(expected)), seconds)
        yield entry


def _entry(context: Context, name: str, golden: torch.Tensor, exact: bool) -> Entry:
    return {
        "id": name,
        "dtype": dtype_name(golden.dtype),
        "shape": list(golden.shape),
        "exact": exact,
        "backend": context.device.type,
        "flags": fingerprint_document.flags(),
        "note": None,
        "golden": raw_digest(golden),
        "teacher": None,
        "free": None,
    }


def _run(
    context: Context, entry: Entry, name: str, run: Callable[..., torch.Tensor], given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """Return the output on the host, and the seconds that the device took."""
    given = [part.to(context.device) for part in given]
    with context.step(f"{entry['id']} {PASSES[name]}") as step:
        got = run(*given)
    return got.cpu(), step.seconds


def _note(context: Context, entry: Entry, name: str, seen: Entry, seconds: float) -> None:
    entry[name] = seen
    case, against = f"{entry['id']} {PASSES[name]}", seen["against"]
    if against:
        error, bound = float(against["error"]), float(against["bound"])
        context.figure(case, getattr(torch, entry["dtype"]), entry["shape"], error, bound, seconds)
    wrong = output_fault(entry, seen)
    if wrong:
        context.fail(wrong[0], f"{case}: {wrong[1]}")


def _missing(context: Context, entry: Entry, error: RuntimeError) -> None:
    if not is_unsupported(error):
        raise error
    context.unsupported(error)
    entry["note"] = str(error).strip().splitlines()[0]


def _attention(x: torch.Tensor) -> str:
    """Return a suffix that names the attention kernel that torch chooses; empty if this torch does not report it."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    return _ATTENTION.get(int(choose(*fingerprint_operation_chain.split_heads(x))), "") if choose else ""
