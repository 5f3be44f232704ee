from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from envbuild.util import host_processes
from envbuild.util.errors import Interrupted
from envbuild.util.host_processes import LineListeners, ProcessMissing, ProcessTimeout, Stop, run

BOTH = "import sys; sys.stdout.write('o' * 1_000_000); sys.stderr.write('e' * 1_000_000); sys.exit(3)"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def gone(file: Path) -> bool:
    """Whether the process whose number is in the file has ended; waits a moment for it."""
    for _ in range(100):
        if file.exists() and file.read_text(encoding="utf-8").strip():
            break
        time.sleep(0.01)
    number = int(file.read_text(encoding="utf-8"))
    for _ in range(50):
        status = Path(f"/proc/{number}/stat")
        if not status.exists() or status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    os.kill(number, 9)
    return False


def test_a_megabyte_on_both_pipes_does_not_deadlock() -> None:
    done = run(python(BOTH), timeout=20)
    assert (done.code, len(done.stdout), len(done.stderr)) == (3, 1_000_000, 1_000_000)


def test_a_megabyte_goes_in_and_comes_out() -> None:
    text = "line\n" * 200_000
    assert run(["cat"], stdin=text, timeout=20).stdout == text


def test_a_child_that_reads_nothing_is_accepted() -> None:
    assert run(["true"], stdin="x" * 1_000_000, timeout=20).code == 0


def test_without_input_stdin_is_empty() -> None:
    assert run(["cat"], timeout=20).stdout == ""


def test_events_come_by_a_pipe_of_their_own() -> None:
    """A megabyte is written to each of three pipes. The process's own child does not keep the pipe open."""
    lines: list[str] = []
    code = "import os, subprocess; fd = int(os.environ['ENVBUILD_EVENTS']); os.write(fd, b'first\\n'); "
    code += "os.write(1, b'o' * 1_000_000); os.write(2, b'e' * 1_000_000); os.write(fd, b'x' * 1_000_000 + b'\\n'); "
    code += "subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    begin = time.monotonic()
    done = run(python(code), listeners=LineListeners(events=lines.append), timeout=20)
    assert (done.code, len(done.stdout), len(done.stderr)) == (0, 1_000_000, 1_000_000), done.stderr[-500:]
    assert [len(line) for line in lines] == [5, 1_000_000]
    assert time.monotonic() - begin < 8


def test_only_the_program_has_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_processes.EVENTS, "1")
    assert run(["sh", "-c", "echo $ENVBUILD_EVENTS"]).stdout == "\n"
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ProcessMissing):
            run(["/no/such/program"], listeners=LineListeners(events=lambda line: None))
        run(["true"], listeners=LineListeners(events=lambda line: None))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_lines_of_stderr_come_as_they_are_written() -> None:
    lines: list[str] = []
    run(["sh", "-c", "echo one >&2; echo out; printf two >&2"], listeners=LineListeners(stderr=lines.append))
    assert lines == ["one", "two"]


def test_lines_of_stdout_come_too() -> None:
    lines: list[str] = []
    done = run(["sh", "-c", "echo one >&2; echo out; printf two"], listeners=LineListeners(stdout=lines.append))
    assert (lines, done.stdout) == (["out", "two"], "out\ntwo")


def test_the_environment_is_added_to() -> None:
    done = run(["sh", "-c", 'echo "$ADDED" "$HOME"'], env={"ADDED": "yes"})
    assert done.stdout.split() == ["yes", os.environ["HOME"]]


def test_bytes_that_are_not_text_do_not_stop_it() -> None:
    assert run(["sh", "-c", r"printf '\377\n'"]).stdout == "\N{REPLACEMENT CHARACTER}\n"


def test_no_shell_reads_the_arguments() -> None:
    assert run(["echo", "$(id)", "a b", "*"]).stdout == "$(id) a b *\n"


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ProcessMissing, match="no-such-program") as caught:
        run(["no-such-program", "--flag"])
    assert caught.value.code == 6


@pytest.mark.parametrize("mode", [0o600, 0o700])
def test_a_program_that_cannot_be_started_is_named(tmp_path: Path, mode: int) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    program.chmod(mode)
    with pytest.raises(ProcessMissing, match="program"):
        run([program])


def test_a_time_out_ends_the_whole_group(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(ProcessTimeout, match="sh took longer"):
        run(["sh", "-c", f"sh -c 'echo $$ >{tmp_path}/pid; sleep 60' & wait"], timeout=0.3)
    assert time.monotonic() - begin < 5
    assert gone(tmp_path / "pid")


def test_output_before_a_timeout_is_reported_with_it() -> None:
    with pytest.raises(ProcessTimeout) as caught:
        run(["sh", "-c", "echo out; echo err >&2; sleep 60"], timeout=1)
    assert (caught.value.done.stdout, caught.value.done.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize("to", ["", ">&2"])
def test_a_line_without_end_is_stopped_at_the_limit(to: str) -> None:
    done = run(["sh", "-c", f"echo one {to}; cat /dev/zero {to}"], timeout=20, limit=100_000)
    assert (done.cut, done.stdout + done.stderr) == (True, "one\n")


def test_as_much_as_the_limit_is_not_cut() -> None:
    done = run(["printf", "a\u00fc"], limit=3)
    assert (done.cut, done.stdout, done.code) == (False, "a\u00fc", 0)
    assert run(["printf", "a\u00fc"], limit=2).cut


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("'\\377\\376\\303'", "\ufffd\ufffd\ufffd"),
        ("'a\\r\\n'", "a\n"),
        ("'a\\rb'", "a\nb"),
        ("'\\342\\202\\n'", "\ufffd\n"),
    ],
)
def test_the_limit_counts_the_bytes_as_they_were_written(written: str, text: str) -> None:
    """Invalid UTF-8 and the ends of lines are longer or shorter as text."""
    done = run(["sh", "-c", f"printf {written}"], limit=3)
    assert (done.cut, done.stdout) == (False, text)
    assert run(["sh", "-c", f"printf {written}"], limit=2).cut


