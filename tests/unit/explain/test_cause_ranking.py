"""`explain`: from a log to its cause."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from envbuild.cli.entry import cli
from envbuild.explain import (
    cause_ranking,
    cause_scoring,
    explanation_document,
    log_facts,
    log_reader_and_search,
    required_texts,
)
from envbuild.explain.cause_ranking import MissingFact
from envbuild.explain.secret_masking import safe_line
from envbuild.facts import database, log_signatures
from envbuild.facts.fact_field_types import SearchPattern
from envbuild.facts.probe_catalogue_reader import known_probes
from envbuild.util.errors import FactsError, FileError
from unit.explain import corpus
from unit.explain.corpus import FOLDER, PARTS, SEALED, UNSEEN, Case

CASES = corpus.cases()
MESSAGES = corpus.read_yaml(Path(__file__).parent / "messages.yaml")
H20 = "PyTorch version: 2.3.0+cu121\nGPU 0: NVIDIA H20\n"
CRASH = "Floating point exception (core dumped)\n"


def explanation_of(text: str) -> cause_ranking.Explanation:
    return cause_ranking.explain(log_reader_and_search.Log(text.encode()))


def causes(text: str) -> list[str]:
    return [match.id for match in explanation_of(text).matches]


def run(*arguments: str, stdin: str | bytes = b"") -> str:
    done = CliRunner().invoke(cli, ["explain", *arguments], input=stdin, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


# ---- the corpus ----


@pytest.mark.parametrize("split", SEALED)
def test_the_sealed_logs_are_those_that_were_sealed(split: str) -> None:
    folder = FOLDER / split
    sums = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert {file.name for file in (*folder.glob("*.log"), folder / "index.yaml")} == set(sums)
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())


def test_the_corpus_is_what_it_must_be() -> None:
    kinds = Counter(case.kind for case in CASES)
    assert len(CASES) >= 60
    by_chance = [case for case in CASES if case.part in ("develop", "held-out")]  # the others were chosen by symptom
    assert sum(case.kind in ("unknown", "innocent") for case in by_chance) >= 0.3 * len(by_chance)
    assert kinds["innocent"] >= 10
    assert {case.part for case in CASES} == set(PARTS)
    assert {case.name for case in CASES} == {file.stem for file in FOLDER.glob("*.log")}
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#[0-9]+", case.cite) for case in CASES)
    assert all((case.kind == "cause") == bool(case.expect) for case in CASES)
    assert {name for case in CASES for name in case.expect} <= set(log_signatures.signatures())


def test_held_out_logs_are_cited_nowhere_and_in_no_other_part() -> None:
    cited = {cite for row in log_signatures.signatures().values() for cite in row.cite}
    cited |= {cite for advisory in database.advisories() for cite in advisory.cite}
    threads = {part: {case.cite for case in CASES if case.part == part} for part in PARTS}
    assert threads["held-out"] & (cited | threads["develop"]) == set()
    assert threads[UNSEEN] & cited.union(*(threads[part] for part in PARTS if part != UNSEEN)) == set()


def test_the_halves_of_the_recent_logs_are_chosen_by_the_hash_of_the_name() -> None:
    recent = [case for case in CASES if case.part.startswith("recent")]
    assert {case.name for case in recent if case.part == UNSEEN} == {
        case.name for case in recent if zlib.crc32(case.name.encode()) % 2
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in PARTS if part != UNSEEN])
def test_precision_and_recall(part: str) -> None:
    score = corpus.score(case for case in CASES if case.part == part)
    assert score.precision >= 0.95
    assert score.recall >= 0.95


@pytest.mark.parametrize(
    "case", [case for case in corpus.seen() if case.kind == "innocent"], ids=lambda case: case.name
)
def test_no_innocent_log_gets_a_cause(case: Case) -> None:
    assert corpus.named(case) == frozenset()


@pytest.mark.parametrize(
    "case", [case for case in corpus.seen() if case.kind == "innocent"], ids=lambda case: case.name
)
def test_nothing_is_possible_in_an_innocent_log(case: Case) -> None:
    assert corpus.explained(case).possible == ()


def with_an_advisory(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if any(match.advisory for match in corpus.explained(case).matches)]


@pytest.mark.slow
def test_no_advisory_is_named_for_crashes_without_a_known_cause() -> None:
    """The logs are crashes of other programs, failures of unknown cause, and logs without a failure, from all parts of
    the corpus."""
    without = [case for case in CASES if case.kind != "cause"]
    assert len(without) >= 100
    assert len(with_an_advisory(without)) == 0


def test_no_advisory_is_named_for_a_sample_of_the_crashes_without_a_known_cause() -> None:
    without = [case for case in CASES if case.kind == "unknown"][::8]
    assert len(without) >= 50
    assert len(with_an_advisory(without)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("cause", MESSAGES)
def test_each_message_names_its_cause(cause: str) -> None:
    named = {message: causes(message) for message in MESSAGES[cause]}
    assert {message: found for message, found in named.items() if found != [cause]} == {}


def test_the_worked_example_of_the_documentation_holds() -> None:
    """docs/explain.md adds up the weights of a SIGFPE on an H20, without frames and with frames in MKL."""
    text = " ".join((Path(__file__).parents[3] / "docs" / "explain.md").read_text("utf-8").split())
    frames = "received signal SIGFPE\n#0  0x00007f in mkl_blas_avx512_sgemm () from /opt/lib/libmkl_avx512.so.2\n"
    weights = log_signatures.weights()
    prior = log_signatures.signatures()["cublas-hopper-fpe"].confidence
    example = [f"confidence is {prior}", f"log-odds {cause_scoring.log_odds(prior):.1f}"]
    example += [f"{weights['holds'].weight:+.1f}", f"{weights['other-frames'].weight:+.1f}"]
    for log, named in (f"{H20}{CRASH}", "cublas-hopper-fpe"), (f"{H20}{CRASH}{frames}", "cpu-math-library"):
        whole = log_reader_and_search.Log(log.encode())
        scored = cause_ranking.score_causes(whole, log_facts.read(whole))
        confidence = next(cause.confidence for cause in scored if cause.signature.id == "cublas-hopper-fpe")
        assert causes(log)[0] == named
        example.append(f"a confidence of {confidence:.2f}")
    assert [piece for piece in example if piece not in text] == []


def test_a_wrong_answer_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score decreases if one cause is named for every log, and if none is named."""
    monkeypatch.setattr(corpus, "named", lambda case: case.expect | {"disk-full"})
    assert corpus.score(CASES).precision < 0.7
    monkeypatch.setattr(corpus, "named", lambda case: frozenset())
    assert corpus.Score(0, 1, 5).recall == 0.0


