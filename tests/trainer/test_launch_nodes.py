"""Hostfiles, and the commands of a job on several machines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import BIN, user_environment

from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.launch.launch import ensure_processes_for, start_processes
from shardzoo.trainer.launch.nodes import Nodes, check_launcher, deepspeed_command, read_hostfile

HOSTS = "# two machines, named in ~/.ssh/config\nworker-a slots=2\n\nworker-b slots=1  # the small one\n"

# Stand-ins for a cluster: `pdsh` runs each machine's command on this one, as DeepSpeed would on the machine; `ssh`
# answers what DeepSpeed asks of the first machine. Both note the command they were given.
PDSH = """#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
assert arguments[:3] == ["-S", "-f", "1024"] and arguments[3] == "-w", arguments
hosts, command = arguments[4].split(","), " ".join(arguments[5:])
open(os.environ["SEEN"], "w").write(" ".join(arguments))
started = []
for number in range(len(hosts)):
    started.append(subprocess.Popen(["bash", "-c", command.replace("%n", str(number))]))
sys.exit(max(process.wait() for process in started))
"""
SSH = """#!/bin/bash
echo "ssh $*" >> "$SEEN.ssh"
[[ "$*" == *"hostname -I"* ]] && echo "127.0.0.1 10.0.0.1"
exit 0
"""
SCRIPT = """
import os, sys
from shardzoo.trainer.launch.launch import ensure_processes
from shardzoo.trainer.launch.nodes import Nodes
nodes = Nodes(hostfile="hosts", master_port={port})
launch = ensure_processes(1, nodes, dry_run="--dry-run" in sys.argv)
words = ("place", launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, sys.argv[1:])
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
sys.exit(5 if launch.rank == 2 and "fail" in sys.argv else 0)
"""


@pytest.fixture
def hosts(tmp_path) -> Path:
    (tmp_path / "hosts").write_text(HOSTS)
    return tmp_path / "hosts"


def test_a_hostfile(hosts):
    from deepspeed.launcher.runner import fetch_hostfile

    assert (
        read_hostfile(hosts) == {"worker-a": 2, "worker-b": 1} == dict(fetch_hostfile(str(hosts)))
    )


@pytest.mark.parametrize("environment", ["pytorch", "pytorchDDP", "deepspeed"])
def test_a_missing_hostfile_is_refused(tmp_path, environment):
    assert Nodes().slots() == {}
    for options in ({}, {"num_nodes": 1}):
        with pytest.raises(ValueError, match=r"there is no hostfile .*none; write one with a line"):
            Nodes(hostfile=str(tmp_path / "none"), **options).slots()
    with pytest.raises(ValueError, match="there is no hostfile"):
        ensure_processes_for(
            TrainingArguments(env_type=environment, hostfile=str(tmp_path / "none"), dry_run=True)
        )


HOSTILE = (
    "-oProxyCommand=touch${IFS}seen", "a@-oProxyCommand=x", "a;reboot", "$(reboot)", "`reboot`", "exec:a", "^list",
    "a,b", "a|b", "[1-9]", "..", "a/../b", "a'b", "a\x1b[31m", "@a", "::x", "%h",
    "fe80::1%$(reboot)", "fe80::1%;reboot", "::1%`reboot`", "fe80::1%\x1b[2J", "fe80::1%",
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_host_that_ssh_would_not_take_as_a_name(tmp_path, name):
    (tmp_path / "hosts").write_text(f"worker-a slots=1\n{name} slots=1\n")
    with pytest.raises(ValueError, match=r"line 2: .* is not a host name") as refused:
        Nodes(hostfile=str(tmp_path / "hosts")).slots()
    assert "\x1b" not in str(refused.value)
    with pytest.raises(ValueError, match=r"master_ip=.* is not a host name or an address"):
        ensure_processes_for(TrainingArguments(env_type="pytorchDDP", master_ip=name, dry_run=True))


def test_usual_hosts(tmp_path):
    names = [
        "node-1",
        "user@rack2.example.org",
        "10.0.0.1",
        "fe80::1",
        "my_alias",
        "2001:db8::7",
        "fe80::1%eth0",
    ]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    assert list(read_hostfile(tmp_path / "hosts")) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb\n", r"line 2: 'b' is not `name slots=N`"),
        ("a slots=two\n", r"line 1: 'a slots=two' is not"),
        ("a slots=0\n", "N from 1 to 9999"),
        ("a slots=999999999\n", "N from 1 to 9999"),
        ("a slots=2\nb slots=1\na slots=1\n", "line 3: a occurs twice"),
        ("# nothing\n", "names no machine"),
    ],
)
def test_a_hostfile_with_a_mistake(tmp_path, text, message):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 3}, "num_nodes=3, but .*hosts names 2: worker-a, worker-b"),
        ({"num_gpus": 2}, "num_gpus=2, but in .*hosts worker-b has 1 slots"),
        ({"hostfile": None, "num_nodes": 2}, "num_nodes=2, but no hostfile is given"),
    ],
)
def test_more_is_asked_for_than_there_is(hosts, options, message):
    with pytest.raises(ValueError, match=message):
        Nodes(**{"hostfile": str(hosts)} | options).slots()


def test_the_top_of_the_file_is_used(hosts):
    assert Nodes(str(hosts), num_nodes=1).slots() == {"worker-a": 2}
    assert Nodes(str(hosts), num_gpus=1).slots() == {"worker-a": 1, "worker-b": 1}


def test_deepspeed_understands_the_command(hosts):
    from deepspeed.launcher.runner import parse_args

    nodes = Nodes(str(hosts), 2, 1, master_addr="10.0.0.1", master_port=17750)
    parsed = parse_args(deepspeed_command(nodes, ["train.py", "--lr", "1", "two words"])[1:])
    assert (parsed.hostfile, parsed.num_nodes, parsed.num_gpus) == (str(hosts), 2, 1)
    assert (parsed.master_addr, parsed.master_port, parsed.launcher) == ("10.0.0.1", 17750, "pdsh")
    assert (parsed.user_script, parsed.user_args) == ("train.py", ["--lr", "1", "two words"])
    assert not parsed.force_multi
    module = parse_args(
        deepspeed_command(Nodes(str(hosts), num_nodes=1), ["-m", "package.train", "--lr"])[1:]
    )
    assert module.module
    assert (module.user_script, module.user_args) == ("package.train", ["--lr"])
    assert module.force_multi  # else DeepSpeed would run worker-a's part here


def test_an_unknown_or_absent_launcher(monkeypatch):
    with pytest.raises(
        ValueError, match="DeepSpeed has no launcher 'psdh'; use one of pdsh, slurm"
    ):
        check_launcher("psdh")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="needs the program pdsh, which is not installed here"):
        check_launcher("pdsh")


def test_a_dry_run_starts_nothing(hosts, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert start_processes(1, Nodes(str(hosts), 2, 1, master_addr="10.0.0.1"), dry_run=True) == 0
    printed = capsys.readouterr().out
    assert (
        f"deepspeed --hostfile {hosts} --num_nodes 2 --num_gpus 1 --master_addr 10.0.0.1" in printed
    )
    for node, name in enumerate(("worker-a", "worker-b")):
        assert (
            f"# on {name}\nRANK={node} LOCAL_RANK=0 LOCAL_SIZE=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1"
            in printed
        )
    assert "pdsh -S -f 1024 -w worker-a,worker-b" in printed


def test_a_dry_run_on_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    words = ["python", "-u", "train.py", "--lr", "1", "--dry-run", "dry_run=True"]
    monkeypatch.setattr(sys, "orig_argv", words)
    assert start_processes(2, dry_run=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" WORLD_SIZE")[0] for line in lines] == [
        "RANK=0 LOCAL_RANK=0",
        "RANK=1 LOCAL_RANK=1",
    ]
    assert all(line.endswith("-u train.py --lr 1") for line in lines)
    assert all("MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 " in line for line in lines)


def test_another_script_is_run_with_the_same_arguments(hosts, tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", ["main.py", "--lr", "1"])
    arguments = {
        "env_type": "pytorchDDP",
        "num_gpus": 2,
        "training_script": script,
        "dry_run": True,
    }
    with pytest.raises(SystemExit):
        ensure_processes_for(TrainingArguments(**arguments))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.endswith(f"{script} --lr 1") for line in lines)
    assert start_processes(1, Nodes(str(hosts), 2, 1), script=str(script), dry_run=True) == 0
    assert f"{script} --lr 1" in capsys.readouterr().out
    with pytest.raises(
        ValueError,
        match=r"training_script nowhere.py is not a file; leave it out to run the current command",
    ):
        start_processes(2, script="nowhere.py", dry_run=True)


@pytest.fixture
def cluster(hosts, tmp_path):
    """`cluster(*arguments)`: what comes of running the script on the hostfile's machines."""
    from shardzoo.trainer.launch.rank_info import free_port

    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("pdsh", PDSH.format(python=sys.executable)), ("ssh", SSH)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT.format(port=free_port()))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = user_environment(programs, SEEN=str(tmp_path / "seen"))
        command = [sys.executable, "train.py", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )

    return run


