"""Stacks of a profile's script, as Python and faulthandler write them, cut to what its author wrote and called."""

from __future__ import annotations

import pytest

from envbuild.selftest.harness import script_tracebacks
from envbuild.selftest.harness.probe_outcome_and_figures import is_cut, tail

HARNESS = """\
  File "/tmp/x/selftest.zip/envbuild/selftest/harness/probe_process.py", line 121, in _attempt
    probe.function(context)
  File "/tmp/x/selftest.zip/envbuild/selftest/probes/environment/own_script.py", line 54, in script
    runpy.run_path(str(file))
  File "/usr/lib/python3.9/runpy.py", line 97, in _run_code
    exec(code, run_globals)
"""
SCRIPT = """\
  File "/tmp/envbuild-script-ab_1/smoke.py", line 7, in <module>
    main()
    ^^^^^^
"""
CALLED = """\
  File "/opt/venv/lib/torch/nn/functional.py", line 5, in linear
    return torch._C._nn.linear(input)
"""
HEAD, END = "Traceback (most recent call last):\n", "ValueError: late\n"
SHOWN = SCRIPT.replace("/tmp/envbuild-script-ab_1/", "")
INNER = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (HEAD + HARNESS + SCRIPT + CALLED + END, HEAD + SHOWN + CALLED + END),
        ("a note\n" + HEAD + HARNESS + SCRIPT + END, "a note\n" + HEAD + SHOWN + END),
        (HEAD + HARNESS + END, HEAD + END),
        (HEAD + CALLED + END + INNER + HEAD + HARNESS + SCRIPT + END, HEAD + CALLED + END + INNER + HEAD + SHOWN + END),
        (HEAD + HARNESS + SCRIPT + HARNESS + END, HEAD + SHOWN + END),
        ("nothing of the kind\n  File\n", "nothing of the kind\n  File\n"),
    ],
    ids=["all", "after a note", "none of its own", "a cause without it", "it calls us back", "no stack"],
)
def test_a_traceback_begins_in_the_script(given: str, kept: str) -> None:
    assert script_tracebacks.script_stacks(given) == kept.rstrip("\n")


@pytest.mark.parametrize("above", ["", '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'])
def test_a_dump_ends_in_the_script(above: str) -> None:
    head = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n" + above
    module = "/x/envbuild/selftest/harness/probe_process.py"
    harness = f'  File "<frozen runpy>", line 88 in _run_code\n  File "{module}", line 9 in main\n'
    outer = '  File "<string>", line 19 in <module>\n'
    frame = '  File "/tmp/envbuild-script-ab_1/smoke.py", line 1 in <module>\n'
    other = '\nThread 0x00008 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 2 in wait\n'
    shown = '  File "smoke.py", line 1 in <module>\n'
    assert script_tracebacks.script_stacks(head + frame + harness + outer + other) == (head + shown + other).rstrip(
        "\n"
    )
    assert script_tracebacks.script_stacks(head + harness + outer) == head.rstrip("\n"), "the script is not in it"


def test_the_list_of_extensions_goes() -> None:
    modules = "Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)\n"
    assert script_tracebacks.without_modules("Fatal\n\nThread\n\n" + modules) == "Fatal\n\nThread\n\n"
    assert script_tracebacks.without_modules("no Extension modules: here") == "no Extension modules: here"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("short", "short"),
        ("one\ntwo\nthree", "two\nthree"),
        ("one\nlonger two\nthree", "three"),
        ("x" * 30, "x" * 10),
        ("", None),
    ],
)
def test_the_end_of_a_text_begins_with_a_line(text: str, end: str | None) -> None:
    assert tail(text, 10) == end
    assert is_cut(text, 10) == (text != (end or ""))