# ---- the data ----


def test_every_advisory_is_recognised_by_its_lines_and_context() -> None:
    """The lines of an advisory together with matching GPUs and versions are always enough; its lines alone are not
    always."""
    for advisory in database.advisories():
        row = log_signatures.signatures()[advisory.id]
        assert cause_scoring.confidence(row.confidence, ("line", "holds")) >= cause_ranking.NAMED, advisory.id


@pytest.mark.parametrize("row", log_signatures.signatures().values(), ids=lambda row: row.id)
def test_a_signature_is_well_formed(row: log_signatures.Signature) -> None:
    advisory = next((item for item in database.advisories() if item.id == row.id), None)
    assert (advisory is None) == bool(row.title), "an advisory has its own title"
    command = row.prove or ""
    for probe in re.findall(r"--probe (\S+)", command):
        assert probe in known_probes()
    patterns: list[SearchPattern] = [*row.lines, *(advisory.shows.patterns if advisory else ())]
    for pattern in patterns:
        assert required_texts.computed_texts(pattern), f"{pattern.pattern}: no text by which lines are found"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"yields_to": frozenset({"gpu-memroy"})}, "did you mean gpu-memory"),
        ({"id": "cublas-hopper-fp"}, "needs title, lines and remedy"),
    ],
)
def test_a_signature_of_nothing_is_refused(
    change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dict(log_signatures._rows())
    wrong = replace(rows["cublas-hopper-fpe"], **change)  # type: ignore[arg-type]
    monkeypatch.setattr(log_signatures, "_rows", lambda: {**rows, wrong.id: wrong})
    log_signatures._signatures.cache_clear()
    with pytest.raises(FactsError) as caught:
        log_signatures.signatures()
    assert message in f"{caught.value} {caught.value.hint}"


def test_no_row_is_dead() -> None:
    """Each row says more than the default, and some advisory requires each word."""
    known = {advisory.id for advisory in database.advisories()}
    for row in log_signatures._rows().values():
        bare = log_signatures.Signature(id=row.id, source=row.source, status=row.status, as_of=row.as_of)
        assert row != bare or row.id not in known, row.id
    conditions = {
        (kind, word)
        for advisory in database.advisories()
        for match in advisory.match
        for kind in ("environment", "features", "extensions", "without")
        for word in getattr(match, kind)
    }
    for word in log_signatures.words():
        assert {(word.kind, word.word), ("without", word.word)} & conditions, word.word


def test_signatures_are_read_once() -> None:
    assert log_signatures.signatures() is log_signatures.signatures()


# ---- text around a match ----


def test_the_versions_in_the_log_confirm_an_advisory() -> None:
    bare, known_card = explanation_of("python: " + CRASH).possible[0], explanation_of(H20 + CRASH).matches[0]
    assert bare.id == known_card.id == "cublas-hopper-fpe"
    assert bare.confidence < known_card.confidence
    assert (bare.standing, known_card.standing) == ("open", "holds")


@pytest.mark.parametrize(
    "surroundings",
    [
        "torch 2.3.0, Tesla V100-SXM2-32GB\n",
        "torch==2.6.0\nGPU 0: NVIDIA H20\n  cublas  12.4.5.8  loaded  /v/libcublas.so.12\n",
        "torch==2.6.0\nGPU 0: NVIDIA A100-SXM4-80GB\n",
        "torch==2.6.0+cpu\n",
    ],
    ids=["another GPU", "a fixed cuBLAS is loaded", "a torch with a fixed cuBLAS, and another GPU", "a torch for CPUs"],
)
def test_the_versions_in_the_log_rule_an_advisory_out(surroundings: str) -> None:
    found = explanation_of(surroundings + CRASH)
    assert "cublas-hopper-fpe" not in {match.id for match in found.matches}
    assert "cublas-hopper-fpe" in {ruled.advisory.id for ruled in found.ruled_out}


def test_a_fixed_version_that_is_not_shown_to_be_loaded_leaves_it_possible() -> None:
    text = "torch==2.6.0\nGPU 0: NVIDIA H20\npython a.py\n" + CRASH
    document = json.loads(run("--json", "-", stdin=text))
    assert (document["causes"], document["ruled_out"], document["facts"]["loaded"]) == ([], [], [])
    match = document["possible"][0]
    assert (match["id"], match["profile"]) == ("cublas-hopper-fpe", "h20")
    assert match["missing_facts"] == [{"fact": "which cublas is loaded", "command": "envbuild audit --here"}]
    output = run("-", stdin=text)
    assert "Possible cause: cublas-hopper-fpe" in output
    assert "  - find out which cublas is loaded: envbuild audit --here" in output


def test_where_gpu_and_loaded_version_are_unknown_a_cause_is_less_possible_and_not_ruled_out() -> None:
    hopper, unknown = (
        explanation_of(f"torch==2.6.0\nGPU 0: NVIDIA H20\n{CRASH}"),
        explanation_of(f"torch==2.6.0\npython a.py\n{CRASH}"),
    )
    assert [(found.matches, found.ruled_out) for found in (hopper, unknown)] == [((), ())] * 2
    sure, match = (
        next(match for match in found.possible if match.id == "cublas-hopper-fpe") for found in (hopper, unknown)
    )
    assert (match.standing, match.cards) == ("not loaded", ())
    assert match.confidence < sure.confidence
    assert match.find_out == (MissingFact("which cublas is loaded", "envbuild audit --here"),)


def test_a_version_in_prose_that_nothing_else_shows_rules_nothing_out() -> None:
    found = explanation_of("H20, nvidia-cublas-cu12==12.5.3.2\n" + CRASH)
    (match,) = found.matches
    assert (match.id, match.standing, found.ruled_out) == ("cublas-hopper-fpe", "fits", ())
    assert str(match.find_out[-1]) == "which cublas is loaded: envbuild audit --here"


@pytest.mark.parametrize(
    ("text", "torch", "cuda", "cublas"),
    [
        ("PyTorch version: 2.3.1+cu121", "2.3.1", "12.1", "12.1.3.1"),
        ("torch==2.3.1", "2.3.1", "12.1", "12.1.3.1"),
        ("torch 2.5.1+cu121", "2.5.1+cu121", "12.1", "12.1.3.1"),
        ("torch 2.4.1+cu124", "2.4.1+cu124", "12.4", "12.4.2.65"),
        ("torch 2.5.1+cu118", "2.5.1+cu118", "11.8", None),
        ("torch 2.3.0a0+6ddf5cf85e.nv24.04", "2.3.0a0+6ddf5cf85e.nv24.4", None, None),
        ("torchvision==0.18.1", None, None, None),
        ("Driver Version: 535.54.03  CUDA Version: 12.2", None, None, None),
    ],
)
def test_torch_is_read_as_the_facts_know_it(text: str, torch: str | None, cuda: str | None, cublas: str | None) -> None:
    situation = explanation_of(text).read.situation
    assert (situation.torch, situation.cuda, situation.libraries.get("cublas")) == (torch, cuda, cublas)


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("GPU 0: NVIDIA H200", ["h200"]),
        ("在H20上训练", ["h20"]),
        ("8*H20-3e node", ["h20-3e"]),
        ("two RTX 4090 cards", ["rtx4090"]),
        ("T4 = A(10) l4", []),
        ("Tesla T4", ["t4"]),
        ("GTX 1080 Ti with CUDA capability sm_61", ["gtx1080ti"]),
        ("GeForce 9 with CUDA capability sm_61", ["unlisted"]),
    ],
)
def test_gpus_are_read(text: str, cards: Sequence[str]) -> None:
    assert [gpu.id for gpu in explanation_of(text).read.situation.gpus] == cards