@pytest.mark.before_release
def test_a_job_on_two_machines(cluster, tmp_path):
    dry = cluster("two words", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "seen").exists()
    assert not (tmp_path / "seen.ssh").exists()

    done = cluster("two words", "fail")
    places = sorted(
        line.removeprefix("place ")
        for line in done.stdout.splitlines()
        if line.startswith("place ")
    )
    arguments = "['two words', 'fail']"
    assert places == [f"0 3 0 2 {arguments}", f"1 3 1 2 {arguments}", f"2 3 0 1 {arguments}"], (
        done.stderr
    )
    assert done.returncode == 5
    assert (
        "worker-a hostname -I" in (tmp_path / "seen.ssh").read_text()
    )  # an alias is no address: DeepSpeed asks

    # What the dry run printed is what pdsh then got, word for word, but for the interpreter's own name.
    announced = next(line for line in dry.stdout.splitlines() if line.startswith("pdsh "))
    announced = announced.replace("$(ssh worker-a hostname -I | cut -d' ' -f1)", "127.0.0.1")
    given = re.sub(
        rf"{BIN}/python[\d.]* ", f"{sys.executable} ", (tmp_path / "seen").read_text()
    ).strip()
    assert announced.replace("--dry-run", "fail") == f"pdsh {given}"


