"""Extracts the facts of a log: versions, GPUs, driver, and the rank that failed first. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from packaging.version import InvalidVersion, Version

from envbuild.explain import (
    gpu_mentions,
    log_versions,
    prose_statements,
    rank_failure_and_last_collectives,
    stack_frames,
)
from envbuild.explain.log_reader_and_search import TRIED, Line, Log, log_pattern
from envbuild.explain.log_versions import LogVersions
from envbuild.explain.rank_failure_and_last_collectives import Failure, Works
from envbuild.facts import database, log_signatures
from envbuild.facts.advisory_model import Situation
from envbuild.facts.gpu_fact_types import UNLISTED, Gpu
from envbuild.facts.log_signatures import OperationClass, SymptomClass

_CAPABILITY = r"cuda capability (?:sm_)?(\d{1,2})\.?(\d)\b"
_ARCHES = r"install supports cuda capabilities sm_"
_RANGE = r"^\s{0,8}\((\d\.\d)\) - \(\d{1,2}\.\d\)"
_TOO_OLD = r"too old to be supported by the triton|no longer supports this gpu because it is too old"
_WORLD = r"\b(?:world[_ -]?size|nranks|n_ranks|num_processes)[ =:'\"]{1,4}(\d{1,5})\b"
_RANKS = (
    (r"\bnproc[-_]per[-_]node[ =:'\"]{1,4}(\d{1,5})\b", 0),
    (r"\bgpu (\d{1,2}): nvidia", 1),
    (r"\[rank ?(\d{1,5})\]", 1),
)
_PARTS = r"tried to allocate (?P<tried>[0-9.]{1,8} [kmg]i?b)"
_UNUSED = r"(?P<unused>[0-9.]{1,8} [kmg]i?b) is reserved by pytorch but unallocated"
_OLD = r"(?P<allocated>[0-9.]{1,8} [kmg]i?b) already allocated;.{0,80}; (?P<reserved>[0-9.]{1,8} [kmg]i?b) reserved"
_CACHED = r"(?P<held>[0-9.]{1,8} [kmg]i?b) already allocated;.{0,80}; (?P<unused>[0-9.]{1,8} [kmg]i?b) cached"
"""The message of torch before 1.5."""
_FREE = r"(?P<free>[0-9.]{1,8} [kmg]i?b|0 bytes) (?:is )?free"
_HELD = r"(?P<held>[0-9.]{1,8} [kmg]i?b) is allocated by pytorch"
_TOTAL = r"(?:total capaci?ty of |gpu \d{1,3}; )(?P<total>[0-9.]{1,8} [kmg]i?b)"
_SIZE = r"\d [kmg]i?b\b|^[kmg]i?b\b"
_MOST_BROKEN = 8
"""Maximum number of lines into which a terminal may break one message about memory."""
_OWN = r"this process has (?P<own>[0-9.]{1,8} [kmg]i?b) memory in use"
TORCHES = 3
"""Maximum number of torch versions that are considered for one log."""
_UNITS = {"k": 2**-20, "m": 2**-10, "g": 1.0}


Mention = tuple[Gpu, int]
"""A GPU that the log names, and the number that is written at its name, or 0."""


@dataclass(frozen=True)
class Reading:
    """The facts of a log.

    `states`: each log_signatures.State that is true. `first`: the first failure, None if the log shows none. `works`:
    the progress of the ranks. `error`: the line of the exception that ended Python, None if the log has none.
    `more_gpus`: whether there may be more GPUs than the log shows. `stated`: the libraries whose versions are in the
    log itself; the versions of the others are inferred from torch's version.

    `situations`: one for each combination of the possible versions. `situation`: the facts that are the same in all of
    these. `candidates`: torch or a library -> its versions, if these combinations differ in them. `loaded`: the
    libraries whose loaded version the log shows. `crashed_in`: the components of the innermost frames in the stack of a
    crash. `symptoms` and `operations`: the classes of failures and of operations that the log shows (symptoms.yaml).
    `statements`: what the reporter states in prose (statements.yaml) -> the lines.
    """

    situation: Situation
    situations: tuple[Situation, ...]
    candidates: Mapping[str, tuple[str, ...]]
    states: frozenset[str]
    first: Failure | None
    works: Works
    error: Line | None
    more_gpus: bool
    stated: frozenset[str]
    loaded: frozenset[str]
    crashed_in: frozenset[str]
    symptoms: frozenset[SymptomClass] = frozenset()
    operations: frozenset[OperationClass] = frozenset()
    statements: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)


def read(log: Log) -> Reading:
    """Return the facts in a log: versions, GPUs, symptoms, operations, stack frames and failures."""
    first, versions = rank_failure_and_last_collectives.first_failure(log), log_versions.read(log)
    mentioned = tuple(gpu_mentions.mentioned_gpus(log))
    situations = tuple(_situations(log, versions, mentioned))
    situation = _common(situations)
    stack, statements = stack_frames.read(log), prose_statements.ProseReader(log).statements()
    stated = {row.symptom for row in log_signatures.statements() if row.symptom and row.statement in statements}
    symptoms = frozenset(_symptoms(log, stack.hang, bool(situation.gpus))) | stated
    states = {*_memory(log), *_supported(log, situation)}
    works = rank_failure_and_last_collectives.works(log, situation.gpu_count)
    states |= {state for state, holds in (
        (
            "rank-failed-first",
            _RANK_GONE in statements or (first and rank_failure_and_last_collectives.by_itself(log, first)),
        ),
        ("crash-in-cpu-math", "cpu-math" in stack.crashed_in),
        ("hang-stack", stack.hang),
        ("interrupted", log.has([log_pattern(_INTERRUPTED)])),
        ("collectives-differ", works.mismatched),
        ("copy-differs", _copy_differs(log)),
        ("memory-grows", _memory_grows(log)),
        ("loss-scale-shrinks", _loss_scale_shrinks(log)),
        ("traceback-cut", _traceback_cut(log)),
        ("fragmented", "works-with-allocator-setting" in statements),
        ("input-bound", "slow" in symptoms and _input_bound(log)),
        ("epochs-get-faster", _epochs_get_faster(log)),
        ("memory-of-others", not _MEMORY_OF_OTHERS.isdisjoint(statements)),
    ) if holds}  # fmt: skip
    return Reading(
        situation, situations, _candidates(situations, situation), frozenset(states), first,
        works, _error(log), _count(log, mentioned)[1],
        frozenset(versions.libraries(situation.cuda)) & frozenset(situation.libraries), frozenset(versions.loaded),
        stack.crashed_in, symptoms, frozenset(_operations(log)), statements,
    )  # fmt: skip


_MEMORY_OF_OTHERS = frozenset({"others-hold-memory", "memory-free-after-closing", "runs-after-closing"})
"""The statements that show that other processes hold the GPU's memory."""
_RANK_GONE = "process-gone-rest-hangs"
"""The statement that a process of a distributed run ended first."""
_INTERRUPTED = r"^(?:\S{1,40}: )?(?:KeyboardInterrupt|\^CTraceback)|received signal SIGINT"
"""Shows that the user interrupted the program, for example because it hung."""