def test_a_gpu_that_torch_has_no_code_for() -> None:
    lines = "Tesla P100 with CUDA capability sm_60 is not compatible with the current PyTorch installation.\n"
    listed = "The current PyTorch install supports CUDA capabilities sm_{} sm_80 sm_90.\n"
    assert causes(lines + listed.format("70")) == ["card-too-old"]
    assert causes(lines + listed.format("60")) == ["no-kernel-image"]


@pytest.mark.parametrize(
    ("unused", "others", "cause"),
    [
        ("64.00 MiB", "0.5", "gpu-memory"),
        ("4.00 GiB", "0.5", "gpu-memory-fragmented"),
        ("64.00 MiB", "60", "gpu-memory-others"),
    ],
)
def test_full_memory_fragmentation_and_other_processes_are_distinguished(unused: str, others: str, cause: str) -> None:
    own = 79.0 - float(others)
    line = (
        f"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 0.15 GiB is "
        f"free. Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. Of the allocated memory "
        f"10.00 GiB is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated."
    )
    assert causes(line) == [cause]


@pytest.mark.parametrize(
    ("tried", "cause"), [("800.00 MiB", "gpu-memory-fragmented"), ("6.00 GiB", "gpu-memory")], ids=["small", "large"]
)
def test_a_small_allocation_that_fails_next_to_much_unused_memory_shows_fragmentation(tried: str, cause: str) -> None:
    line = (
        f"CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.15 GiB of which 0.15 GiB is "
        "free. Of the allocated memory 67.00 GiB is allocated by PyTorch, and 8.00 GiB is reserved by PyTorch but "
        "unallocated."
    )
    assert causes(line) == [cause]


