"""Python programs that need not import torch again: a process that has imported all forks itself for each program.

    python warm_server.py SOCKET

listens at SOCKET. `warm_python.py`, a stand-in for the interpreter, passes on what it was started with, and waits. The
server forks, and the copy runs the program as `python` would: as `__main__`, with that environment, folder and files.
Programs that such a program starts are copies as well, and its real children: it forks spare processes while it still
is as new, and its `subprocess` gives them the commands.

Whatever the copy could not do as a new process would (other variables that libraries read as they are imported, other
options of Python, limits, `preexec_fn`) is run by a new process.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import NoReturn

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.utils.tensorboard",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "tokenizers",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.models.bert.modeling_bert",
    "shardzoo.cli.main",
    "shardzoo.cli.pretrain",
    "shardzoo.cli.finetune",
    "shardzoo.convert",
    "shardzoo.data",
    "shardzoo.generation",
    "shardzoo.pretraining.inputs",
    "shardzoo.pretraining.run",
    "shardzoo.trainer.engines.deepspeed_engine",
    "shardzoo.trainer.trainer",
]
# Variables that no library reads while it is imported, but for the number of threads, which `become` sets, and the size
# of pages, which no result depends on. Others must be those of the server.
HARMLESS = re.compile(
    r"(TORCH_NCCL_|LOCAL_|CROSS_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|PYTEST_|SHARDZOO_|MAKE|MFLAGS)\w*"
    r"|ARGS|VENV|TMPDIR|RANK|WORLD_SIZE|COLUMNS|LINES|OMP_NUM_THREADS|THP_MEM_ALLOC_ENABLE|CUDA_VISIBLE_DEVICES|PATH|PWD|OLDPWD|SHLVL|_"
    # These are set by libraries themselves, in the process of the tests.
    r"|PYTORCH_NVML_BASED_CUDA_CHECK|TORCHINDUCTOR_CACHE_DIR|TOKENIZERS_PARALLELISM"
)
SPARES = 6  # of each program that is no rank of a job
MESSAGE = 1 << 20


def run_of(
    words: list[str], environment: dict[str, str], baseline: dict[str, str]
) -> list[str] | None:
    """["-u" if given, "-c", "-m" or "", name, arguments…] of a command that can be run here, else None."""
    names = {
        name for name in {*environment, *baseline} if environment.get(name) != baseline.get(name)
    }
    program = Path(shutil.which(words[0], path=environment.get("PATH", "")) or "/")
    if program.parent != Path(sys.executable).parent or not all(
        HARMLESS.fullmatch(name) for name in names
    ):
        return None
    words = words[1:]
    if program.resolve() != Path(sys.executable).resolve():
        if b"python" not in program.read_bytes().split(b"\n", 1)[0]:
            return None
        words = [str(program), *words]  # a console script beside the interpreter
    unbuffered = "-u" if words[:1] == ["-u"] else ""
    words = words[1:] if unbuffered else words
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return None
    return [unbuffered, *words] if words[0] in ("-c", "-m") else [unbuffered, "", *words]


def receive(connection: socket.socket) -> tuple[dict, list[int]] | None:
    """A request and its open files, or None at the end of the connection."""
    data, files, _, _ = socket.recv_fds(connection, MESSAGE, 64)
    if not data:
        return None
    return json.loads(data), files


def become(request: dict, files: list[int]) -> None:
    """Takes over the files, the folder, the environment and the session of a program."""
    if request["session"]:
        os.setsid()
    moved = [os.dup2(file, 1000 + i, inheritable=False) for i, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(moved, request["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # Python finds it once, and TMPDIR may be another
    importlib.import_module("torch").set_num_threads(
        int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    )
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(
            line_buffering=stream is sys.stderr or stream.isatty(),
            write_through=bool(request["run"][0] or os.environ.get("PYTHONUNBUFFERED")),
        )


def fork() -> int:
    """Copies this process. From Python 3.12 on a copy beside threads is warned of; ours uses none of them, and a
    warning would be among the messages of the program that it becomes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class Spares:
    """Processes that wait for a program, children of the one that will start it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, socket.socket]] = []

    def fork(self, number: int) -> tuple[dict, list[int]] | None:
        """Makes some. Returns in each of them once it has a program, and at once, with None, in this process."""
        for _ in range(number):
            ours, theirs = socket.socketpair()
            pid = fork()
            if pid == 0:
                ours.close()
                for _, other in self.waiting:
                    other.close()
                self.waiting = []
                request = receive(theirs)
                if request is None:
                    os._exit(0)
                request[0]["answer"] = theirs.detach()
                return request
            theirs.close()
            self.waiting.append((pid, ours))
        return None

    def give(self, request: dict, files: list[int]) -> int:
        """Lets one run a program; returns its process id once it has taken it over."""
        pid, connection = self.waiting.pop()
        with connection:
            socket.send_fds(connection, [json.dumps(request).encode()], files)
            connection.recv(1)
        return pid


def start_children_from(spares: Spares, baseline: dict[str, str]) -> None:
    """Has `subprocess.Popen` give programs of this interpreter to spare processes, as long as there are some."""
    plain = subprocess.Popen._execute_child
    names = list(inspect.signature(plain).parameters)[1:]

    def execute_child(self, *values):
        given = dict(zip(names, values, strict=True))
        args, environment = given["args"], given["env"]
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
        words = [os.fsdecode(word) for word in words]
        environment = dict(os.environ if environment is None else environment)
        unusual = (
            given["shell"] or given["executable"] or given["preexec_fn"] or not given["close_fds"]
        )
        unusual = unusual or given.get("process_group", -1) != -1 or given["uid"] is not None
        run = None if unusual or not spares.waiting else run_of(words, environment, baseline)
        if run is None:
            return plain(self, *values)
        pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)] + sorted(
            given["pass_fds"]
        )
        umask = os.umask(0)
        os.umask(umask)
        request = {
            "run": run,
            "numbers": [0, 1, 2, *sorted(given["pass_fds"])],
            "folder": os.path.abspath(given["cwd"] or "."),
            "environment": environment,
            "umask": umask if given["umask"] < 0 else given["umask"],
            "session": bool(given["start_new_session"]),
        }
        self.pid = spares.give(request, files)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))
        return None

    subprocess.Popen._execute_child = execute_child


def serve(path: str, baseline: dict[str, str]) -> tuple[dict, list[int]]:
    """Answers requests until standard input ends; returns in a copy of this process, with its request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    programs: dict[socket.socket, int] = {}
    selector = selectors.DefaultSelector()
    for source in (listener, wake, sys.stdin):
        selector.register(source, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            source = key.fileobj
            if source is sys.stdin:
                for pid in programs.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            elif source is wake:
                wake.recv(1000)
                _report_ends(programs, selector)
            elif source is listener:
                connection = listener.accept()[0]
                request = receive(connection)
                if request is None:
                    connection.close()
                    continue
                request[0]["run"] = run_of(request[0]["words"], request[0]["environment"], baseline)
                if request[0]["run"] is None:
                    with contextlib.suppress(OSError):  # it was killed just now
                        connection.send(b"no")
                    connection.close()
                else:
                    pid = fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for other in (listener, wake, waker, connection, *programs, selector):
                            other.close()
                        return request
                    programs[connection] = pid
                    selector.register(connection, selectors.EVENT_READ)
                for file in request[1]:
                    os.close(file)
            elif source in programs:  # it may have ended just now
                numbers = source.recv(100)
                for number in numbers or [signal.SIGKILL]:
                    os.kill(programs[source], number)
                if not numbers:  # the stand-in was killed
                    selector.unregister(source)


def _report_ends(programs: dict[socket.socket, int], selector: selectors.BaseSelector) -> None:
    while programs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        [connection] = [connection for connection, other in programs.items() if other == pid]
        del programs[connection]
        if connection in selector.get_map():
            selector.unregister(connection)
            with contextlib.suppress(OSError):  # the stand-in was killed just now
                connection.send(array.array("i", [status]).tobytes())
        connection.close()


def run_program(run: list[str]) -> None:
    """Runs `-c CODE`, `-m MODULE` or a script as `__main__`."""
    unbuffered, kind, name, *arguments = run
    sys.orig_argv = [
        sys.executable,
        *(word for word in (unbuffered, kind) if word),
        name,
        *arguments,
    ]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    if kind == "-m":
        sys.argv = ["-m", *arguments]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(name, None)  # a preloaded one would be reported as imported twice
        runpy._run_module_as_main(name)
    elif kind == "-c":
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, "")
        exec(compile(name, "<string>", "exec"), main.__dict__)
    else:
        if not os.path.isfile(name):
            os.execv(
                sys.executable, sys.orig_argv
            )  # Python knows what to say, and how to run a folder
        sys.argv = [name, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
        main.__file__ = os.path.abspath(name)
        exec(compile(Path(name).read_bytes(), main.__file__, "exec"), main.__dict__)


def main() -> None:
    """Becomes, in a copy, the program that is asked for; a copy of that becomes a program that it starts; and so on."""
    baseline = dict(os.environ)
    importlib.import_module("quick_disk")
    ignore = importlib.import_module("quick_collections").ignore_what_exists
    sys.path.pop(0)  # this file's folder
    sys.dont_write_bytecode = False
    gc.disable()  # it would take a fifth of the time of the imports
    for module in PRELOADED:
        importlib.import_module(module)
    ignore()
    request = serve(sys.argv[1], baseline)
    while request is not None:
        become(*request)
        if "answer" in request[0]:
            os.write(request[0]["answer"], b"+")
            os.close(request[0]["answer"])
        run = request[0]["run"]
        spares = Spares()
        request = spares.fork(SPARES if os.environ.get("WORLD_SIZE", "1") == "1" else 0)
    start_children_from(spares, baseline)
    code = 1
    try:
        run_program(run)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except Exception as error:
        report(error)
    finish(code)


def report(error: Exception) -> None:
    """Writes a traceback without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        frames = frames.tb_next
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, frames)
    else:
        sys.excepthook(type(error), error, frames)


def finish(code: int) -> NoReturn:
    """Ends the process as Python does, but leaves it to the system to free the memory that it shares with others."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
