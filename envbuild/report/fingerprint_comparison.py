"""Compares two fingerprints, operation by operation: where they first differ, by how much, and whether rounding
explains the difference. Pure.

Outputs with equal hashes are identical. For an exact operation, different hashes are `breakage`. Any other output is
compared with the float64 reference and bound of its own fingerprint, which shows which of the two outputs is wrong. An
output outside its bound is `precision` if many elements have small errors, as after computing with fewer bits, and
`breakage` otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from envbuild.testrun.fingerprint_reader import Fingerprint, FingerprintMachine, FingerprintOp, Observed
from envbuild.util.errors import UsageError
from envbuild.util.json_output_types import Measured

Verdict = Literal["identical", "rounding", "precision", "breakage"]
KINDS: tuple[Verdict, ...] = get_args(Verdict)
IDENTICAL: Verdict = "identical"
ROUNDING: Verdict = "rounding"
PRECISION: Verdict = "precision"
BREAKAGE: Verdict = "breakage"
TEACHER, FREE = "teacher-forced", "free-running"

# After computing with fewer bits, many elements are outside their bound. Or the bound is barely exceeded, but then all
# errors are a similar fraction of it: among 10^5 normally distributed errors, the largest is 7 times the median. A
# bfloat16 result has a relative error of 2^-8; 2^-6 allows for a few successive roundings.
_MANY, _SAME, _LOWEST = 1 / 16, 32, 2.0**-6
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_HINT = "compare fingerprints of the same operations from one envbuild version, or of one model on the same inputs"


@dataclass(frozen=True)
class FingerprintSide:
    """The result for one fingerprint in one pass of an operation. `ratio`: the largest ratio of error to bound (None
    without a reference); `relative`: the relative error; `drift`: the distance from the golden output; `reason`: set if
    the result is worse than rounding."""

    kind: Verdict
    ratio: float | None
    relative: float | None
    drift: float | None
    reason: str | None


@dataclass(frozen=True)
class Pass:
    """The two results for one pass of an operation. `apart`: the relative distance of the two outputs, estimated from
    the recorded samples and statistics."""

    op: str
    name: str
    kind: Verdict
    a: FingerprintSide
    b: FingerprintSide
    apart: float

    @property
    def sides(self) -> Mapping[str, FingerprintSide]:
        return {"a": self.a, "b": self.b}

    @property
    def off(self) -> frozenset[str]:
        """The sides that are worse than rounding."""
        return frozenset(name for name, side in self.sides.items() if side.reason)


@dataclass(frozen=True)
class ComparedOperation:
    """An operation, and the passes that both fingerprints recorded."""

    op: str
    passes: tuple[Pass, ...]

    @property
    def kind(self) -> Verdict | None:
        """The worst kind of the operation's passes; None if no pass can be compared."""
        return max((found.kind for found in self.passes), key=KINDS.index, default=None)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. `verdict`: the worst kind of all passes. `first`: the first difference beyond
    rounding, or, without such a difference, the first one. `growth`: the first operation that is correct on golden
    input and wrong in the free-running pass, where its input is the output of the operations before it; None without
    such an operation."""

    verdict: Verdict
    first: Pass | None
    growth: Pass | None
    rows: tuple[ComparedOperation, ...]
    notes: tuple[str, ...]


def compare_fingerprints(a: Fingerprint, b: Fingerprint) -> Comparison:
    """Compare two fingerprints. Raises UsageError if they were recorded from different operations or inputs."""
    _comparable(a, b)
    rows = tuple(_row(*ops) for ops in zip(a.ops, b.ops, strict=True))
    passes = [found for row in rows for found in row.passes]
    if not passes:
        raise UsageError("no operation is in both fingerprints", hint=_HINT)
    differing = [found for found in passes if found.kind != IDENTICAL]
    first = next((found for found in differing if found.kind != ROUNDING), next(iter(differing), None))
    verdict = max((found.kind for found in passes), key=KINDS.index)
    return Comparison(verdict, first, _growth(rows), rows, tuple(_notes(a, b)))


def _comparable(a: Fingerprint, b: Fingerprint) -> None:
    if a.subject != b.subject:
        raise UsageError(f"the first fingerprint is of {a.subject}, the second of {b.subject}", hint=_HINT)
    if a.subject == "model" and len(a.ops) != len(b.ops):
        what = f"{len(a.ops)} and {len(b.ops)} outputs of modules"
        raise UsageError(f"the fingerprints are of different models: {what}", hint=_HINT)
    for index, (one, other) in enumerate(zip(a.ops, b.ops, strict=False)):
        if one.id != other.id:
            raise UsageError(f"operation {index} is {one.id} in the first and {other.id} in the second", hint=_HINT)
        if one.shape != other.shape:
            raise UsageError(
                f"{one.id} has the shape {one.shape} in the first and {other.shape} in the second", hint=_HINT
            )
        if one.exact != other.exact:
            raise UsageError(f"{one.id} is an exact operation in only one of the fingerprints", hint=_HINT)
    if len(a.ops) != len(b.ops):
        raise UsageError(f"the first has {len(a.ops)} operations, the second {len(b.ops)}", hint=_HINT)
    if a.subject == "operations" and a.inputs != b.inputs:
        raise UsageError("the fingerprints were recorded on different inputs", hint=_HINT)


def _row(a: FingerprintOp, b: FingerprintOp) -> ComparedOperation:
    pairs = ((TEACHER, a.teacher, b.teacher), (FREE, a.free, b.free))
    return ComparedOperation(a.id, tuple(_pass(name, a, b, one, other) for name, one, other in pairs if one and other))


def _pass(name: str, op_a: FingerprintOp, op_b: FingerprintOp, a: Observed, b: Observed) -> Pass:
    side_a, side_b, apart = _side(op_a, a), _side(op_b, b), _apart(a, b)
    kind = max(side_a.kind, side_b.kind, key=KINDS.index)
    if kind == ROUNDING:
        kind = IDENTICAL if a.sha256 == b.sha256 else _together(op_a, a, b, apart)
    return Pass(op_a.id, name, kind, side_a, side_b, apart)


def _together(op: FingerprintOp, a: Observed, b: Observed, apart: float) -> Verdict:
    """Compare two outputs that are both not worse than rounding. If one of them has no reference, half of the bits of
    the coarser dtype must agree. If they do not, a large median difference of the samples indicates a lower
    precision."""
    if op.exact:
        return BREAKAGE
    if (a.against and b.against) or a.fed or b.fed:
        return ROUNDING
    bits = min(_BITS.get(seen.dtype, 8) for seen in (a, b))
    if apart <= 2.0 ** (-bits / 2):
        return ROUNDING
    if apart > _LOWEST or not a.samples:
        return BREAKAGE
    middle = statistics.median(abs(x - y) for x, y in zip(a.samples, b.samples, strict=True))
    return PRECISION if _SAME * middle >= apart * max(a.rms, b.rms) else BREAKAGE


def _side(op: FingerprintOp, seen: Observed) -> FingerprintSide:
    kind, reason = _judged(op, seen)
    ratio, relative = (seen.against.ratio, seen.against.relative) if seen.against else (None, None)
    return FingerprintSide(kind, ratio, relative, seen.drift, reason)


def _judged(op: FingerprintOp, seen: Observed) -> tuple[Verdict, str | None]:
    """Judge one output by its own reference. Return its kind, and, if it is worse than rounding, the reason."""
    if (seen.dtype, seen.shape) != (op.dtype, op.shape):
        return BREAKAGE, f"the output is {seen.dtype} {seen.shape}, should be {op.dtype} {op.shape}"
    found = seen.against
    if found is None and seen.nonfinite and not seen.fed:
        return BREAKAGE, f"{seen.nonfinite} values are not finite, although the inputs are"
    if found and not found.wrong and found.nonfinite and not seen.fed:
        words = "values are not finite, also in float64, although the inputs are finite: check the weights"
        return BREAKAGE, f"{found.nonfinite} {words}"
    if found is None or not found.wrong:
        return ROUNDING, None
    text = (
        f"element {found.where} is {found.got:g}, should be {found.expected:g} within {found.bound:g} "
        f"({found.wrong} of {found.count} wrong)"
    )
    spread = found.wrong >= _MANY * found.count or found.ratio <= _SAME * found.median
    if op.exact or not (spread and math.isfinite(found.ratio) and 0 < found.relative <= _LOWEST):
        return BREAKAGE, text
    # rounding to p bits causes a root mean square error of about 2^-(p + 1.2)
    bits = round(-math.log2(found.relative) - 1.2)
    return PRECISION, f"many elements have small errors, as if computed with about {bits} bits: {text}"


def _not_finite(op: FingerprintOp) -> bool:
    """Whether a pass with finite inputs has nonfinite outputs. Minus infinity in an input, as from a mask, counts as
    finite."""
    passes = [seen for seen in (op.teacher, op.free) if seen and not seen.fed]
    return any(seen.against.nonfinite if seen.against else seen.nonfinite for seen in passes)


def _apart(a: Observed, b: Observed) -> float:
    """Return the largest of three relative distances: of the samples, the root mean squares, and the largest values."""
    if list(map(math.isfinite, a.samples)) != list(map(math.isfinite, b.samples)):
        return math.inf
    pairs = [(x, y) for x, y in zip(a.samples, b.samples, strict=True) if math.isfinite(x)]
    samples = math.dist(*zip(*pairs, strict=True)) / math.sqrt(len(pairs)) if pairs else 0.0
    size, peak = max(a.rms, b.rms), max(a.peak, b.peak)
    found = ((samples, size), (abs(a.rms - b.rms), size), (abs(a.peak - b.peak), peak))
    return max(distance / whole if whole else math.inf if distance else 0.0 for distance, whole in found)


def _growth(rows: Sequence[ComparedOperation]) -> Pass | None:
    for row in rows:
        passes = {found.name: found for found in row.passes}
        if len(passes) == 2 and passes[FREE].off - passes[TEACHER].off:
            return passes[FREE]
    return None


def _notes(a: Fingerprint, b: Fingerprint) -> Iterator[str]:
    """Yield the notes that a reader needs to interpret the result."""
    if a.inputs != b.inputs:
        yield "the inputs are not bitwise equal, as always if the two models use different dtypes"
    for name, one, other in (("a", a, b), ("b", b, a)):
        flags = {flag for op in one.ops for flag in op.flags} - {flag for op in other.ops for flag in op.flags}
        if flags:
            yield f"enabled only in {name}: {', '.join(sorted(flags))}"
        noted = [f"{op.id}: {op.note}" for op in one.ops if op.note]
        if noted:
            yield f"{name}: {len(noted)} operations were not run or have no reference; the first: {noted[0]}"
    pairs = list(zip(a.ops, b.ops, strict=True))
    dtypes = {
        f"{one.dtype} in fingerprint a but {other.dtype} in fingerprint b"
        for one, other in pairs
        if one.dtype != other.dtype
    }
    if dtypes:
        yield f"different dtypes: {', '.join(sorted(dtypes))}"
    unsound = [one.id for one, other in pairs if _not_finite(one) and _not_finite(other)]
    if unsound:
        yield f"not finite in both, from finite inputs, so both have the same cause; the first: {unsound[0]}"
    golden = [one.id for one, other in pairs if one.golden != other.golden]
    if golden:
        yield (
            f"from {golden[0]} on, the float64 results of the two hosts differ; each side is compared with the result "
            "of its own host"
        )
    if any(seen and not seen.against for op in (*a.ops, *b.ops) for seen in (op.teacher, op.free)):
        yield "some outputs have no reference: their samples and magnitudes are compared; half of the bits must agree"


def machine_line(found: FingerprintMachine) -> str:
    """Describe the recorded machine in one line: `NVIDIA H20, torch 2.7.1, cublas 12.6.4, cudnn 9.5.1`."""
    device = found.gpu.name if found.gpu else " ".join(filter(None, (found.cpu, found.cpu_capability)))
    libraries = (f"{name} {found.libraries[name]}" for name in ("cublas", "cudnn") if name in found.libraries)
    return ", ".join([device or "a CPU", f"torch {found.torch}", *libraries])


@dataclass(frozen=True)
class SideOfPass:
    """One fingerprint's result, as in FingerprintSide."""

    kind: Verdict
    ratio: Measured | None
    relative: Measured | None
    drift: Measured | None
    reason: str | None