@pytest.mark.parametrize(
    ("free", "found"), [("0.2GiB", ["gpu-memory-others"]), ("9.80GiB", [])], ids=["of-others", "free"]
)
def test_the_free_memory_that_tensorflow_prints_shows_other_processes(free: str, found: list[str]) -> None:
    assert causes(f"Total memory: 10.92GiB\nFree memory: {free}") == found
    assert causes(f"totalMemory: 10.92GiB freeMemory: {free}") == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("Epoch: [0][10/5005] Time 8.53 ( 9.21) Data 8.31 ( 8.99)", ["dataloader-stalled"]),
        ("Epoch [1][50/7330] time: 2.345, data_time: 2.101, memory: 5012", ["dataloader-stalled"]),
        ("Epoch [1][50/7330] time: 2.345, data_time: 0.101, memory: 5012", []),
        ("Epoch 3 data time 2.101 (1.9)  batch time 2.345 (2.2)", ["dataloader-stalled"]),
        ("Epoch 3 data_time: 0.101  time: 2.345", []),
        ("Epoch: [0][0/5005] Time 8.53 ( 8.53) Data 8.31 ( 8.31)", []),
    ],
)
def test_printed_times_show_that_training_waits_for_data(line: str, found: list[str]) -> None:
    assert causes(f"{line}\ntraining is very slow on my V100, num_workers=4") == found
    assert causes(line) == []


