"""`python script.py` starts what is missing, and a job ends as a whole."""

from __future__ import annotations

import fcntl
import itertools
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import user_environment, warm_environment
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from shardzoo.trainer.launch import agent
from shardzoo.trainer.launch.agent import OneMachine, run_ranks
from shardzoo.trainer.launch.failure import Failure, Faults
from shardzoo.trainer.launch.launch import start_processes
from shardzoo.trainer.launch.rank_process import RankError

SCRIPT = """
import os, signal, sys, threading, time
from shardzoo.trainer.launch.launch import ensure_processes

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # a line at once: the ranks share the pipe

def the_end_of_rank(rank):
    raise KeyError(f"the end of rank {rank}")

say("before")
launch = ensure_processes(3)
say("place", launch.rank, launch.world_size, os.environ["OMP_NUM_THREADS"])
case = sys.argv[1]
if case == "barrier":
    from shardzoo.trainer.launch.environment import initialize_distributed
    import torch.distributed as dist
    initialize_distributed(launch)
    dist.barrier()  # all are connected: torch itself has nothing to say of the end
    if launch.rank == 1:
        the_end_of_rank(1)
    dist.barrier()
elif case == "listen":
    from shardzoo.trainer.launch.environment import initialize_distributed
    import torch.distributed as dist
    initialize_distributed(launch)
    if launch.rank == 0:
        port = "%04X" % int(os.environ["MASTER_PORT"])
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for words in map(str.split, open(table)):
                address, _, number = words[1].partition(":")
                if number == port and words[3] == "0A":
                    say("listens", address)
    dist.barrier()
elif case == "late":
    from shardzoo.mpu import ParallelMesh
    from shardzoo.trainer.launch.environment import initialize_distributed, set_collective_timeout
    import torch.distributed as dist
    initialize_distributed(launch)
    mesh = ParallelMesh(3)
    set_collective_timeout(mesh, 5)
    dist.barrier()
    if launch.rank == 1:
        time.sleep(600)
    dist.barrier(mesh.tp_group)
elif case == "join":
    if launch.rank == 0:
        time.sleep(600)  # as one that still imports torch
    from shardzoo.trainer.launch.environment import initialize_distributed
    say("joins")
    initialize_distributed(launch)
elif case == "kill":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a rank that saves would, and is stuck
    if launch.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
elif case == "ring":
    import time
    import torch
    from shardzoo.mpu import ParallelMesh
    from shardzoo.mpu.ring import RingRules, ring_attention
    from shardzoo.trainer.launch.environment import initialize_distributed
    initialize_distributed(launch)
    mesh = ParallelMesh(1, context_parallel_size=3)
    q = torch.randn(1, 2, 4, 8)
    for step in range(100000):
        ring_attention(q, q, q, None, RingRules(1.0, 12, causal=True), mesh)
        if step == 20 and launch.rank == 2:
            say("killed", time.time())
            os.kill(os.getpid(), signal.SIGKILL)
elif case == "stuck":
    if launch.rank == 0:
        threading.Thread(target=time.sleep, args=(600,)).start()  # Python waits for it at its end
        the_end_of_rank(0)
    time.sleep(600)
elif case == "exit":
    sys.exit(7 if launch.rank == 1 else 0)
elif case == "wait":
    def stopped(number, frame):
        say("saved", launch.rank)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stopped)
    say("pid", os.getpid())
    while True:
        time.sleep(0.05)  # Python sees a signal that comes just before a sleep only after it
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(case, *launcher, environment=…)`: the script as a process, by Python or a launcher."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "script.py").write_text(SCRIPT)

    def start(case: str, *launcher: str, environment=warm_environment) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*(launcher or ("python",)), "script.py", case],
            cwd=folder,
            env=environment(OMP_NUM_THREADS=None),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Exit code, lines of output, messages. A job that hangs fails the test."""
    try:
        output, messages = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, output.splitlines(), messages


@pytest.mark.before_release
def test_the_first_traceback_is_on_top_and_the_code_comes_back(start):
    code, output, messages = finish(start("barrier"))
    assert code == 1
    assert output.count("before") == 4  # the script as given, and as each rank
    assert sorted(line for line in output if line.startswith("place")) == [
        f"place {rank} 3 1" for rank in range(3)
    ]
    assert messages.startswith("rank 1 failed first:\nTraceback")
    assert messages.count("Traceback") == 1
    assert "KeyError: 'the end of rank 1'" in messages
    for other in (0, 2):
        assert messages.count(f"rank {other} failed after it: ") == 1  # they lost their peer
    assert "Setting accelerator" not in messages