def test_one_that_ignores_the_first_signal_gets_the_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_processes, "_GRACE_SECONDS", 0.2)
    with pytest.raises(ProcessTimeout):
        run(["sh", "-c", f"trap '' TERM; echo $$ >{tmp_path}/pid; while :; do sleep 0.05; done"], timeout=0.2)
    assert gone(tmp_path / "pid")


def test_a_grandchild_that_ignores_the_first_signal_is_ended_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_processes, "_GRACE_SECONDS", 0.2)
    with pytest.raises(ProcessTimeout):
        run(["sh", "-c", f"sh -c 'trap \"\" TERM; echo $$ >{tmp_path}/pid; exec sleep 60' & wait"], timeout=0.3)
    assert gone(tmp_path / "pid")


def test_the_time_out_holds_while_input_is_written() -> None:
    with pytest.raises(ProcessTimeout):
        run(["sleep", "0.6"], stdin="x" * 1_000_000, timeout=0.1)


def test_a_child_left_in_the_background_is_waited_for_a_moment_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such a child would hold the pipes open forever."""
    monkeypatch.setattr(host_processes, "_GRACE_SECONDS", 0.1)
    begin = time.monotonic()
    left = f"sh -c 'echo $$ >{tmp_path}/pid; exec sleep 60' & until test -s {tmp_path}/pid; do sleep 0.01; done"
    done = run(["sh", "-c", f"echo out; {left}; exit 3"], timeout=20)
    assert (done.code, done.stdout) == (3, "out\n")
    assert time.monotonic() - begin < 5
    assert gone(tmp_path / "pid")


def test_remaining_processes_of_the_group_are_ended_without_a_pipe(tmp_path: Path) -> None:
    quiet = f"sh -c 'echo $$ >{tmp_path}/pid; exec sleep 60' </dev/null >/dev/null 2>&1 &"
    run(["sh", "-c", f"{quiet} until test -s {tmp_path}/pid; do sleep 0.01; done"], timeout=20)
    assert gone(tmp_path / "pid")


def test_an_interruption_ends_the_child(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main

    def interrupt(line: str) -> None:
        time.sleep(0.2)  # until it waits for the child
        signal.pthread_kill(main, signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(
                ["sh", "-c", f"echo $$ >{tmp_path}/pid; echo ready >&2; exec sleep 60"],
                stdin="x",
                listeners=LineListeners(stderr=interrupt),
            )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert gone(tmp_path / "pid")


def test_an_interruption_at_the_very_start_ends_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(thread: threading.Thread) -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text(encoding="utf-8"):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["sh", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 60"])
    assert gone(tmp_path / "pid")


def test_a_child_ends_where_this_process_is_killed(tmp_path: Path) -> None:
    """kill -9 cannot be caught; a build that continued would collide with that of the next run."""
    waiting = f"run(['sh', '-c', 'echo $$ >{tmp_path}/pid; exec sleep 60'])"
    parent = subprocess.Popen([sys.executable, "-c", f"from envbuild.util.host_processes import run; {waiting}"])
    try:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text(encoding="utf-8").strip():
            assert parent.poll() is None
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait(60)
    assert gone(tmp_path / "pid")


def test_another_thread_stops_a_program_which_may_clean_up(tmp_path: Path) -> None:
    stop, ready, lines = Stop(), threading.Event(), []
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n    print('cleaned'); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', file=sys.stderr, flush=True)\ntime.sleep(60)"
    )
    worker = threading.Thread(
        target=lambda: lines.append(
            run(python(code), listeners=LineListeners(stderr=lambda _: ready.set()), stop=stop)
        ),
        daemon=True,
    )
    worker.start()
    assert ready.wait(20)
    stop()
    worker.join(20)
    assert [(done.code, done.stdout) for done in lines] == [(130, "cleaned\n")]


def test_a_process_that_ignores_the_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_processes, "_LONG_GRACE_SECONDS", 0.1)
    stop, ready, codes = Stop(), threading.Event(), []
    deaf = ["sh", "-c", "trap '' TERM; echo >&2; while :; do sleep 0.1; done"]
    worker = threading.Thread(
        target=lambda: codes.append(run(deaf, listeners=LineListeners(stderr=lambda _: ready.set()), stop=stop).code),
        daemon=True,
    )
    worker.start()
    assert ready.wait(20)
    stop()
    worker.join(20)
    assert codes == [-signal.SIGKILL]


def test_nothing_is_started_once_all_is_stopped(tmp_path: Path) -> None:
    stop = Stop()
    stop()
    with pytest.raises(Interrupted):
        run(["touch", tmp_path / "started"], stop=stop)
    assert list(tmp_path.iterdir()) == []


def test_programs_start_again_once_a_stop_is_lifted() -> None:
    stop = Stop()
    stop()
    stop.lift()
    assert run(python("print('again')"), stop=stop).stdout == "again\n"