def test_one_error_with_free_memory_does_not_hide_another_with_a_full_gpu() -> None:
    line = (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; 70.00 GiB already allocated; "
    )
    enough, full = (f"{line}{free} GiB free; 70.10 GiB reserved in total by PyTorch)" for free in ("9.00", "0.15"))
    assert causes(enough) == []
    assert causes(full) == causes(f"{enough}\n{full}") == causes(f"{full}\n{enough}") == ["gpu-memory"]


WORKER = (
    "RuntimeError: DataLoader worker (pid 3904) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit."
)


@pytest.mark.parametrize("other", ["postgres is up", "redis 7.2", "huge pages are off", "OpenJDK 17"])
def test_a_line_of_another_program_hides_a_hint_of_full_shared_memory_and_no_message(other: str) -> None:
    assert causes(f"{other}\n{WORKER}") == ["shm-too-small"]
    hint = "docker run pytorch/pytorch:2.4\nBus error (core dumped)"
    assert causes(hint) == ["shm-too-small"]
    assert causes(f"{other}\n{hint}") == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Loss scale reset to 128 on GPU 0", "loss-scale-collapsed"),
        ("changing loss scale to 65536 step 0", "loss-scale-collapsed"),
        ("the loss scale is reduced to 0.0625", "loss-scale-collapsed"),
        ("loss scale was set to 0.0625", "loss-scale-collapsed"),
        ("loss_scale = 1e-3 is what I use for the auxiliary loss", "loss-scale-collapsed"),
        ("it only shows CPUExecutionProvider on my laptop", "library-without-cuda"),
    ],
)
def test_a_line_that_only_looks_like_a_message_names_no_cause(text: str, cause: str) -> None:
    assert cause not in causes(text)


@pytest.mark.parametrize(
    "text",
    [
        "the loss scale drops until it reaches 0",
        "GradScaler: overflow, loss_scale = 1e-8",
        "loss scale adjusted to 0.0",
        "loss scale fell to 1.",
    ],
)
def test_a_loss_scale_that_fell_to_its_minimum(text: str) -> None:
    assert causes(text) == ["loss-scale-collapsed"]


# ---- ranks ----

TIMEOUT = (
    "[rank0]:[E1 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n"
)


def test_the_rank_that_failed_first_is_found() -> None:
    root = "Root Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 3)\n  exitcode  : {} (pid: 7)\n"
    found = explanation_of(TIMEOUT + root.format(-11))
    assert found.read.first and (found.read.first.rank, found.read.first.exit) == (3, -11)
    assert [match.id for match in found.matches] == ["rank-died"]
    by_node = explanation_of(
        "E0000 torch.distributed.elastic failed (exitcode: -9) local_rank: 3 (pid: 7) of binary: python\n"
    )
    assert by_node.read.first and (by_node.read.first.rank, by_node.read.first.local) == (None, 3)
    # a rank that its own watchdog aborted did not fail first
    assert causes(TIMEOUT + root.format(-6)) == ["collective-timeout"]


def test_consequences_of_a_dead_rank_are_not_a_cause() -> None:
    died = "[rank2]: ValueError: bad batch\n"
    assert causes(died + TIMEOUT) == ["rank-died"]
    assert causes(TIMEOUT + died) == ["collective-timeout"]
    assert causes("[rank2]: torch.OutOfMemoryError: CUDA out of memory.\n" + TIMEOUT) == ["gpu-memory"]


# ---- advice on what to enable ----


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("ncclSystemError: System call failed", "NCCL_DEBUG=INFO"),
        (TIMEOUT, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ("traceback : To enable traceback see: https://pytorch.org/docs", "errors.record"),
        ("  error_file: <N/A>", "LOGLEVEL=INFO"),
        ("CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING=1"),
        ("Segmentation fault (core dumped)", "PYTHONFAULTHANDLER=1"),
        ("step 9 loss: nan", "set_detect_anomaly"),
        ("nvprof is not supported on devices with compute capability 8.0 and higher", "Nsight Systems"),
        ("exits with return code = -7", "/dev/shm"),
    ],
)
def test_advice_where_a_log_holds_too_little(text: str, word: str) -> None:
    assert any(word in line for line in explanation_of(text).advice)


