"""Operations with faults: the probe that covers an operation reports each fault and its position; no other probe covers
that operation."""

import pytest

from envbuild.facts import database
from selftest import seeding
from selftest.reading import Frame

pytest.importorskip("torch")

WRONG = [
    ("operations:some_beta", "mismatch", "fp32 addmm nn 67x131x41 3 matrix + 0.5 product: output: element [0, 0]"),
    ("operations:reads_for_nothing", "mismatch", "fp32 addmm 67x131x41 0 NaN + product: output: element [0, 0] is nan"),
    ("operations:first_of_batch", "mismatch", "fp32 baddbmm 5x67x131x41 expanded: output: element [1, 0, 0]"),
    ("operations:short_of_gaps", "mismatch", "fp32 bmm 5x67x131x41 with gaps: rows apart: element [0, 0, 0]"),
    ("operations:overwrites", "mismatch", "fp32 embedding 601 of 97x33: gradient: element [1, 0]"),
    ("operations:learns_padding", "mismatch", "fp32 embedding 601 of 97x33: gradient: element [0, 0] is 192"),
    ("operations:without_carry", "mismatch", "fp32 cumsum 3x1025: rows: element [0, 1024]"),
    ("operations:overflows", "nonfinite", "fp32 softmax of 37 rows of 2 over rows: output: element [0, 0] is nan"),
    ("operations:short_row", "bound", "fp32 softmax of 5 rows of 1025 over rows: output: element ["),
    ("operations:counts_ignored", "bound", "fp32 cross_entropy 29x33: output: element []"),
    ("operations:swapped_forms", "bound", "fp32 gelu erf 4099: output: element ["),
    ("operations:cut", "mismatch", "fp32 fp32 to bf16: output: element ["),
    ("operations:half_up", "mismatch", "fp32 fp32 to bf16: output: element ["),
    ("operations:flushed", "mismatch", "fp32 fp32 to fp16: output: element [1] is 0, should be -5.96046448e-08"),
    ("operations:saturated", "mismatch", "fp32 fp32 to fp16: output: element [63487] is 65504, should be inf"),
    ("operations:rounded", "mismatch", "fp32 fp32 to int32: output: element [3] is 1, should be 0"),
    ("operations:ragged_edge", "mismatch", "copies of uint8 between layouts: transposed: element [66, 0] is 0"),
    ("operations:unaligned", "mismatch", "copies of uint8 between layouts: shifted by one: element [8643] is 0"),
    ("operations:short_search", "mismatch", "fp32 max and min 256x250: max of rows: element [0] is 127, should be 128"),
    ("operations:skips_nan", "mismatch", "fp32 max and min 256x250: max with NaN is NaN: element [0] is 0"),
    ("operations:sigmoid_tail", "bound", " silu "),
    ("operations:overwritten", "mismatch", "added along a dimension"),
    ("operations:first_tile_only", "mismatch", "topk: values: element ["),
    ("operations:one_beta", "bound", "losses by smooth_l1_loss beta 0.5"),
    ("operations:unweighted", "bound", "losses by nll_loss"),
    ("operations:counts_padding", "bound", "images pooled by avg_pool without padding2d"),
    ("operations:undilated", "mismatch", ": folded: element ["),
    ("operations:short_gradient", "mismatch", "images padded by replicate"),
    ("operations:by_size", "bound", "images resized by "),
    ("operations:zeros_outside", "bound", "images sampled "),
    ("operations:columns_first", "mismatch", "channels moved by pixel_shuffle"),
    ("operations:always_included", "mismatch", "blocks by scatter_reduce"),
    ("operations:short_sum", "bound", "broadcast mul of "),
    ("operations:one_weight", "bound", "gates by prelu of columns"),
    ("operations:zero_filled", "mismatch", ": shifted right: element ["),
    ("operations:unconjugated", "mismatch", "complex "),
    ("operations:first_blank", "bound", "losses by ctc_loss"),
    ("operations:counts_ignored_rows", "mismatch", "offsets and the end"),
    ("gemm.cases:dense_batch", "bound", "bmm of "),
    ("gemm.cases:scaled_added", "bound", " addmm "),
    ("gemm.cases:short_inner", "bound", "linear of "),
    ("gemm.cases:transposed_strides", "mismatch", " of complex "),
    ("gemm.cases:last_of_batch", "mismatch", "addbmm"),
    ("optim.torch:first_rate", "bound", "rate halved after each step"),
    ("optim.torch:uncentered", "bound", "centered True"),
    ("optim.torch:whole_vectors_stay", "mismatch", "of half precision, "),
    ("optim.torch:infinite_step", "nonfinite", " with scaled gradients, "),
    ("optim.torch:second_launch", "bound", "fp32 AdamW foreach, 123 tensors: step 1: element ["),
    ("optim.torch:plain_momentum", "bound", "fp32 SGD fused, 123 tensors: step 1: element ["),
    ("optim.torch:no_decay", "bound", "fp32 Adam foreach, 123 tensors: step 2: element ["),
    ("fft:nyquist", "bound", "fp32 rfft and irfft 3x256: rfft: element [2, 128, 0] is 0"),
    ("fft:coarse_prime", "bound", "fp32 fft and ifft 3x251: fft: element ["),
    ("linalg:half_matrix", "bound", "fp32 solve 1x129x129: x: element ["),
    ("linalg:stale_last_row", "bound", "fp32 cholesky 4x33x33: l l^T: element [3, "),
    ("linalg:qr", "bound", "fp32 qr 4x33x33: q r: element ["),
    ("linalg:eigh", "bound", "fp32 eigh 1x129x129: v^T v: element ["),
    ("linalg:lower_alone", "bound", " eigh "),
    ("linalg:transposed_alone", "bound", " complex lu_solve "),
    ("linalg:half_gradient_of_det", "bound", "gradient of det"),
    ("fft:scaled_for_last", "bound", " over all"),
    ("fft:half_gradient", "bound", ": gradient: element ["),
    ("fft:coarse_long", "bound", "long signals of "),
    ("fft:without_mirror", "bound", ", center True, "),
    ("fft:rounded_up", "mismatch", ": fftshift: element ["),
    ("operations:first_of_ties", "mismatch", ": amax: element ["),
    ("operations:first_place", "mismatch", ": place of cummax: element ["),
    ("operations:empty_row", "bound", ": logsumexp: element ["),
    ("operations:open_bin", "mismatch", ": bins up to the last edge: element ["),
    ("transfer:lost_page", "mismatch", "pageable host to cpu: word 1048064 is 0x0000000000000000, should be 0x"),
    ("transfer:unaligned", "mismatch", "cpu: 4099 bytes from 7 to 1: 1 of 4099 bytes arrived wrong, 1 came back wrong"),
    ("train.repeat:by_process", "mismatch", "run 0 of process 1 differs from run 0 of process 0"),
    ("train.repeat:by_call", "mismatch", "run 1 of process 0 differs from run 0 of process 0"),
    ("graph.replay:stale", "mismatch", "replay 1: 252673 of 252673 elements differ from the eager call's"),
    ("graph.replay:old_weights", "mismatch", "replay 2: 252673 of 252673 elements differ from the eager call's"),
    ("graph.replay:last_bit", "mismatch", "replay 0: 1 of 252673 elements differ from the eager call's"),
    ("large:unwritten", "mismatch", "x + 1 over 67591 elements: error 2055, should be 0"),
    ("large:partial", "mismatch", "sums of columns over 67591 elements: error 259, should be 0"),
    ("large:gathered", "mismatch", "gather of single elements over 67591 elements: error "),
    ("large:rows", "mismatch", "gather of rows over 67591 elements: error "),
    ("large:scattered", "mismatch", "scatter over 67591 elements: error "),
    ("large:wrapped", "mismatch", "index of the maximum over 67591 elements: error 65536, should be 0"),
]
RIGHT = ["operations:right", "gemm.cases:right", "graph.replay:right", "large:right"]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    return seeding.operations(tmp_path_factory.mktemp("operations"))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "failure", "words"), WRONG)
def test_a_wrong_operation_is_caught_and_located(seeds: dict[str, Frame], seed: str, failure: str, words: str) -> None:
    frame = seeds[seed]
    assert (frame["status"], frame["failure"]) == ("failed", failure), frame
    assert words in frame["reason"], frame["reason"]
    assert frame["at"]


@pytest.mark.parametrize("seed", [seed for seed, _, _ in WRONG])
def test_a_wrong_operation_matches_no_known_advisory(seeds: dict[str, Frame], seed: str) -> None:
    result = {**seeds[seed], "probe": seed.partition(":")[0]}
    assert not [advisory.id for advisory in database.advisories() if advisory.matches(result)]


@pytest.mark.parametrize("seed", RIGHT)
def test_a_right_operation_passes(seeds: dict[str, Frame], seed: str) -> None:
    assert seeds[seed]["status"] == "passed", seeds[seed]["reason"]


def test_no_seed_is_left_untested(seeds: dict[str, Frame]) -> None:
    assert {seed for seed, _, _ in WRONG} | set(RIGHT) == set(seeds)