def _symptoms(log: Log, hang: bool, gpus: bool) -> Iterator[SymptomClass]:
    """Yields the symptoms in the log. `hang`: whether a stack shows a hang. `gpus`: whether the log names GPUs."""
    heard, denials = log_signatures.hearsay(), log_signatures.denials()
    of_gpu = gpus or log.has(log_signatures.gpu_context())
    for row in log_signatures.symptoms():
        shown = log.has(row.lines, heard, denials) or (hang and row.symptom == "hang")
        able = (of_gpu or not row.of_gpu) and (not row.needs or log.has(row.needs))
        if shown and able and not log.has(row.unless):
            yield row.symptom


def _operations(log: Log) -> Iterator[OperationClass]:
    return (row.operation for row in log_signatures.operation_patterns() if log.has(row.lines))


def _situations(log: Log, versions: LogVersions, mentioned: Sequence[Mention]) -> Iterator[Situation]:
    """Returns the possible combinations of versions. A torch release adds the versions of the libraries that it
    requires, unless the log has a different version of a library."""
    words: dict[str, set[str]] = {"environment": set(), "features": set(), "extensions": set()}
    for word in log_signatures.words():
        if log.has(word.lines) and not log.has(word.unless):
            words[word.kind].add(word.word)
    bare = Situation(
        gpus=_gpus(log, mentioned),
        driver=versions.driver,
        gpu_count=_count(log, mentioned)[0],
        environment=frozenset(words["environment"]),
        features=frozenset(words["features"]),
        extensions=frozenset(words["extensions"]),
    )
    torches = dict.fromkeys(_torch(version, versions.cuda) for version in versions.torch or (None,))
    labelled = {torch.partition("+")[0] for torch, _ in torches if torch and "+" in torch}
    for torch, cuda in [found for found in torches if found[0] not in labelled][:TORCHES]:
        release = database.torch_release(torch) if torch else None
        brought = database.libraries_of(release) if release else database.libraries_of_local_build(torch or "")
        built = replace(bare, torch=torch, cuda=cuda or (release.cuda if release else None))
        for libraries in log_versions.combinations(versions.libraries(cuda)):
            for others in log_versions.combinations(versions.others):
                yield replace(built, libraries=brought | libraries, distributions=others)


