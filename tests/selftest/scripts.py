"""own.script with scripts of projects: right, broken and hostile ones, each in its own process."""

import dataclasses

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.project_test_spec_reader import ProjectTestSpec, ScriptSpec
from envbuild.selftest.probes.probe_catalogue import PROBES as REAL

RIGHT = {
    "right": """
import torch

def main():
    with step("a product") as timed:
        product = torch.ones(2, 3, device=device) @ torch.ones(3, 2, device=device)
    assert timed.seconds > 0
    if product.tolist() != [[3.0, 3.0], [3.0, 3.0]]:
        fail("the product is wrong")

if __name__ == "__main__":
    main()
""",
    "empty": "",
    "exit": "import sys; sys.exit()",
    "exit-0": "import sys; sys.exit(0); raise AssertionError",
    "arguments": "import sys; assert sys.argv == [__file__], sys.argv",
    "stdin": "import sys; assert sys.stdin.read() == ''",
    "source": "import inspect\ndef one(): return 1\nassert inspect.getsource(one) == 'def one(): return 1\\n'",
    "child": """
import multiprocessing
import sys
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(double, [1, 2]) == [2, 4]
""",
    "noise": "import os, sys\nprint('x' * 100_000)\nos.write(1, b'y' * 100_000)\nsys.stderr.write('from the script')",
    "no-figures": "step('one'); step(2); step(None)",
}
WRONG = {
    "exit-3": "import sys; step('leaving'); sys.exit(3)",
    "exit-words": "import sys; sys.exit('no licence')",
    "exit-blank": "import sys; sys.exit(' ')",
    "fails-without-words": "fail()",
    "fails-with-blanks": "fail(' ')",
    "exit-true": "import sys; sys.exit(True)",
    "os-exit-0": "import os; step('leaving'); os._exit(0)",
    "os-exit-4": "import os; os._exit(4)",
    "raises": "step('doing')\ndef inner():\n    raise ValueError('one is two\\nand three')\ninner()",
    "raises-long": "raise ValueError('x' * 100_000)",
    "syntax": "def f(:\n",
    "nul": "a = 1\0",
    "fails": "step('one'); fail('first'); step('two'); fail('second')",
    "fails-and-exits": "import sys; fail('found it'); sys.exit(0)",
    "fails-then-raises": "step('one'); fail('a note'); print('a word'); raise ValueError('late')",
    "fails-then-crashes": "import ctypes; fail('a note'); print('a word', flush=True); ctypes.string_at(0)",
    "fails-forever": "import os\nfor n in range(1000): fail(f'note {n}')\nos.abort()",
    "fails-long": "step('s' * 100_000); fail('f' * 100_000)",
    "thread": """
import threading
def work(): raise ValueError('apart')
thread = threading.Thread(target=work)
thread.start()
thread.join()
fail('a note')
""",
    "loops": "step('looping')\ndef forever():\n    while True: pass\nforever()",
    "crashes": "import ctypes; step('reading'); ctypes.string_at(0)",
    "killed": "import os; step('dying'); os.kill(os.getpid(), 9)",
    "forges": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'ENVBUILD passed')
    except OSError:
        pass
""",
}


def brings(name: str, text: str) -> Probe:
    (real,) = (probe for probe in REAL if probe.name == "own.script")

    def function(context: Context) -> None:
        context.job = dataclasses.replace(context.job, own=ProjectTestSpec(script=ScriptSpec(f"{name}.py", text)))
        real.function(context)

    return Probe(name, "quick", "script", 1 if name == "loops" else 60, function)


PROBES = tuple(brings(name, text) for name, text in {**RIGHT, **WRONG}.items())