@pytest.mark.before_release
def test_a_collective_waits_as_long_as_it_is_told(start):
    code, _, messages = finish(start("late"))
    assert code == 1
    assert re.search(r"rank [02] failed first:\n", messages)
    assert "RuntimeError" in messages


def test_a_killed_rank_takes_the_others_down(start):
    code, _, messages = finish(start("kill"))
    assert code == 128 + signal.SIGKILL
    assert messages == "rank 2 was killed by SIGKILL; the machine may have run out of memory\n"


@pytest.mark.before_release
def test_a_rank_that_dies_in_the_ring_ends_the_job_in_ten_seconds(start):
    """The others wait for keys that it was to pass on."""
    code, output, messages = finish(start("ring"))
    ended = time.time()
    [killed] = [float(line.split()[1]) for line in output if line.startswith("killed")]
    assert code == 128 + signal.SIGKILL
    assert "rank 2 was killed by SIGKILL" in messages.splitlines()[0]
    assert ended - killed < 10


def test_the_cause_comes_before_its_consequences():
    """A kill from outside is never the consequence of another failure, and a lost peer always is one."""

    def fail(rank: int, code: int | None, summary: str, time: float) -> Failure:
        error = RankError(summary, f"Traceback of rank {rank}", time) if summary else None
        return Failure(rank, code, error, time)

    lost = fail(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:1234", 1.0)
    cause = fail(1, 1, "KeyError: 'x'", 2.0)
    later = fail(2, None, "ValueError: y", 3.0)
    aborted = fail(3, -signal.SIGABRT, "", 4.0)
    killed = fail(4, -signal.SIGKILL, "", 5.0)
    for failures in itertools.permutations([lost, cause, later, aborted, killed]):
        found = [failure.rank for failure in sorted(failures, key=Failure.precedence)]
        assert found == [4, 1, 2, 3, 0]


def test_a_rank_that_cannot_end_is_no_hang(start):
    code, _, messages = finish(start("stuck"))
    assert code == 1
    assert "KeyError: 'the end of rank 0'" in messages


def test_an_error_is_heard_while_the_rank_is_sampled(tmp_path):
    """Both write files of the same rank, at the same time."""
    script = f"""
import os
from pathlib import Path
from shardzoo.trainer.launch import heartbeat, rank_process

os.environ[heartbeat.PULSE] = "{tmp_path}/rank_0.pulse:0"
heartbeat.sample_for_launcher()
path = Path("{tmp_path}/rank_0.json")
for number in range(300):
    assert rank_process.write_error(path, KeyError(number))
    assert rank_process.read_error(path).traceback == f"KeyError: {{number}}\\n"
"""
    result = subprocess.run(
        [sys.executable, "-c", script], env=user_environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_the_first_exit_code_comes_back(start):
    code, _, messages = finish(start("exit"))
    assert code == 7
    assert messages == "rank 1 failed first, with exit code 7\n"


def test_a_rank_gets_its_arguments_as_they_are(tmp_path, capfd):
    """torch's agent replaces ${local_rank} in a command line."""
    given = ["${local_rank}", "$$", "$local_rank", "a b", "", "--name=$HOME"]
    script = tmp_path / "script.py"
    script.write_text("import os, sys; os.write(1, (repr(sys.argv[1:]) + '\\n').encode())")
    assert run_ranks([sys.executable, str(script), *given], 2, Faults()) == 0
    assert capfd.readouterr().out.splitlines() == [repr(given)] * 2


def test_ranks_may_save_when_the_job_is_stopped(start):
    process = start("wait", environment=user_environment)
    ranks_of(process)
    process.send_signal(signal.SIGTERM)
    code, output, _ = finish(process)
    assert code == 128 + signal.SIGTERM
    assert sorted(line for line in output if line.startswith("saved")) == [
        "saved 0",
        "saved 1",
        "saved 2",
    ]


def test_ranks_that_wait_for_others_end_at_once_when_interrupted(start):
    """They wait in torch's own code, after which alone Python would see the signal."""
    process = start("join")
    joining = 0
    while joining < 2:
        line = process.stdout.readline()
        assert line, "the job ended"
        joining += line == "joins\n"
    time.sleep(0.5)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _, _ = finish(process)
    assert code == 128 + signal.SIGINT
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_reaches_the_ranks_that_are_started_after_it(number, tmp_path, monkeypatch):
    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            if keywords["env"]["RANK"] == "0":
                signal.raise_signal(number)

    monkeypatch.setattr(subprocess_handler, "Popen", Interrupted)
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    started = time.monotonic()
    assert run_ranks([sys.executable, str(script)], 3, Faults()) == 128 + number
    assert time.monotonic() - started < 20


def test_a_signal_that_a_starting_rank_has_lost_is_sent_again(tmp_path, monkeypatch):
    ready = tmp_path / "ready"

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            if keywords["env"]["RANK"] == "0":
                while not ready.exists():
                    time.sleep(0.01)
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess_handler, "Popen", Interrupted)
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, signal, time

def lose(number, frame):
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGINT, lose)
    open({str(ready)!r}, "w")
    time.sleep(600)
