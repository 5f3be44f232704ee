"""norm.apex and optim.apex over stand-ins for apex: the right one passes, each fault is caught and named."""

import re

import pytest

pytest.importorskip("torch")

import torch

from envbuild.facts import database
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.normalization import norm_apex
from envbuild.selftest.probes.training import optim_apex
from envbuild.selftest.probes.training.optim_apex import CHUNK, SIZES, AdamCase, Moments
from selftest import seeding, standins
from selftest.named import NAMED
from selftest.reading import Frame

WORDS = "expected scalar type Float but found Half"
WRONG = [
    ("norm.apex:half_sums", "bound", "y of FusedLayerNorm fp16 x fp16 8x256: element"),
    ("norm.apex:wrong_row", "bound", "y of FusedRMSNorm fp32 x fp32 autocast 8x1023: element [6,"),
    ("norm.apex:wrong_gradient", "bound", "grad weight of MixedFusedLayerNorm fp32 x fp32 8x256: element"),
    ("norm.apex:refuses", "exception", f"MixedFusedRMSNorm fp32 x fp16 is refused: {WORDS}"),
    ("norm.apex:no_autocast", "mismatch", "FusedLayerNorm fp32 x fp32 autocast 8x1023: the result is (8, 1023)"),
    ("norm.apex:other_torch", "exception", "ImportError: undefined symbol"),
    ("optim.apex:uncorrected", "bound", "fp32 plain AdamW parameters, step 1: element"),
    ("optim.apex:tail", "bound", "step 1: element 131078 of tensor 6 (of 131079) is"),
    ("optim.apex:list", "bound", "(328326 of 657400 wrong"),
    ("optim.apex:stale_master", "bound", "fp32 master weights AdamW master weights, step 1: element"),
    ("optim.apex:half_moments", "nonfinite", "fp16 plain AdamW parameters, step 1: element"),
    ("optim.apex:refuses", "exception", "fp16 plain AdamW is refused: FusedAdam only support fp32."),
    ("optim.apex:other_torch", "exception", "ImportError: undefined symbol"),
]
RIGHT = ["norm.apex:right", "norm.apex:fallback", "optim.apex:right", "optim.apex:old", "optim.apex:exact_moments"]
SKIPPED = [
    ("norm.apex:missing", "^apex is not installed$"),
    ("norm.apex:foreign", "is not NVIDIA's apex: it has no apex.normalization$"),
    ("norm.apex:uncompiled", "module fused_layer_norm_cuda is missing$"),
    ("optim.apex:missing", "^apex is not installed$"),
    ("optim.apex:uncompiled", "module amp_C is missing$"),
    ("optim.apex:gpu_only", r"^needs a GPU: FusedAdam has no CPU kernel \(Found no NVIDIA driver"),
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    return seeding.apexes(tmp_path_factory.mktemp("apexes"))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "failure", "words"), WRONG)
def test_a_wrong_apex_is_caught_and_located(seeds: dict[str, Frame], seed: str, failure: str, words: str) -> None:
    frame = seeds[seed]
    assert (frame["status"], frame["failure"]) == ("failed", failure), frame
    assert words in frame["reason"], frame["reason"]


@pytest.mark.parametrize("seed", [seed for seed, _, _ in WRONG])
def test_a_refusal_is_named_with_its_advisory_and_a_wrong_result_is_not(seeds: dict[str, Frame], seed: str) -> None:
    result = {**seeds[seed], "probe": seed.partition(":")[0]}
    assert [advisory.id for advisory in database.advisories() if advisory.matches(result)] == NAMED.get(seed, [])


@pytest.mark.parametrize("seed", RIGHT)
def test_a_right_apex_passes(seeds: dict[str, Frame], seed: str) -> None:
    assert seeds[seed]["status"] == "passed", seeds[seed]["reason"]
    assert seeds[seed]["figures"]


@pytest.mark.parametrize(("seed", "words"), SKIPPED)
def test_a_case_that_cannot_be_tried_is_skipped_with_its_reason(seeds: dict[str, Frame], seed: str, words: str) -> None:
    assert seeds[seed]["status"] == "skipped"
    assert re.search(words, seeds[seed]["reason"]), seeds[seed]["reason"]


def test_no_stand_in_is_left_untested(seeds: dict[str, Frame]) -> None:
    assert {seed for seed, *_ in (*WRONG, *SKIPPED)} | set(RIGHT) == set(seeds)


