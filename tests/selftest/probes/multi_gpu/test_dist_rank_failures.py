"""Ranks that die, hang, leave or compute wrong results, in real processes: the probe names rank, stage and step."""

from pathlib import Path

import pytest

from selftest import seeding
from selftest.reading import Frame, job, outcomes, run

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

# seed, failure, signal, where, words of the reason
LAME = [
    ("all-die", "signal", "SIGSEGV", "gloo 1+2: init, rank ", "works alone, but every pair fails; gloo needs no GPU"),
    ("four-die", "signal", "SIGSEGV", "gloo 0+1+2+3: init, rank 3", "works alone and in pairs, but 4 together fail"),
    ("one-dies-alone", "signal", "SIGSEGV", "gloo 1: init, rank 0", "process 1 fails even alone, the others do not"),
    ("each-dies-alone", "signal", "SIGSEGV", "gloo 0: init, rank 0", "each process fails even alone"),
    ("killed", "oom", "SIGKILL", "gloo 1+2: broadcast fp32 1001, rank 0", "every failing pair contains process 1"),
    ("hangs", "hang", None, "gloo 0+1+2: all_reduce fp32 1001, rank 2", "not done after 5 s, in busy_elsewhere; each"),
    ("all-hang", "hang", None, "gloo 0+1+2: all_gather fp32 1001, rank 0", "as did rank 1, 2"),
    ("wrong-sum", "mismatch", None, "gloo 0+2: all_reduce fp32 65537, rank 1", "element [65536] is "),
    ("stale", "mismatch", None, "gloo 0+1+2: all_gather fp32 1001, rank 1", "element ["),
    ("raises", "exception", None, "gloo 0+1+2: all_gather fp32 1001, rank 0", "RuntimeError: CUDA error: misaligned"),
    ("leaves", "incomplete", None, "gloo 0+1+2: broadcast fp32 1001, rank 1", "exited before its last step"),
    ("narrow", "mismatch", None, "gloo 0+1: all_reduce fp32 1001, rank ", "element ["),
    ("from-zero", "mismatch", None, "gloo 0+1: all_reduce max fp32 4099, rank ", "element ["),
    ("long-by-float", "mismatch", None, "gloo 0+1: all_reduce int64 1001, rank ", "element ["),
    ("from-the-start", "mismatch", None, "gloo 0+1: all_gather fp32 1001, rank ", "element ["),
    ("evenly", "mismatch", None, "gloo 0+1: all_to_all uneven fp32 1001, rank ", "element ["),
    ("late-period", "mismatch", None, "gloo 0+1: all_reduce fp16 524296, rank 1", "element [65536] is "),
    ("scattered", "mismatch", None, "gloo 0+1: reduce_scatter fp32 1001, rank ", "element ["),
    ("not-exchanged", "mismatch", None, "gloo 0+1: all_to_all fp32 1001, rank ", "element ["),
    ("not-sent", "mismatch", None, "gloo 0+1: send_recv fp32 1001, rank ", "element ["),
    ("gradients", "mismatch", None, "gloo 2: ddp, rank 0", "ddp gradient of weight: element"),
    ("no-time", "hang", None, "stages left out", "no time was left after 0.3 s for gloo "),
]


@pytest.fixture(scope="module")
def lame(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    found = seeding.ranks(tmp_path_factory.mktemp("lame"))
    return {name.partition(":")[2]: frame for name, frame in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "failure", "signal", "at", "words"), LAME)
def test_a_lame_rank_is_named(
    lame: dict[str, Frame], seed: str, failure: str, signal: str | None, at: str, words: str
) -> None:
    frame = lame[seed]
    assert (frame["status"], frame["failure"], frame["signal"]) == ("failed", failure, signal), frame
    assert frame["at"].startswith(at)
    assert words in frame["reason"], frame["reason"]


def test_no_lame_rank_is_left_untested(lame: dict[str, Frame]) -> None:
    assert {seed for seed, *_ in LAME} | {"right", "refused", "watched"} == set(lame)