STAGES = """
import os
from shardzoo.trainer.launch.launch import ensure_processes
from shardzoo.trainer.launch.nodes import Nodes
ensure_processes(1, Nodes(hostfile="hosts", master_port={port}))
from shardzoo.mpu import ParallelMesh
mesh = ParallelMesh(2, 2)
os.write(1, f"host {{os.environ['CROSS_RANK']}}: stage {{mesh.pp_rank}}, rank {{mesh.tp_rank}}\\n".encode())
"""


@pytest.mark.before_release
def test_a_host_holds_whole_tensor_parallel_groups(cluster, hosts, tmp_path):
    from shardzoo.trainer.launch.rank_info import free_port

    hosts.write_text("worker-a slots=2\nworker-b slots=2\n")
    (tmp_path / "train.py").write_text(STAGES.format(port=free_port()))
    done = cluster()
    assert done.returncode == 0, done.stderr
    places = sorted(line for line in done.stdout.splitlines() if line.startswith("host"))
    assert places == [
        f"host {stage}: stage {stage}, rank {rank}" for stage in (0, 1) for rank in (0, 1)
    ]


def test_other_launchers_are_described(hosts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert (
        start_processes(
            1, Nodes(str(hosts), launcher="openmpi", master_addr="10.0.0.1"), dry_run=True
        )
        == 0
    )
    assert "\nmpirun -n 3 " in capsys.readouterr().out
