"""`explain`: which run, GPU and rank the lines of a log are about, in any language."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from envbuild.explain import cause_ranking, explanation_document, log_facts, log_reader_and_search
from envbuild.facts import database, log_signatures
from envbuild.facts.advisory_model import Change, Situation
from envbuild.resolve import advisory_remedy, profile_reader_and_overrides
from unit.explain.corpus import piped

H20 = "torch 2.3.0, NVIDIA H20, python train.py\n"
CRASH = "Floating point exception (core dumped)\n"


def explanation_of(text: str) -> cause_ranking.Explanation:
    return cause_ranking.explain(log_reader_and_search.Log(text.encode()))


def causes(text: str) -> list[str]:
    return [match.id for match in explanation_of(text).matches]


@pytest.mark.parametrize(
    "line",
    [
        "NVIDIA-SMI 535.129.03    Driver Version: 535.129.03    CUDA Version: 12.2",
        "驱动版本:535.129.03",
        "显卡驱动程序版本: 535.129.03",
        "驱动版本为 535.129.03",
        "显卡驱动版本号: 535.129.03",
        "驅動程式版本：535.129.03",
        "ドライバーのバージョンは 535.129.03",
        "드라이버 버전은 535.129.03",
        "Версия драйвера: 535.129.03",
        "Treiberversion: 535.129.03",
        "| Driver Version | 535.129.03 |",
        "ドライバーのバージョン: 535.129.03",
        "드라이버 버전 535.129.03",
    ],
)
def test_the_driver_is_read_in_any_language(line: str) -> None:
    assert log_facts.read(log_reader_and_search.Log(f"{line}\n{CRASH}".encode())).situation.driver == "535.129.03"


# ---- changes that a profile accepts ----

CHANGES = {row.id: row.change for row in log_signatures.signatures().values() if row.change != Change()} | {
    advisory.id: advisory.change for advisory in database.advisories() if advisory.change != Change()
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_change_is_yaml_that_a_profile_takes(name: str, project: Path) -> None:
    change = CHANGES[name]
    known = Situation(distributions=dict.fromkeys(change.env_with, "1"))
    written = advisory_remedy.written(change, known)
    assert written, "a change that no version satisfies"
    lines = list(advisory_remedy.yaml_lines(written))
    assert len(lines) == len(written)
    (project / "profiles" / "fixed.yaml").write_text("\n".join(["extends: h20-cu12", *lines]) + "\n", encoding="utf-8")
    profile = profile_reader_and_overrides.load("fixed").profile
    for library, versions in change.pins.items():
        if library in database.libraries():
            assert profile.pins[library].version in versions
        else:
            assert any(text.startswith(library) for text in profile.packages)
    assert change.torch is None or profile.torch in change.torch
    assert change.driver is None or profile.driver.minimum in change.driver
    assert change.env.items() <= profile.env.items()


def test_the_nearest_version_is_taken() -> None:
    pin = explanation_document.change  # returns the bounds as text; `advisory_remedy.written` chooses versions
    hopper = CHANGES["cublas-hopper-fpe"]
    assert pin(hopper) == {"pins": {"cublas": ">=12.4.5.8"}}
    assert advisory_remedy.written(hopper, Situation(cuda="11.8")) == {}, "no cuBLAS of CUDA 11 has the fix"
    assert advisory_remedy.written(hopper, Situation(cuda="12.1", libraries={"cublas": "12.5.2.13"})) == {}, (
        "it is fixed already"
    )
    memory = CHANGES["cublas-tmem-silent"]
    on_13 = Situation(torch="2.11.0", cuda="13.0", libraries={"cublas": "13.1.0.3"})
    assert advisory_remedy.written(memory, on_13) == {"pins": {"cublas": "13.1.1.3"}}
    older = advisory_remedy.written(
        CHANGES["volta-dropped"], Situation(gpus=(database.gpus()["v100"],), torch="2.13.0")
    )
    assert Version(older["torch"]) < Version("2.11") and older["cuda"].startswith("12.")


# ---- two GPUs ----


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("worked on A100, now H20", ["h20"]),
        ("works fine with the A100 but dies on an H20", ["h20"]),
        ("it comes up on H20, but A100 works fine", ["h20"]),
        ("moved from A100 to H20", ["h20"]),
        ("no such error on our A100, only on H20", ["h20"]),
        ("之前在A100上正常,换成H20就崩溃", ["h20"]),
        ("H20 报错,A100 上没问题", ["h20"]),
        ("auf der A100 lief alles, auf H20 stirbt es", ["a100", "h20"]),
        ("lief problemlos auf A100, stirbt auf H20", ["h20"]),
        ("marchait bien sur A100, meurt sur H20", ["h20"]),
        ("does not work on H20", ["h20"]),
        ("never worked on H20", ["h20"]),
        ("H20 worked only once", ["h20"]),
        ("A100 and H20 in one job", ["a100", "h20"]),
        ("GPU 0: NVIDIA A100-SXM4-80GB; worked on A100", ["a100"]),
    ],
)
def test_a_gpu_where_all_went_well_is_not_the_one(text: str, cards: Sequence[str]) -> None:
    found = [gpu.id for gpu in explanation_of(text).read.situation.gpus]
    if text.startswith("auf der"):  # a clause whose verb follows the name with more between them: both are kept
        assert set(found) <= set(cards) and "h20" in found
    else:
        assert found == cards


def test_the_other_gpu_confirms_nothing() -> None:
    (match,) = explanation_of("worked on A100, now H20, torch 2.3.0\npython train.py\n" + CRASH).matches
    assert (match.standing, match.profile({"a100", "h20"})) == ("holds", "h20")
    was = explanation_of("worked on H20, now A100, torch 2.3.0\npython train.py\n" + CRASH)
    assert not was.matches and [ruled.advisory.id for ruled in was.ruled_out] == ["cublas-hopper-fpe"]


def test_the_proof_names_the_gpu_that_the_profile_is_for() -> None:
    (match,) = explanation_of("A100 and H20 in one job, torch 2.3.0\npython train.py\n" + CRASH).matches
    assert match.standing == "fits", "the A100 may be the one that failed"
    assert match.profile({"a100", "h20"}) == "h20"
    output = piped("A100 and H20, torch 2.3.0\npython a.py\n" + CRASH)
    assert "envbuild test h20 --probe gemm.crash" in output


def test_a_name_that_stands_for_a_profile_is_explained() -> None:
    bare = piped("python train.py\n" + CRASH)
    assert "test NAME" in bare and "NAME is the profile of your GPU" in bare
    assert "NAME" not in piped(H20 + CRASH)


# ---- hearsay ----

INNOCENT = (
    "previous run failed with SIGFPE, resuming from checkpoint 100",
    "the last attempt was killed: exit code 136; resuming",
    "Resuming from step 1800 after Floating point exception",
    "上次训练因浮点数例外终止,现在继续",
    "der letzte Lauf endete mit SIGFPE, weiter ab Schritt 100",
    '  --batch-size N    lower it if you see "CUDA error: out of memory"',
    "--checkpoint  trades speed for memory where CUDA out of memory is met",
    'We often see "CUDA error: out of memory" in forums',
    "Tip: CUDA out of memory is avoided by a smaller batch",
    "a large batch may cause CUDA out of memory",
    "to avoid CUDA out of memory, lower the batch",
    "If CUDA out of memory, lower the batch",
    "如果出现 CUDA out of memory,请减小 batch",
    'except RuntimeError as error: if "CUDA out of memory" in str(error):',
)


@pytest.mark.parametrize("line", INNOCENT)
def test_lines_of_another_run_or_of_a_text_are_not_a_cause(line: str) -> None:
    found = explanation_of(f"torch 2.3.0, H20, python train.py\n{line}\nstep 1 loss 2.3\n")
    assert not found.matches
    assert not any("PYTHONFAULTHANDLER" in text for text in found.advice)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("RuntimeError: CUDA error: out of memory", "gpu-memory"),
        ('I get "cuda out of memory" with a batch of 1', "gpu-memory"),
        ("{'error': 'CUDA out of memory. Tried to allocate 2.00 GiB'}", "gpu-memory"),
        ('worker failed: "CUDA error: out of memory"', "gpu-memory"),
        ("An error occurred when the model was loaded: CUDA out of memory", "gpu-memory"),
        ("examples/train.py FAILED with exitcode -8", "cublas-hopper-fpe"),
        ("restarting after the worker died with signal SIGFPE", "cublas-hopper-fpe"),
    ],
)
def test_a_line_of_this_run_is_a_cause(line: str, cause: str) -> None:
    assert causes(H20 + line) == [cause]


# ---- languages ----


@pytest.mark.parametrize(
    "line",
    [
        "浮点异常(核心已转储)",
        "浮点数例外",
        "浮點數例外",
        "浮動小数点例外です (コアダンプ)",
        "부동 소수점 예외 (코어 덤프됨)",
        "Exception en virgule flottante (core dumped)",
        "Exception en point flottant",
        "Gleitkomma-Ausnahme (Speicherabzug geschrieben)",
        "Gleitkommafehler",
        "Excepción de coma flotante",
        "Floating-point exception (core dumped)",
        "Program terminated with signal SIGFPE, Arithmetic exception.",
        "Process finished with exit code 136 (interrupted by signal 8: SIGFPE)",
        "Process finished with exit code 136",
    ],
)
def test_the_signal_is_known_by_its_names(line: str) -> None:
    assert causes(f"python train.py on H20\n{line}\n") == ["cublas-hopper-fpe"]


@pytest.mark.parametrize(
    "line",
    [
        "训练到249步,损失变成 NaN",
        "第10步出现nan",
        "梯度全是nan",
        "Ab Schritt 120 ist der Verlust NaN",
        "Der Loss wird NaN",
        "die Gradienten sind NaN",
        "NaN im Gradienten der Schicht 3",
        "la perte devient nan",
        "損失がnanになる",
    ],
)
def test_advice_on_nan_comes_for_every_spelling(line: str) -> None:
    assert any("set_detect_anomaly" in text for text in explanation_of(line).advice)


def test_where_nothing_names_torch_or_a_gpu_the_signal_gets_a_hint() -> None:
    found = explanation_of(CRASH)
    assert not found.matches and any("audit --here" in text and "SIGFPE" in text for text in found.advice)


# ---- ranks ----


def work(rank: int, enqueued: int, completed: int) -> str:
    message = f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    return f"[rank{rank}]:[E1 ProcessGroupNCCL.cpp:1834] [PG ID 0 Rank {rank}] Timeout at NCCL work: 21, {message}\n"


def test_the_rank_that_lags_is_named() -> None:
    text = "world size: 8\n" + "".join(work(rank, 19 if rank == 2 else 21, 18) for rank in range(6))
    works = explanation_of(text).read.works
    assert (works.behind, works.silent) == ((2,), (6, 7))
    output = piped(text)
    assert "rank 2: 19" in output and "the others wait for rank 2: it did not reach work 20" in output
    assert json.loads(piped(text, "--json"))["ranks"]["behind"] == [2]


def late(
    rank: int,
    number: int,
    operation: str,
    group: str = "[PG ID 0 PG GUID 0(default_pg) Rank {0}] ",
    elements: int = 65536,
) -> str:
    message = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={elements}, NumelOut=524288, Timeout(ms)=600000)"
    head = f"[rank{rank}]:[E126 01:18:04.730034097 ProcessGroupNCCL.cpp:629] {group.format(rank)}[Rank {rank}]"
    return f"{head} Watchdog caught collective operation timeout: {message} ran for 600002 milliseconds\n"


@pytest.mark.parametrize("group", ["", "[PG 0 Rank {0}] ", "[PG ID 0 PG GUID 0(default_pg) Rank {0}] "])
def test_ranks_that_wait_in_different_collectives_diverged(group: str) -> None:
    text = late(0, 4411, "ALLREDUCE", group) + late(1, 4411, "ALLREDUCE", group) + late(2, 4410, "ALLGATHER", group)
    output = " ".join(piped(text).split())
    assert (
        "the ranks diverged: each waited in a different collective: rank 0 in ALLREDUCE 4411, rank 2 in ALLG" in output
    )
    diverged = json.loads(piped(text, "--json"))["ranks"]["diverged"]
    assert diverged == [
        {"rank": 0, "number": 4411, "operation": "ALLREDUCE", "elements": 65536},
        {"rank": 2, "number": 4410, "operation": "ALLGATHER", "elements": 65536},
    ]


@pytest.mark.parametrize(
    "text",
    [
        late(0, 4411, "ALLREDUCE") + late(1, 4411, "ALLREDUCE"),
        late(0, 4411, "ALLREDUCE") + late(1, 4399, "ALLREDUCE"),
        late(0, 4411, "ALLREDUCE") + late(1, 7, "ALLGATHER", "[PG ID 2 PG GUID 5 Rank {0}] "),
        late(0, 4411, "ALLREDUCE"),
        late(0, 4411, "ALLREDUCE") + late(1, 4399, "ALLREDUCE", elements=1),
        late(0, 4411, "ALLTOALL_BASE") + late(1, 4411, "ALLTOALL_BASE", elements=1),
    ],
)
def test_ranks_that_wait_in_one_kind_or_in_groups_of_their_own_did_not_diverge(text: str) -> None:
    assert explanation_of(text).read.works.diverged == ()


def test_ranks_that_called_different_operations_with_the_same_number_mismatch() -> None:
    text = late(0, 4411, "ALLREDUCE") + late(1, 4411, "ALLREDUCE")
    assert [match.id for match in explanation_of(text + late(2, 4411, "BROADCAST")).matches] == ["collective-mismatch"]
    assert [match.id for match in explanation_of(text + late(2, 4410, "BROADCAST")).matches] == ["collective-timeout"]


def test_ranks_that_gave_one_collective_different_sizes_mismatch() -> None:
    text = late(0, 4411, "ALLREDUCE") + late(1, 4411, "ALLREDUCE") + late(2, 4411, "ALLREDUCE", elements=1)
    assert [match.id for match in explanation_of(text).matches] == ["collective-mismatch"]
    output = " ".join(piped(text).split())
    assert "sizes: rank 0 in ALLREDUCE 4411 (65536 elements), rank 2 in ALLREDUCE 4411 (1 element)" in output


SCALES = "\n".join(f"overflow detected, setting loss scale to: {2.0**-power}" for power in range(12))


@pytest.mark.parametrize(
    ("text", "shrinks"),
    [
        (SCALES, True),
        (SCALES.replace("setting loss scale to:", "loss_scale changed from 9 to"), True),
        (SCALES + "\noverflow detected, setting loss scale to: 2.0", False),  # it rises again
        ("\n".join(SCALES.splitlines()[:6]), False),  # 1/32 is not small yet
        (SCALES.replace("0.0078125", "0.5"), False),
        ("\n".join(f"reducing loss scale to {2**power}" for power in range(16, 2, -1)), False),
    ],
)
def test_loss_scales_that_shrink_many_times_in_a_row_are_a_fact(text: str, shrinks: bool) -> None:
    assert ("loss-scale-shrinks" in explanation_of(text).read.states) is shrinks


def ranks_of(text: str) -> tuple[str, dict[str, Any]]:
    return " ".join(piped(text).split()), json.loads(piped(text, "--json"))["ranks"]


def test_without_last_works_the_rank_that_timed_out_in_the_earliest_collective_is_named() -> None:
    text = "".join(late(rank, 40 if rank == 3 else 42, "ALLREDUCE") for rank in (0, 1, 3))
    output, ranks = ranks_of(text)
    assert "the others wait for rank 3: it timed out in collective 40; the latest that timed out is 42" in output
    assert "timed out in work (SeqNum): rank 0: 42, rank 1: 42, rank 3: 40" in output
    assert (ranks["behind"], ranks["silent"], [one["number"] for one in ranks["timed_out"]]) == ([3], [2], [42, 42, 40])


def test_the_rank_that_is_missing_among_those_that_timed_out_is_named() -> None:
    text = "world size: 4\n" + "".join(late(rank, 42, "ALLREDUCE") for rank in (0, 1, 3))
    output, ranks = ranks_of(text)
    assert "last work of rank 2 unknown: see its own output; the others may wait for it" in output
    assert (ranks["behind"], ranks["silent"]) == ([], [2])


@pytest.mark.parametrize(
    "message",
    [
        "Exception (either an error or timeout) detected by watchdog at work: 42",
        "Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the info",
        " failure detected by watchdog at work sequence id: 42 PG status:",
    ],
)
def test_the_last_work_is_read_in_every_message_of_the_watchdog(message: str) -> None:
    line = "[rank{0}]:[E1 Proc.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {0}] {1}, last enqueued NCCL work: {2}"
    output, ranks = ranks_of("".join(f"{line.format(rank, message, 42 - rank)}.\n" for rank in (0, 1)))
    assert "the others wait for rank 1: it did not reach work 42" in output and ranks["behind"] == [1]
    assert "no sign of a failure" not in output


# ---- possible causes ----


TREE = "torch 2.1.0, 2 x NVIDIA A100-SXM4-80GB, nproc_per_node=2, python train.py\n"


def test_an_advisory_that_holds_is_possible_where_no_line_names_it() -> None:
    found = explanation_of(f"{TREE}loss: nan at step 3\n")
    best = (found.matches or found.possible)[0]
    assert (best.id, best.standing, best.lines) == ("nccl-2.18.1", "holds", ())
    assert "symptom" in best.evidence and "operation" in best.evidence


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.7.1, 2 x NVIDIA A100-SXM4-80GB, nproc_per_node=2\nloss: nan at step 3\n",  # its NCCL is fixed
        "torch 2.1.0, python train.py\nloss: nan at step 3\n",
        f"{TREE}step 3 loss: 0.4\n",
        f"{TREE}loss: nan\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
    ],
)
def test_no_advisory_is_possible_that_does_not_hold_or_need_not(text: str) -> None:
    found = explanation_of(text)
    assert [match.id for match in found.possible if match.advisory and match.advisory.match] == []


def test_libraries_that_torch_brings_are_marked_as_inferred() -> None:
    output = " ".join(piped(f"{H20}nccl version: 2.21.5\n").split())
    assert "torch 2.3.0 (which brings cublas 12.1.3.1, cudnn 8.9.2.26), nccl 2.21.5" in output
    read = json.loads(piped(f"{H20}nccl version: 2.21.5\n", "--json"))["facts"]
    assert "cublas" in read["inferred"] and "nccl" not in read["inferred"]


@pytest.mark.parametrize(
    ("number", "words", "cause"),
    [
        (13, "Graphics Exception: ESR 0x504648=0xa000008", "program-stopped-by-gpu"),
        (31, "pid=1, name=python, Ch 0000003b, MMU Fault", "program-stopped-by-gpu"),
        (43, "pid=1, name=python, Ch 00000010", "program-stopped-by-gpu"),
        (63, "pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.", "gpu-row-remap"),
        (119, "pid=1, Timeout after 45s of waiting for RPC response from GPU5 GSP!", "gpu-firmware"),
        (120, "pid=1, GSP task exception", "gpu-firmware"),
        (145, "RLW_RXPIPE Fatal XC0 i0 Link 13", "nvlink-fault"),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00", "nvlink-fault"),
    ],
)
def test_an_xid_alone_says_what_it_is(number: int, words: str, cause: str) -> None:
    assert causes(f"[ 79.4] NVRM: Xid (PCI:0000:81:00): {number}, {words}\n") == [cause]


def test_ranks_that_are_level_are_not_blamed() -> None:
    assert explanation_of("".join(work(rank, 21, 20) for rank in range(4))).read.works.behind == ()
    assert explanation_of(work(0, 21, 20) + work(1, 21, 19)).read.works.behind == (1,)


def test_ranks_of_different_groups_are_not_compared() -> None:
    """Each group counts its own work. A rank is named by its number in the job if the log states it."""
    line = "[rank{}]:[E1 Proc.cpp:1844] [PG ID 1 PG GUID {} Rank {}] Timeout at NCCL work: 8, last enqueued work: {}.\n"
    text = "world size: 8\n" + "".join(
        line.format(rank, 5 + rank // 4, rank % 4, 90 if rank < 4 else 20) for rank in range(7)
    )
    works = explanation_of(text).read.works
    assert ([work.rank for work in works.last], works.behind, works.silent) == ([0, 1, 2, 3], (), ())
    late = explanation_of(
        text.replace("Rank 3] Timeout at NCCL work: 8, last enqueued work: 90", "Rank 3] T, last enqueued work: 89")
    )
    assert late.read.works.behind == (3,)


@pytest.mark.parametrize(
    "word", ["PyTorch 版本:", "PyTorch バージョン:", "Versione: torch", "PyTorch versión", "PyTorch-Version:"]
)
def test_torch_is_read_with_every_spelling_of_its_version(word: str) -> None:
    assert explanation_of(f"{word} 2.3.1+cu121\n").read.situation.torch == "2.3.1"


def test_every_rank_is_read_among_many_similar_lines() -> None:
    text = "world_size=600\n" + "".join(work(rank, 21 - (rank == 599), 20) for rank in range(600))
    works = explanation_of(text).read.works
    assert (len(works.last), works.behind, works.silent) == (600, (599,), ())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("world size: 8\n[rank5]: ready", 8),
        ("WORLD_SIZE=16\nGPU 7: NVIDIA H20", 16),
        ("[rank5]: ready", 6),
        ("--nproc_per_node=4\n[rank2]: ready", 4),
        ("world size: 1", None),
    ],
)
def test_the_number_of_ranks_is_read_from_the_log(text: str, count: int | None) -> None:
    assert explanation_of(text).read.situation.gpu_count == count


# ---- the program's own error ----


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ModuleNotFoundError: No module named 'einops'", "the package that has einops is not in this environment"),
        ("KeyError: 'lr'", "KeyError: 'lr'"),
        ("[rank0]: my.own.ConfigError: bad batch", "my.own.ConfigError: bad batch"),
        ("AssertionError", "AssertionError"),
    ],
)
def test_an_error_of_the_program_is_not_known_and_quoted(error: str, words: str) -> None:
    text = f'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n{error}\n'
    output = " ".join(piped(text).split())
    assert "No known cause" in output and "the program's own error (line 3)" in output and words in output
    assert json.loads(piped(text, "--json"))["exception"]["line"] == 3


def test_a_message_of_the_launcher_is_not_the_error_itself() -> None:
    text = "KeyError: 'lr'\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    found = explanation_of(text).read.error
    assert found is not None and found.number == 1