def test_pairs_that_apex_refuses_are_reported_with_their_advisory(seeds: dict[str, Frame]) -> None:
    mixed_dtypes = seeds["norm.apex:right"]["traits"]["mixed_dtypes"]
    assert mixed_dtypes["refused"]["FusedRMSNorm"]["fp32 x fp16"] == WORDS
    assert mixed_dtypes["refused"]["FusedRMSNorm"]["fp16 x fp32"] == "expected scalar type Half but found Float"
    assert {name: len(pairs) for name, pairs in mixed_dtypes["refused"].items()} == {
        "FusedLayerNorm": 6,
        "MixedFusedLayerNorm": 4,
        "FusedRMSNorm": 6,
        "MixedFusedRMSNorm": 4,
    }
    (advisory,) = (item for item in database.advisories() if item.id == mixed_dtypes["advisory"])
    assert advisory.remedy and set(mixed_dtypes) == {"refused", "advisory"}, "the remedy is the advisory's alone"
    assert advisory.shows.probes == ("norm.apex",)


def test_the_cpu_is_not_reported_to_have_run_kernels(seeds: dict[str, Frame]) -> None:
    assert seeds["norm.apex:fallback"]["traits"]["kernels"].startswith("none")
    assert "kernels" not in seeds["norm.apex:right"]["traits"]
    assert norm_apex.on_kernels(Context(JobDocument(nonce="0" * 32))) is False


def test_features_missing_in_an_older_apex_and_unused_master_weights_are_reported(seeds: dict[str, Frame]) -> None:
    unused = seeds["optim.apex:right"]["traits"]["master_weights_unused"]
    assert unused == ["bf16 master weights AdamW", "bf16 master weights Adam"]
    assert seeds["optim.apex:right"]["traits"]["rounded_moments"] == [
        f"{dtype} {variant} {kind}"
        for dtype, variant in (("fp16", "capturable"), ("bf16", "capturable"), ("bf16", "master weights"))
        for kind in ("AdamW", "Adam")
    ]
    assert "rounded_moments" not in seeds["optim.apex:exact_moments"]["traits"]
    cases = seeds["optim.apex:old"]["traits"]["unsupported"]
    assert len(cases) == 12
    assert not [name for name in cases if "plain" in name]


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_reference_is_torchs_adam(decoupled: bool) -> None:
    case = AdamCase("plain", torch.float64, decoupled)
    p = torch.nn.Parameter(optim_apex.start_parameters(1000).double())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    rate, decay = optim_apex.RATE, optim_apex.DECAY
    optimizer = kind([p], lr=rate, betas=optim_apex.BETAS, eps=optim_apex.EPSILON, weight_decay=decay)
    reference = Moments()
    for number in range(1, 6):
        p.grad = optim_apex.gradient(1000, number, decoupled).double()
        wanted, bound = reference.next(case, p.detach().clone(), p.grad)
        optimizer.step()
        assert torch.allclose(p, wanted, rtol=1e-12, atol=1e-12)
        assert bool((bound <= 1e-4 * optim_apex.RATE).all())


@pytest.mark.parametrize("chunks", [1 << 30, 320])
def test_more_chunks_than_a_launch_takes_are_all_stepped(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """The probe makes this check only on a GPU, so the test calls it directly. The stand-in ignores all chunks after
    the first `chunks` chunks."""
    monkeypatch.setattr(standins.Adam, "most_chunks", chunks)
    context = Context(JobDocument(nonce="0" * 32))
    optim_apex.check_long(context, standins.Adam)
    reasons = [fault.reason for fault in context.faults]
    first = f"of tensor 0 (of {optim_apex.LONG}) is"
    assert ([first in reason for reason in reasons] == [True]) if chunks == 320 else reasons == []
    (figure,) = context.figures
    assert figure.within == (chunks != 320)


def test_the_lists_cross_chunks_and_launches() -> None:
    assert {CHUNK - 1, CHUNK, CHUNK + 1} < set(SIZES)
    assert len(SIZES) > 36
    assert sum(SIZES[:36]) < sum(SIZES)
    assert CHUNK % optim_apex.PERIOD and optim_apex.PERIOD < CHUNK
    case = AdamCase("plain", torch.float32, True)
    assert case.where(0) == "element 0 of tensor 0 (of 1)"
    assert case.where(1) == "element 0 of tensor 1 (of 3)"
    assert case.where(sum(SIZES) - 1) == "element 0 of tensor 44 (of 1)"