@dataclass(frozen=True)
class PassRow:
    """The two results for one pass of an operation. `pass_name`: teacher-forced or free-running; `distance`: the
    relative distance of the two outputs."""

    operation: str
    pass_name: str
    kind: Verdict
    distance: Measured
    a: SideOfPass
    b: SideOfPass


@dataclass(frozen=True)
class OperationRow:
    """An operation. `kind`: the worst kind of its passes; None if no pass can be compared."""

    operation: str
    kind: Verdict | None
    passes: tuple[PassRow, ...]


@dataclass(frozen=True)
class FingerprintRow:
    file: str
    machine: FingerprintMachine


@dataclass(frozen=True)
class FingerprintDiffDocument:
    """The document of `diff` for two fingerprints. `first`: the first difference beyond rounding, or, without such a
    difference, the first one. `growth`: the first operation that is correct on golden input, but wrong on the output
    of the operations before it."""

    state: Verdict
    a: FingerprintRow
    b: FingerprintRow
    first: PassRow | None
    growth: PassRow | None
    operations: tuple[OperationRow, ...]
    notes: tuple[str, ...]


def document(found: Comparison, a: FingerprintRow, b: FingerprintRow) -> FingerprintDiffDocument:
    return FingerprintDiffDocument(
        state=found.verdict,
        a=a,
        b=b,
        first=_pass_row(found.first) if found.first else None,
        growth=_pass_row(found.growth) if found.growth else None,
        operations=operation_rows(found),
        notes=found.notes,
    )


def operation_rows(found: Comparison) -> tuple[OperationRow, ...]:
    return tuple(OperationRow(row.op, row.kind, tuple(map(_pass_row, row.passes))) for row in found.rows)


def _pass_row(found: Pass) -> PassRow:
    a, b = SideOfPass(**vars(found.a)), SideOfPass(**vars(found.b))
    return PassRow(found.op, found.name, found.kind, found.apart, a, b)