def test_no_advice_for_what_is_on_already() -> None:
    assert not any("NCCL_DEBUG" in line for line in explanation_of("a NCCL INFO Bootstrap\nncclSystemError").advice)
    assert explanation_of("step 1 loss 2.3\nstep 2 loss 2.2\n").advice == ()


# ---- the command ----


def test_json() -> None:
    document = json.loads(run("--json", "-", stdin=H20 + CRASH))
    (match,) = document["causes"]
    assert document["state"] == "known"
    assert (match["advisory"], match["lines"]) == (
        "cublas-hopper-fpe",
        [{"file": None, "line": 3, "text": CRASH.strip()}],
    )
    assert match["command"] == "envbuild test h20 --probe gemm.crash"
    assert match["change"] == {"pins": {"cublas": ">=12.4.5.8"}}
    assert (match["profile_change"], match["profile"]) == ({"pins": {"cublas": "12.4.5.8"}}, "h20")
    assert 0 < match["confidence"] <= 1 and match["remedy"]
    cause = json.loads(run("--json", "-", stdin="EADDRINUSE\n"))["causes"][0]
    assert (cause["id"], cause["advisory"]) == ("port-in-use", None)


def test_an_unknown_cause_is_reported() -> None:
    assert "No known cause" in run("-", stdin="ValueError: bad batch\n")
    assert json.loads(run("--json", "-", stdin="ValueError: bad batch\n"))["state"] == "unknown"


def test_a_file_that_is_not_there() -> None:
    done = CliRunner().invoke(cli, ["explain", "/no/such.log"])
    assert isinstance(done.exception, FileError)


def test_nothing_of_a_log_reaches_the_terminal_but_its_lines() -> None:
    secrets = "HF_TOKEN=hf_abcdefghijklmnopqrst password: hunter22 https://me:pw12345@host/\n"
    text = f"API_KEY=abc123 on another line\n{secrets.strip()} EADDRINUSE \x1b[31mred\x1b]0;title\x07\x9b2J\n"
    shown = run("-", stdin=text) + run("--json", "-", stdin=text)
    for hidden in ("abc123", "hf_abc", "hunter22", "pw12345", "\x1b", "\x07", "\x9b"):
        assert hidden not in shown
    assert "EADDRINUSE" in shown


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ("password=p@ssw0rd1 EADDRINUSE", "ssw0rd"),
        ("passphrase: tulip EADDRINUSE", "tulip"),
        ("run --password hunter22 EADDRINUSE", "hunter22"),
        ("https://u:ab@h/x EADDRINUSE", "ab@"),
        ("https://:tok@h/x EADDRINUSE", "tok"),
        ("https://token-only@h/x EADDRINUSE", "token-only"),
        ("EADDRINUSE github_pat_11ABCDEFG0123456789_x", "11ABC"),
        ("EADDRINUSE sk-abcdefghijklmnop1234", "abcdefgh"),
        ("EADDRINUSE nvapi-abcdefghijklmnop1234", "abcdefgh"),
    ],
)
def test_a_secret_in_a_line_is_not_repeated(line: str, hidden: str) -> None:
    redacted = safe_line(line)
    assert hidden not in redacted
    assert "EADDRINUSE" in redacted and "***" in redacted


def test_the_document_itself_holds_no_secret() -> None:
    found = explanation_of("OSError: [Errno 98] Address already in use (HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz)\n")
    assert "hf_abc" not in repr(explanation_document.document(found))


def test_a_secret_in_a_line_of_a_possible_cause_is_not_repeated() -> None:
    text = "torch==2.6.0\nGPU 0: NVIDIA H20\nrun --password hunter22: Floating point exception (core dumped)\n"
    document = run("--json", "-", stdin=text)
    assert json.loads(document)["possible"] and "hunter22" not in document


def test_the_profile_of_the_gpu_is_inserted_only_into_the_remedy() -> None:
    assert cause_ranking.of_profile("`envbuild show NAME` or NCCL_SOCKET_IFNAME=eth0", "h20") == (
        "`envbuild show h20` or NCCL_SOCKET_IFNAME=eth0"
    )