def _common(situations: Sequence[Situation]) -> Situation:
    first = situations[0]
    return replace(
        first,
        torch=_agreed([found.torch for found in situations]),
        cuda=_agreed([found.cuda for found in situations]),
        libraries=dict(
            item for item in first.libraries.items() if all(item in o.libraries.items() for o in situations)
        ),
        distributions=dict(
            item for item in first.distributions.items() if all(item in o.distributions.items() for o in situations)
        ),
    )


def _agreed(values: Sequence[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None


def _candidates(situations: Sequence[Situation], common: Situation) -> dict[str, tuple[str, ...]]:
    known = [{**({"torch": found.torch} if found.torch else {}), **found.libraries} for found in situations]
    agreed = {*common.libraries, *(["torch"] if common.torch else [])}
    names = dict.fromkeys(name for versions in known for name in versions if name not in agreed)
    return {name: tuple(dict.fromkeys(found[name] for found in known if name in found)) for name in names}


def _torch(stated: str | None, cuda: str | None) -> tuple[str | None, str | None]:
    """Returns the version of the distribution, and its CUDA version. `torch.__version__` 2.3.1+cu121 is version 2.3.1
    on PyPI if that wheel was built for CUDA 12.1."""
    try:
        version = Version((stated or "").rstrip(".+"))
    except InvalidVersion:
        return None, cuda
    local = database.cuda_of_label(str(version))
    cuda = cuda or local
    release = database.torch_release(version.public)
    plain = release is not None and cuda in (None, release.cuda) and (version.local is None or local is not None)
    if plain or version.local is not None:
        return (version.public if plain else str(version)), cuda
    label = "" if cuda is None or release is None else f"+cu{cuda.replace('.', '')}"
    return f"{version.public}{label}", cuda


def _gpus(log: Log, mentioned: Sequence[Mention]) -> tuple[Gpu, ...]:
    """Returns the GPUs that the log is about, except GPUs on which the program worked, according to the log."""
    found = {gpu.id: gpu for gpu, _ in mentioned}
    if not found and not gpu_mentions.names_a_gpu(log):
        named = [f"{match[1]}.{match[2]}" for _, match in log.find(log_pattern(_CAPABILITY), 20)]
        named += [card.compute_capability for card in log_signatures.gpu_patterns() if log.has([card.pattern])]
        found = {capability: _unlisted(capability) for capability in named}
    return tuple(found.values())


def _supported(log: Log, situation: Situation) -> Iterator[str]:
    """Yields the states that are true if torch has no code for a GPU. card-below-torch: torch has no code for the GPU,
    but for a newer one, according to the range or list that it printed or to its release; or Triton reports that the
    GPU is too old. card-not-in-torch: the list that torch printed lacks the GPU. card-newer-than-cuda: torch was built
    with a CUDA release older than the first one that supports the GPU."""
    if situation.cuda and any(_first_cuda(gpu) > Version(situation.cuda) for gpu in situation.gpus):
        yield "card-newer-than-cuda"
    cards = [Version(gpu.compute_capability) for gpu in situation.gpus]
    for _, match in log.find(log_pattern(_RANGE), 1):
        if any(card < Version(match[1]) for card in cards):
            yield "card-below-torch"
        return
    release = database.torch_release(situation.torch) if situation.torch else None
    arches, printed = [Version(arch) for arch in (release.arch_list if release else ())], False
    for line, _ in log.find(log_pattern(_ARCHES), 1):
        arches = [Version(f"{arch[:-1]}.{arch[-1]}") for arch in re.findall(r"sm_(\d{2,3})", line.text)]
        printed = bool(arches)
    without = [card for card in cards if not any(a.major == card.major and a.minor <= card.minor for a in arches)]
    if any(card < max(arches, default=card) for card in without) or log.has([log_pattern(_TOO_OLD)]):
        yield "card-below-torch"
    if printed and without:
        yield "card-not-in-torch"


def _first_cuda(gpu: Gpu) -> Version:
    """The first CUDA that compiles code for the GPU, from a GPU with the same compute capability; 0 if unknown."""
    same = [gpu, *(other for other in database.gpus().values() if other.compute_capability == gpu.compute_capability)]
    known = (Version(other.first_cuda) for other in same if other.first_cuda and other.id != UNLISTED)
    return min(known, default=Version("0"))


def _unlisted(capability: str) -> Gpu:
    return Gpu(
        id=UNLISTED, names=(UNLISTED,), family=UNLISTED, compute_capability=capability, memory_gb=(),
        features=frozenset(), first_cuda="11.0", datacentre=False, source=(UNLISTED,), status="unconfirmed",
        as_of="2026-11",
    )  # fmt: skip


def _count(log: Log, mentioned: Sequence[Mention]) -> tuple[int | None, bool]:
    """Returns the number of GPUs that work together (None unless the log shows several), and whether there may be
    more."""
    sizes = [int(match[1]) for _, match in log.find(log_pattern(_WORLD), 50)]
    seen = [count for _, count in mentioned]
    seen += [int(match[1]) + more for pattern, more in _RANKS for _, match in log.find(log_pattern(pattern), 50)]
    # the highest rank with a line in the log need not be the last rank of the job
    return max((count for count in sizes or seen if count > 1), default=None), not sizes


_RAISED = (
    r"^(?:\[rank ?\d{1,5}\]:? ?)?(?:[a-z_][\w.]{0,120}\.)?[a-z_]\w{0,60}(?:error|exception|interrupt|exit)"
    r"(?:: .{0,2000})?$"
)
_LAUNCHER = r"childfailederror|calledprocesserror"


def _error(log: Log) -> Line | None:
    """Returns the line of the exception that ended Python: the last line that begins with the name of an exception."""
    lines = [line for line, _ in log.find(log_pattern(_RAISED), TRIED, [log_pattern(_LAUNCHER)])]
    return lines[-1] if lines else None


_FRAME = r"\S{1,200}\.py\W{1,3}line \d{1,6}"
_EXCEPTION = r"(?:^|[\s:\]|])(?:[a-z_][\w.]{0,120}\.)?[a-z_]\w{0,60}(?:error|exception|interrupt|exit|warning)\b: ?\S"
_LAST = 3
"""A traceback is at the end of a log if at most this number of lines follow its last frame."""


def _traceback_cut(log: Log) -> bool:
    """Whether the log ends in the frames of Python's traceback, without the exception."""
    frames = log.find(log_pattern(_FRAME), TRIED)
    if not frames:
        return False
    last = frames[-1][0]
    after = [line for line in log.lines if line.file == last.file and line.number > last.number and line.text.strip()]
    return len(after) <= _LAST and not any(log_pattern(_EXCEPTION).search(line.text) for line in after)


_CONTEXT, _SHARE_OF_OTHERS = 2.0, 0.25
"""Thresholds for memory that belongs to other processes: a number of GiB, and a share of the GPU's memory. Less memory
may be the CUDA context of the process itself, which may be missing in the sum."""
_PIECES = 0.15
"""Fragmentation is the cause only if at least this share of torch's memory is unused; a few percent are normal."""
_MANY_TIMES, _PIECES_OF_SMALL = 8, 0.1
"""A smaller share is enough if the unused memory is this many times the allocation that failed."""
_SHARE_FREE = 0.1
"""If less than this share of the GPU's memory is free, the GPU is full, even if the allocation is smaller."""


def _memory(log: Log) -> Iterator[str]:
    """Yields the states of an out-of-memory error. fragmented: torch's unused reserved memory would have been enough,
    and is at least the share _PIECES of torch's memory, or _PIECES_OF_SMALL of it and _MANY_TIMES the allocation.
    memory-free: the GPU's free memory would have been enough, so the log does not show why the allocation failed, and
    no other error shows a full GPU. memory-of-others: other processes use much of the GPU's memory."""
    enough, full = False, False
    found = log.find(log_pattern(_PARTS), 20)
    places = {id(line): place for place, line in enumerate(log.lines)} if found else {}
    for line, match in found:
        text = match.string
        for after in log.lines[places[id(line)] + 1 : places[id(line)] + _MOST_BROKEN]:
            if (
                after.file != line.file
                or not log_pattern(_SIZE).search(after.text)
                or log_pattern(_PARTS).search(after.text)
            ):
                break
            text = f"{text.rstrip()} {after.text.strip()}"
        sizes = {"tried": _gib(match["tried"])}
        for pattern in (_UNUSED, _OLD, _CACHED, _TOTAL, _FREE, _HELD, _OWN):
            parts = log_pattern(pattern).search(text)
            sizes |= {name: _gib(size) for name, size in parts.groupdict().items()} if parts else {}
        unused = sizes.get("unused", sizes.get("reserved", 0.0) - sizes.get("allocated", 0.0))
        own = sizes.get("own", sizes.get("reserved", sizes.get("held", 0.0) + unused))
        held = unused + sizes.get("held", sizes.get("allocated", 0.0))
        free, total = sizes.get("free", 0.0), sizes.get("total", 0.0)
        if unused >= max(sizes["tried"], _PIECES * held) or (
            unused >= max(_MANY_TIMES * sizes["tried"], _PIECES_OF_SMALL * held) > 0
        ):
            yield "fragmented"
        elif free >= max(sizes["tried"], _SHARE_FREE * total):
            enough = True
        elif "free" in sizes:
            full = True
        others = total - free - own
        if own and others > max(_CONTEXT, sizes["tried"], _SHARE_OF_OTHERS * total):
            yield "memory-of-others"
    if enough and not full:
        yield "memory-free"
    yield from _memory_of_nobody(log)


_USED_OF_TOTAL = r"\| {0,9}(?P<used>\d{1,6})MiB / {1,9}(?P<total>\d{4,6})MiB \|"
_OF_PROCESS = r"^\|.{0,120} (?P<process>\d{1,6})MiB \|\s{0,8}$"
_NO_PROCESS = r"no running processes found"
_OCCUPIED = r"memory capacity is unbalanced\b.{0,20}occupied by other processes"
_FREE_OF_DEVICE = r"\bfree ?memory: ?(?P<free>[\d.]{1,8} ?[kmg]i?b)"
_TOTAL_OF_DEVICE = r"\btotal ?memory: ?(?P<total>[\d.]{1,8} ?[kmg]i?b)"
_FREE_AT_START = 0.25
"""TensorFlow prints the memory of each GPU before it allocates any. If less than this share is free, other processes
hold the memory."""
_FREE_OF_TOTAL = r"free memory on device.{0,20}\((?P<free>[\d.]{1,8})/(?P<total>[\d.]{1,8}) gib\) on startup"


def _memory_of_nobody(log: Log) -> Iterator[str]:
    """Yields memory-of-others in four cases: nvidia-smi shows that more than half of the GPU's memory is used, but not
    by a listed process; an inference engine found less than half of the memory free when it started; TensorFlow found
    less than _FREE_AT_START free; or the engine states that other processes occupy some of the GPUs."""
    if log.has([log_pattern(_OCCUPIED)]):
        yield "memory-of-others"
    for _, match in log.find(log_pattern(_FREE_OF_TOTAL), 20):
        if float(match["free"]) < float(match["total"]) / 2:
            yield "memory-of-others"
    totals = {
        (line.file, line.number): _gib(match["total"]) for line, match in log.find(log_pattern(_TOTAL_OF_DEVICE), 20)
    }
    for line, match in log.find(log_pattern(_FREE_OF_DEVICE), 20):
        total = totals.get((line.file, line.number), totals.get((line.file, line.number - 1), 0.0))
        if _gib(match["free"]) < _FREE_AT_START * total:
            yield "memory-of-others"
    used = [(int(match["used"]), int(match["total"])) for _, match in log.find(log_pattern(_USED_OF_TOTAL), 20)]
    listed = sum(
        int(match["process"]) for line, match in log.find(log_pattern(_OF_PROCESS), 50) if " / " not in line.text
    )
    known = listed or log.has([log_pattern(_NO_PROCESS)])
    if known and used and sum(some for some, _ in used) - listed > max(total for _, total in used) / 2:
        yield "memory-of-others"


_STEP_TIMES = (
    r"\btime:? {0,4}(?P<step>\d[\d.]{0,8}).{0,24}?\bdata(?:[_ ]time)?:? {0,4}(?P<data>\d[\d.]{0,8})",
    r"\bdata(?:[_ ]time)?:? {0,4}(?P<data>\d[\d.]{0,8}).{0,24}?"
    r"\b(?:batch|step|iter)?[_ ]?time:? {0,4}(?P<step>\d[\d.]{0,8})",
)
"""The times that training loops print: of a step, and of the part of it in which the step waits for data."""
_FIRST_STEP = r"\[ {0,6}[01]/\d{1,9}\]|\biter(?:ation)?:? {0,2}[01]\b|\bstep:? {0,2}[01]\b"
_INPUT_BOUND = 0.5


def _input_bound(log: Log) -> bool:
    """Whether training spends at least the share _INPUT_BOUND of its steps waiting for data, by the times that it
    prints: the median of up to 20 lines. The first step does not count, because it waits for the workers to start."""
    times = [
        (_number(match["step"]), _number(match["data"]))
        for line, match in next(filter(None, (log.find(log_pattern(each), 20) for each in _STEP_TIMES)), [])
        if not log_pattern(_FIRST_STEP).search(line.text)
    ]
    shares = sorted(data / step for step, data in times if 0 < data <= step)  # the wait is a part of the step
    return bool(shares) and shares[len(shares) // 2] >= _INPUT_BOUND


_EPOCH_TIME = (
    r"\bepochs?[ :\[(#]{1,3}(?P<epoch>\d{1,5})\b.{0,120}?\b(?P<step>\d{1,8})/(?P<steps>\d{1,8}) "
    r"\[(?:(?P<hours>\d{1,3}):)?(?P<minutes>\d{1,2}):(?P<seconds>\d\d)<"
)
_TIMES_FASTER = 3


def _epochs_get_faster(log: Log) -> bool:
    """Whether the first epoch took at least _TIMES_FASTER times as long as the last one, by the progress bars of tqdm.
    Later epochs are faster if they find the files in the memory of the host."""
    took = dict[str, int]()
    for _, match in log.find(log_pattern(_EPOCH_TIME), TRIED):
        if match["step"] == match["steps"]:
            seconds = int(match["hours"] or 0) * 3600 + int(match["minutes"]) * 60 + int(match["seconds"])
            took.setdefault(match["epoch"], seconds)
    first, *later = took.values() or (0,)
    return bool(later) and first >= _TIMES_FASTER * later[-1]


_NEW_LOSS_SCALE = (
    r"\b(?:sett?|reduc|decreas|lower|adjust|updat|chang)\w{0,3}\b.{0,24}?\bto:? ?"
    r"(?P<scale>\d{1,12}(?:\.\d{1,24})?(?:e[-+]?\d{1,4})?)(?![\d.])"
)
_LOSS_SCALES, _SMALL_LOSS_SCALE = 5, 1 / 64


def _loss_scale_shrinks(log: Log) -> bool:
    """Whether the last loss scales that the log sets become smaller _LOSS_SCALES times in a row, and the last one is
    below _SMALL_LOSS_SCALE: then the gradients overflow at every scale. A healthy run settles at a larger scale."""
    row = list[float]()
    for line in (line for line in log.lines if "scale" in line.text and " to" in line.text):
        if match := log_pattern(_NEW_LOSS_SCALE).search(line.text):
            scale = float(match["scale"])
            row = [*row[-_LOSS_SCALES:], scale] if row and scale < row[-1] else [scale]
    return len(row) > _LOSS_SCALES and row[-1] < _SMALL_LOSS_SCALE


_ON_GPU = r"device='cuda:(\d{1,2})'"
_TALL = 60
"""Maximum number of lines that are read of one printed tensor."""


def _copy_differs(log: Log) -> bool:
    """Whether the log prints a tensor with a value other than zero on one GPU, and on another GPU an all-zero tensor
    with as many printed values, or fewer."""
    printed = list(_tensors(log))
    zeros = [(gpu, len(values)) for gpu, values in printed if values and not any(map(_number, values))]
    return any(
        gpu != other and size <= len(values) and any(map(_number, values))
        for gpu, size in zeros
        for other, values in printed
    )


def _tensors(log: Log) -> Iterator[tuple[str, list[str]]]:
    """Yields the index of the GPU and the printed values of each tensor in the log."""
    wanted = [(line, match) for line, match in log.find(log_pattern(_ON_GPU), 20) if "tensor(" in line.text]
    rest = [(line, match) for line, match in log.find(log_pattern(_ON_GPU), 20) if "tensor(" not in line.text]
    for line, match in wanted:
        begin = line.text.rindex("tensor(", 0, match.start()) if "tensor(" in line.text[: match.start()] else 0
        yield match[1], _values(line.text[begin : match.start()])
    places = {id(line): place for place, line in enumerate(log.lines)} if rest else {}
    for line, match in rest:
        text = line.text[: match.start()]
        for above in reversed(log.lines[max(0, places[id(line)] - _TALL) : places[id(line)]]):
            text = above.text + " " + text
            if "tensor(" in above.text:
                yield match[1], _values(text[text.rindex("tensor(") :])
                break
            if len(text) > _LONG_TENSOR:
                break


_LONG_TENSOR = 10_000
"""Maximum number of characters that are read of one printed tensor."""


def _values(text: str) -> list[str]:
    """Returns the printed values of a tensor. Of a large tensor, which torch prints only in part, only one value is
    returned: the first that is not zero, or else zero."""
    values = re.findall(r"-?\d[\d.e+-]{0,20}", text)
    return values if "..." not in text else [next((value for value in values if _number(value)), "0.")]


_AMOUNT = r"[ :=]{1,4}(\d{1,12}(?:\.\d{1,6})?) ?([kmgt]?)i?b?\b"
_USED = (
    r"\b(?:rss|vms|uss|(?:cpu|host|ram|system|resident|virtual)[ _-]?(?:mem(?:ory)?|ram)?|mem(?:ory)?)"
    rf"(?:[ _-]?(?:usage|used|consumption|allocated))?{_AMOUNT}",
    rf"\bmem(?:ory)?\b[^;|,]{{0,50}}\b(?:current|used|usage|allocated|in use){_AMOUNT}",
)
_SERIES, _GROWN, _SHARE = 4, 1.25, 0.9
"""Thresholds for growing memory: number of values, last value divided by the first, and share of steps that do not
shrink."""


def _memory_grows(log: Log) -> bool:
    """Whether the amounts of used memory in the log grow from line to line."""
    return any(_series_grows(log, pattern) for pattern in _USED)


def _series_grows(log: Log, pattern: str) -> bool:
    found = [(match[2].lower(), _number(match[1])) for _, match in log.find(log_pattern(pattern), TRIED)]
    for unit in {unit for unit, _ in found}:
        values = [value for other, value in found if other == unit]
        grown = sum(after >= before for before, after in pairwise(values))
        if len(values) >= _SERIES and values[-1] >= _GROWN * values[0] > 0 and grown >= _SHARE * (len(values) - 1):
            return True
    return False


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _gib(text: str) -> float:
    unit = text.lstrip("0123456789. ")
    try:
        return float(text.removesuffix(unit)) * _UNITS.get(unit[:1].lower(), 0.0)
    except ValueError:
        return 0.0