time.sleep(600)
"""
    )
    started = time.monotonic()
    assert run_ranks([sys.executable, str(script)], 2, Faults()) == 128 + signal.SIGINT
    assert time.monotonic() - started < 60


def test_no_rank_is_started_after_a_signal(tmp_path, monkeypatch):
    def find_peers(self):
        signal.raise_signal(signal.SIGTERM)
        return rendezvous(self)

    rendezvous = OneMachine.next_rendezvous
    monkeypatch.setattr(OneMachine, "next_rendezvous", find_peers)
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert run_ranks([sys.executable, str(script)], 2, Faults()) == 128 + signal.SIGTERM
    assert not (tmp_path / "ran").exists()


def test_a_wrong_number_of_threads_starts_nothing(tmp_path, monkeypatch):
    script = tmp_path / "rank.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    with pytest.raises(ValueError, match="OMP_NUM_THREADS='x' is not a number of threads"):
        start_processes(2, script=str(script))
    assert not (tmp_path / "started").exists()


@pytest.mark.before_release
def test_the_rendezvous_of_one_machine_is_closed_to_others(start):
    code, output, messages = finish(start("listen"))
    assert code == 0, messages
    assert [line for line in output if line.startswith("listens")] == [
        "listens 0100007F"
    ]  # 127.0.0.1, and no [::]


@pytest.mark.before_release
def test_the_next_start_deletes_the_folder_of_a_killed_launcher(start, tmp_path, monkeypatch):
    """It leaves alone a running launcher's folder, and folders that no launcher has made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "shardzoo-ranks-mine").mkdir()
    living, killed = start("wait"), start("wait")
    try:
        ranks_of(living)
        ranks = ranks_of(killed)
        assert len(list(tmp_path.glob("shardzoo-ranks-*"))) == 3
        killed.kill()
        killed.wait()
        wait_for_the_end(ranks)
        assert finish(start("exit"))[0] == 7
        left = list(tmp_path.glob("shardzoo-ranks-*"))
        assert len(left) == 2
        assert tmp_path / "shardzoo-ranks-mine" in left
    finally:
        living.terminate()
        finish(living)
        finish(killed)
    assert list(tmp_path.glob("shardzoo-ranks-*")) == [tmp_path / "shardzoo-ranks-mine"]


def test_launchers_that_start_together_leave_each_others_folders_alone(tmp_path, monkeypatch):
    """Another launcher looks for folders after this one has made its own, and before it locks it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock, others = fcntl.flock, []

    def lock_late(file, how):
        if not others:
            others.append(agent._delete_folders_of_killed_launchers)
            others[0]()
        return lock(file, how)

    monkeypatch.setattr(agent.fcntl, "flock", lock_late)
    with agent._scratch_folder() as folder:
        assert others
        assert [path.name for path in folder.iterdir()] == [agent.LOCK]
        agent._delete_folders_of_killed_launchers()
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_ranks_do_not_outlive_their_launcher(start):
    process = start("wait", environment=user_environment)
    ranks = ranks_of(process)
    process.kill()
    wait_for_the_end(ranks)
    process.communicate()


@pytest.mark.before_release
def test_torchrun_shows_the_traceback_and_counts_the_ranks(start):
    code, output, messages = finish(start("barrier", "torchrun", "--nproc-per-node", "2"))
    assert code == 1
    assert output.count("before") == 2  # nothing was started beside them
    summary = messages[messages.index("Root Cause") :]
    assert "the end of rank 1" in summary
    assert "rank      : 1" in summary


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids, as soon as all three ranks have said theirs."""
    assert process.stdout is not None
    found: list[int] = []
    while len(found) < 3:
        line = process.stdout.readline()
        assert line, "the job ended"
        if line.startswith("pid"):
            found.append(int(line.split()[1]))
    return found


def wait_for_the_end(processes: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(runs(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(runs(process) for process in processes)


def runs(process_id: int) -> bool:
    """A zombie that nobody waits for does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