def test_right_ranks_pass_with_exact_figures_of_every_stage(lame: dict[str, Frame]) -> None:
    frame = lame["right"]
    assert (frame["status"], frame["reason"]) == ("passed", None)
    stages = ["gloo 0", "gloo 1", "gloo 2", "gloo 1+2", "gloo 0+2", "gloo 0+1", "gloo 0+1+2"]
    assert [stage["stage"] for stage in frame["traits"]["stages"]] == stages
    assert all(stage["passed"] for stage in frame["traits"]["stages"])
    assert {figure["error"] for figure in frame["figures"]} == {0.0}
    last = [figure["case"] for figure in frame["figures"] if figure["case"].startswith("gloo 0+1+2 ")]
    assert [case.removeprefix("gloo 0+1+2 ") for case in last] == [
        "all_reduce fp32 1001", "all_reduce int32 1001", "all_reduce fp16 1001", "all_reduce bf16 1001",
        "all_reduce fp32 65537", "all_reduce int64 1001", "all_gather fp32 1001", "all_gather bf16 4099",
        "broadcast fp32 1001", "broadcast bf16 4099", "reduce_scatter fp32 1001", "reduce_scatter bf16 4099",
        "all_to_all fp32 1001", "all_to_all bf16 4099", "send_recv fp32 1001", "send_recv bf16 4099",
        "all_reduce max fp32 4099", "all_reduce minimum fp32 4099", "all_reduce product fp32 4099",
        "reduce fp32 1001", "reduce fp16 4099", "all_gather_into_tensor fp32 1001", "all_gather_into_tensor fp16 4099",
        "two all_reduce at a time fp32 1001", "two all_reduce at a time fp16 4099", "all_reduce turned fp32 1001",
        "all_reduce turned fp16 4099", "broadcast int64 4099", "broadcast uint8 4099", "broadcast fp64 4099",
        "all_gather int64 4099", "all_gather uint8 4099", "all_gather fp64 4099",
        "gather and scatter fp32 1001: gather",
        "gather and scatter fp32 1001: scatter", "gather and scatter bf16 4099: gather",
        "gather and scatter bf16 4099: scatter",
        "all_to_all uneven fp32 1001", "all_reduce fp16 524296", "all_reduce bf16 524296",
        "ddp weight", "ddp gradient of weight", "ddp bias", "ddp gradient of bias",
    ]  # fmt: skip


def test_the_bus_bandwidth_of_each_world_is_reported(lame: dict[str, Frame]) -> None:
    rates = lame["right"]["traits"]["GB/s"]
    worlds = ["gloo 1+2", "gloo 0+2", "gloo 0+1", "gloo 0+1+2"]
    assert list(rates) == [f"{world} all_reduce {dtype} 524296" for world in worlds for dtype in ("fp16", "bf16")]
    assert all(rate > 0 for rate in rates.values())


def test_a_collective_that_the_backend_does_not_have_is_left_out_and_reported(lame: dict[str, Frame]) -> None:
    frame = lame["refused"]
    assert frame["status"] == "passed"
    left_out = frame["traits"]["left_out"]
    assert left_out["gloo 0+1 reduce_scatter fp32 1001"] == "ProcessGroupGloo does not support reduce_scatter"
    assert all("reduce_scatter" in case for case in left_out)
    assert not any("reduce_scatter" in figure["case"] for figure in frame["figures"])


def test_only_what_is_broken_fails(lame: dict[str, Frame]) -> None:
    def failed(seed: str) -> list[str]:
        return [stage["stage"] for stage in lame[seed]["traits"]["stages"] if not stage["passed"]]

    assert failed("four-die") == ["gloo 0+1+2+3"]
    assert failed("wrong-sum") == ["gloo 0+2"]
    assert failed("killed") == ["gloo 1+2", "gloo 0+1", "gloo 0+1+2"]


def test_a_rank_that_fails_alone_is_not_tried_with_others(lame: dict[str, Frame]) -> None:
    stages = [stage["stage"] for stage in lame["one-dies-alone"]["traits"]["stages"]]
    assert stages == ["gloo 0", "gloo 1", "gloo 2", "gloo 0+2"]
    assert len(lame["each-dies-alone"]["traits"]["stages"]) == 3


def test_a_wrong_result_has_its_error_among_the_figures(lame: dict[str, Frame]) -> None:
    wrong = {figure["case"]: figure["error"] for figure in lame["wrong-sum"]["figures"] if figure["error"]}
    assert wrong == {"gloo 0+2 all_reduce fp32 65537": 1.0}


def test_a_rank_that_waits_for_a_dead_one_is_not_waited_for(lame: dict[str, Frame]) -> None:
    assert lame["four-die"]["seconds"] < 25  # the cap of a stage is 30 s


@pytest.mark.slow
def test_a_probe_that_is_ended_takes_its_ranks_along(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    frames, _, _ = run("lame", job(probes=["dist.staged:all-hang"], timeouts={"dist.staged:all-hang": 5}), path)
    frame = outcomes(frames)["dist.staged:all-hang"]
    assert (frame["failure"], frame["at"].partition(" ")[0]) == ("hang", "gloo")
    running = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if readable(file)]
    assert not [line for line in running if str(path).encode() in line]


def readable(file: Path) -> bool:
    try:
        return bool(file.read_bytes())
    except OSError:
        return False


def test_the_process_that_forks_the_ranks_calls_nothing_of_torch(lame: dict[str, Frame]) -> None:
    assert lame["watched"]["status"] == "passed", lame["watched"]
    assert lame["watched"]["traits"]["calls"] == ["is_available"]  # torch.distributed's; torch.cuda's would raise there
    assert lame["watched"]["traits"]["touching"][0].endswith("zeros")
