"""Fingerprints of right and of wrong kernels, and comparisons of fingerprints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.report import fingerprint_comparison
from envbuild.report.fingerprint_comparison import Comparison
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import fingerprint_document, float64_reference_operations, reference_products
from envbuild.selftest.numerics.output_statistics import first_fault
from envbuild.selftest.numerics.tensor_digests import raw_digest
from envbuild.selftest.probes.operations import fingerprint
from envbuild.testrun.fingerprint_reader import Fingerprint
from selftest.reading import NONCE, Frame, job, outcomes, run
from selftest.seeds.making import tf32, wrong_element
from selftest.seeds.products import half_accumulation

GOLDEN = Path(__file__).parents[3] / "golden" / "fingerprints"
SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
SDPA = "scaled_dot_product_attention"

Kernel = Callable[..., torch.Tensor]
Wrong = Callable[[Kernel], Kernel]


def whole(context: Context) -> Frame:
    sent: list[Any] = []
    context.send_fingerprint = sent.append
    fingerprint.fingerprint(context)
    (document,) = sent
    return json.loads(json.dumps(document, allow_nan=False))  # type: ignore[no-any-return]


def chain(dtype: torch.dtype) -> Frame:
    """Return the document of a chain. A product for its references is computed once: products of equal inputs take most
    of the time, and no kernel under test computes them."""
    context = Context(JobDocument(NONCE))
    with reference_products.one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(float64_reference_operations, "product", known_product)
        ops = list(fingerprint.run_chain(context, dtype))
    return fingerprint_document.document(fingerprint_document.OPERATIONS, "0" * 64, context.device, ops)


PRODUCTS: dict[tuple[object, ...], torch.Tensor] = {}


def known_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    key = tuple((part.dtype, part.shape, raw_digest(part)) for part in (a, b))
    if key not in PRODUCTS:
        PRODUCTS[key] = reference_products.product(a, b)
    return PRODUCTS[key].clone()


def compared(a: Frame, b: Frame) -> Comparison:
    return fingerprint_comparison.compare_fingerprints(Fingerprint.model_validate(a), Fingerprint.model_validate(b))


@pytest.fixture(scope="module")
def right() -> Frame:
    context = Context(JobDocument(NONCE))
    document = whole(context)
    assert context.faults == []
    return document


@pytest.fixture(scope="module")
def chains() -> dict[torch.dtype, Frame]:
    return {dtype: chain(dtype) for dtype in fingerprint.DTYPES}


@pytest.mark.slow
def test_right_kernels_are_right_in_both_passes(right: Frame) -> None:
    Fingerprint.model_validate(right)
    assert first_fault(right["ops"]) is None
    names = [op["id"] for op in right["ops"]]
    assert len(names) == len(set(names)) > 50
    for op in right["ops"]:
        assert op["note"] is None
        assert op["teacher"]["against"]["wrong"] == 0
        assert (op["free"] is None) == op["exact"] == op["id"].startswith("exact/")
        count = sum(op["teacher"]["against"]["ulps"].values())
        assert count == op["teacher"]["against"]["count"] == torch.Size(op["shape"]).numel()


def test_it_is_small_enough_to_commit(right: Frame, tmp_path: Path) -> None:
    fingerprint_document.write(right, tmp_path / "cpu.json")
    assert (tmp_path / "cpu.json").stat().st_size < 200_000


@pytest.mark.slow
def test_a_second_fingerprint_is_the_same_with_any_number_of_threads(right: Frame) -> None:
    assert whole(Context(JobDocument(NONCE, threads=1))) == right
    assert compared(right, right).verdict == "identical"


def test_the_sequence_is_that_of_the_committed_ones(right: Frame) -> None:
    """A change of the sequence requires a new version of the format, because users have fingerprints in files."""
    for file in sorted(GOLDEN.glob("*.json")):
        committed = json.loads(file.read_text(encoding="utf-8"))
        assert committed["inputs"] == right["inputs"]
        assert [op["id"] for op in committed["ops"]] == [op["id"] for op in right["ops"]]


@pytest.mark.slow
def test_errors_grow_from_operation_to_operation(chains: dict[torch.dtype, Frame]) -> None:
    for dtype, document in chains.items():
        drifts = [op["free"]["drift"] for op in document["ops"]]
        assert 0 < drifts[0] < 2 * torch.finfo(dtype).eps  # on the CPU, 1.3 times eps was observed for float32
        assert max(drifts) > 3 * drifts[0]


# wrong kernels: the operation, and the kind of the difference


def computed_in(dtype: torch.dtype) -> Wrong:
    """Round inputs and result to a lower precision, as an unrequested autocast would."""

    def wrong(kernel: Kernel) -> Kernel:
        return lambda *given: kernel(*(part.to(dtype) for part in given)).to(given[0].dtype)

    return wrong


def element(where: tuple[int, ...], dtype: torch.dtype, by: float) -> Wrong:
    return lambda kernel: wrong_element(kernel, dtype, where, by)


def wrong_row(kernel: Kernel) -> Kernel:
    def seeded(x: torch.Tensor, dim: int) -> torch.Tensor:
        result = kernel(x, dim=dim).clone()
        result[0, 3] = result[0, 4]
        return result

    return seeded


def half_rounded(kernel: Kernel) -> Kernel:
    """Layer normalisation with every step rounded to the dtype."""

    def seeded(x: torch.Tensor, _: Any, w: torch.Tensor, b: torch.Tensor, epsilon: float) -> torch.Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred * torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + epsilon) * w + b

    return seeded


def wider(kernel: Kernel) -> Kernel:
    return lambda *given, **options: kernel(*given, **options).float()


def stale(kernel: Kernel) -> Kernel:
    """Return the previous output of the same shape."""
    last: dict[torch.Size, torch.Tensor] = {}

    def seeded(*given: torch.Tensor) -> torch.Tensor:
        result = kernel(*given)
        before = last.get(result.shape, result)
        last[result.shape] = result
        return before

    return seeded


def batched(wrong: Wrong) -> Wrong:
    """Apply a fault that is written for matrices to a batch."""
    return lambda kernel: lambda a, b: wrong(torch.mm)(a[0], b)[None]


def cut_inputs(wrong: Wrong) -> Wrong:
    """Compute Linear in TF32; the bias is added in float32."""
    return lambda kernel: lambda x, w, b: wrong(lambda left, right: kernel(left, right))(x.contiguous(), w) + b


SEEDS: dict[str, tuple[torch.dtype, Any, str, Wrong, str, str]] = {
    "one element": (SINGLE, F, "linear", element((0, 7, 500), SINGLE, 0.1), "fp32/linear.up", "breakage"),
    "one element in half": (HALF, F, "linear", element((0, 7, 500), HALF, 0.1), "fp16/linear.up", "breakage"),
    "NaN for one shape": (BRAIN, F, SDPA, element((0, 1, 5, 6), BRAIN, float("nan")), "bf16/sdpa", "breakage"),
    "infinity": (HALF, F, "conv3d", element((0, 31, 3, 2, 1), HALF, float("inf")), "fp16/conv3d", "breakage"),
    "a row": (SINGLE, torch, "softmax", wrong_row, "fp32/softmax", "breakage"),
    "stale": (SINGLE, F, "linear", stale, "fp32/linear.down", "breakage"),
    "another dtype": (HALF, F, "gelu", wider, "fp16/gelu", "breakage"),
    "half accumulation": (HALF, torch, "matmul", batched(half_accumulation), "fp16/matmul.scores", "precision"),
    "TF32": (SINGLE, F, "linear", cut_inputs(tf32), "fp32/linear.qkv", "precision"),
    "bfloat16 for float32": (SINGLE, F, "linear", computed_in(BRAIN), "fp32/linear.qkv", "precision"),
    "bfloat16 for half": (HALF, F, "silu", computed_in(BRAIN), "fp16/silu", "precision"),
    "half-rounded norm": (HALF, F, "layer_norm", half_rounded, "fp16/layernorm", "precision"),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_operation_that_is_wrong_is_named(
    chains: dict[torch.dtype, Frame], monkeypatch: pytest.MonkeyPatch, seed: str
) -> None:
    dtype, module, name, wrong, op, kind = SEEDS[seed]
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    seeded = chain(dtype)
    monkeypatch.undo()
    assert (first_fault(seeded["ops"]) or {})["op"] == op
    found = compared(chains[dtype], seeded)
    assert found.first is not None
    assert (found.verdict, found.first.op, found.first.name) == (kind, op, "teacher-forced")
    assert (found.first.a.reason, found.first.off) == (None, {"b"})
    other = compared(seeded, chains[dtype]).first
    assert other is not None and (other.op, other.off) == (op, {"a"})


def test_lower_precision_is_reported_in_bits(chains: dict[torch.dtype, Frame], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "silu", computed_in(BRAIN)(F.silu))
    found = compared(chains[SINGLE], chain(SINGLE)).first
    assert found is not None and found.b.reason is not None
    assert "as if computed with about 8 bits" in found.b.reason or "as if computed with about 7 bits" in found.b.reason


def test_operations_after_a_nan_are_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, SDPA, element((0, 1, 5, 6), BRAIN, float("nan"))(getattr(F, SDPA)))
    document = chain(BRAIN)
    wrong = [op["id"] for op in document["ops"] if op["free"]["against"]["wrong"]]
    spoiled = [op["id"] for op in document["ops"] if op["free"]["nonfinite"]]
    assert wrong == ["bf16/sdpa"]
    assert spoiled[0] == "bf16/sdpa" and len(spoiled) > 5
    assert all(op["free"]["fed"] for op in document["ops"] if op["id"] in spoiled[1:])


def test_a_fault_of_the_free_running_pass_alone_is_growth(
    chains: dict[torch.dtype, Frame], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is right on golden input, but wrong on the output of the operations before it: the second of the two
    calls."""
    kernel, calls = F.gelu, iter(range(1000))

    def second(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return kernel(x, **options) * (1 + next(calls) % 2 * 0.5)

    monkeypatch.setattr(F, "gelu", second)
    found = compared(chains[SINGLE], chain(SINGLE))
    assert found.growth is not None and found.first is not None
    assert (found.growth.op, found.growth.name, found.growth.off) == ("fp32/gelu", "free-running", {"b"})
    assert (found.verdict, found.first.op) == ("breakage", "fp32/gelu")
    assert compared(chains[SINGLE], chains[SINGLE]).growth is None


@pytest.mark.parametrize(
    ("module", "name", "wrong", "op"),
    [
        (F, "embedding", lambda kernel: lambda keys, table: kernel(keys.roll(1), table), "exact/embedding"),
        (torch, "cumsum", lambda kernel: lambda x, dim: kernel(x.float(), dim=dim).long(), "exact/cumsum"),
        (torch, "sort", lambda kernel: lambda x, stable: kernel(x + x.flip(0) % 2, stable=stable), "exact/sort"),
        (F, "linear", element((66, 82), BRAIN, 1.0), "exact/linear.bf16"),
    ],
)
def test_integers_must_be_equal(
    right: Frame, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wrong: Wrong, op: str
) -> None:
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    monkeypatch.setattr(fingerprint, "DTYPES", ())
    seeded = {**right, "ops": [*whole(Context(JobDocument(NONCE)))["ops"], *right["ops"][8:]]}
    found = compared(right, seeded)
    assert found.first is not None
    assert (found.verdict, found.first.op, found.first.off) == ("breakage", op, {"b"})


def test_an_operation_without_a_kernel_is_noted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> torch.Tensor:
        raise RuntimeError("\"silu_cpu\" not implemented for 'Half'\nmore")

    monkeypatch.setattr(F, "silu", none)
    document = chain(HALF)
    silu, conv = document["ops"][1:3]
    assert (silu["note"], silu["teacher"], silu["free"]) == ("\"silu_cpu\" not implemented for 'Half'", None, None)
    assert conv["free"]["sha256"] == conv["teacher"]["sha256"]
    assert first_fault(document["ops"]) is None


# the probe `fingerprint`, in a separate process


@pytest.mark.slow
def test_it_runs_only_when_asked_for(tmp_path: Path) -> None:
    frames, status, _ = run("asked", job(), tmp_path / "frames")
    assert (status, list(outcomes(frames))) == (0, ["good"])


@pytest.mark.slow
def test_its_document_leaves_as_a_frame_of_a_failed_probe_too(tmp_path: Path) -> None:
    frames, status, _ = run("asked", job(require=["fingerprint", "seeded"]), tmp_path / "frames")
    assert [frame["kind"] for frame in frames] == ["start", *["probe"], *["probe", "fingerprint"] * 2, "end"]
    sent = [frame for frame in frames if frame["kind"] == "fingerprint"]
    right, wrong = ({key: value for key, value in frame.items() if key != "kind"} for frame in sent)
    found = compared(right, wrong)
    assert found.first is not None and (found.verdict, found.first.op) == ("breakage", "fp32/linear.up")
    results = outcomes(frames)
    assert (status, results["fingerprint"]["status"], results["seeded"]["failure"]) == (5, "passed", "bound")
    assert results["seeded"]["reason"].startswith("fp32/linear.up teacher-forced: element [0, 7, 500] is ")
    assert len(results["fingerprint"]["figures"]) == 8 + 2 * 17
