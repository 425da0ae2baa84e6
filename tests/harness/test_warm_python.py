"""Programs in a warm environment do what they do in a user's, and so do those that they start."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from commands import BIN, user_environment, warm_environment
from every_case import by_turns

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on GPUs, every program is a new process"
)
WARM = "import sys; print('torch' in sys.modules)"
SCRIPT = "import sys; print(__name__, __file__, sys.argv, sys.path[0], input()); sys.exit(7)\n"
PROGRAMS = {
    "arguments": ["-c", "import os, sys; print(sys.argv, sys.path[0], os.getcwd(), os.getenv('COLUMNS'))", "a b", "-c"],
    "script": ["script.py", "x", "--y"],
    "module": ["-m", "json.tool", "--compact"],
    "exception": ["-c", "def f(): raise KeyError('x')\nf()"],
    "message": ["-c", "import sys; sys.exit('no such thing')"],
    "code": ["-u", "-c", "import sys; print(1, end=''); sys.exit(300)"],
    "signal": ["-c", "import os; os.kill(os.getpid(), 15)"],
    "kill": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "handlers": ["-c", "import atexit, threading; atexit.register(print, 2); threading.Timer(0.1, print, [1]).start()"],
    "wrong option": ["--no-such-option"],
    "no file": ["nowhere.py"],
}  # fmt: skip


@pytest.mark.parametrize("name", by_turns(PROGRAMS, 2))
def test_a_program_does_the_same(name, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    results = []
    for environment in (user_environment(COLUMNS="77"), warm_environment(COLUMNS="77")):
        done = subprocess.run(
            ["python", *PROGRAMS[name]],
            input='{"a": 1}',
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        last = done.stderr.replace(f"{BIN}/python", "python").splitlines()[-1:]
        results.append((done.returncode, done.stdout, last))
    assert results[1] == results[0]


def test_children_are_warm_and_real_children(tmp_path):
    program = f"""
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import os; os.write(3, b'3'); print(os.getppid(), os.getsid(0), input());" {WARM!r}],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, pass_fds=[os.dup2(1, 3)],
)
shown, _ = child.communicate("given")
assert shown == f"{{os.getpid()}} {{child.pid}} given\\nTrue\\n", shown
stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
stopped.terminate()
assert stopped.wait() == -15
"""
    done = subprocess.run(
        ["python", "-c", program],
        env=warm_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "3"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_stand_in_reaches_the_program(number, tmp_path):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        ["python", "-c", program], env=warm_environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    program_id = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(30) == -number
    assert process.stdout.read() == ""  # it ends with the program and its spare processes
    deadline = time.monotonic() + 30
    while Path(f"/proc/{program_id}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("variables", "warm"), [({"RANK": "1"}, True), ({"HF_HOME": "x"}, False)])
def test_what_libraries_read_when_imported_takes_a_new_process(variables, warm):
    done = subprocess.run(
        ["python", "-c", WARM], env=warm_environment(**variables), capture_output=True, text=True
    )
    assert done.stdout == f"{warm}\n"
