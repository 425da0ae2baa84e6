"""Describes a job on several machines: its hostfile, and the commands of DeepSpeed's launcher."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

# A host name or ssh alias. One that begins with "-" would be an option of ssh, and pdsh gives
# others a meaning too.
HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Nodes:
    """The machines of a job and how they connect.

    Attributes:
        hostfile: File with a line `name slots=N` for each machine. The name is one that ssh knows,
            such as an alias.
        num_nodes: How many of the hostfile's machines to use, from the top; 0 for all.
        num_gpus: Processes on each machine; 0 for as many as it has slots.
        master_addr: Address at which the others reach the first machine; by default DeepSpeed asks
            it by ssh.
        launcher: How DeepSpeed reaches the machines: "pdsh", "openmpi", "mpich", "impi", "mvapich"
            or "slurm".
    """

    hostfile: str | None = None
    num_nodes: int = 0
    num_gpus: int = 0
    master_addr: str | None = None
    master_port: int = 29500
    launcher: str = "pdsh"

    def __post_init__(self) -> None:
        if self.master_addr is not None and not is_host(self.master_addr):
            raise ValueError(f"master_ip={self.master_addr!r} is not a host name or an address")

    def slots(self) -> dict[str, int]:
        """Returns the number of processes on each machine; empty for this machine alone.

        Raises ValueError if the hostfile has an error, or fewer machines or slots than asked for.
        """
        if not self.hostfile:
            if self.num_nodes > 1:
                raise ValueError(
                    f"num_nodes={self.num_nodes}, but no hostfile is given; write one with a line `name slots=N` for "
                    "each node, or start the script on every node with torchrun or srun"
                )
            return {}
        hosts = read_hostfile(Path(self.hostfile))
        if self.num_nodes > len(hosts):
            raise ValueError(
                f"num_nodes={self.num_nodes}, but {self.hostfile} names {len(hosts)}: {', '.join(hosts)}"
            )
        chosen = dict(list(hosts.items())[: self.num_nodes or len(hosts)])
        for name, slots in chosen.items():
            if self.num_gpus > slots:
                raise ValueError(
                    f"num_gpus={self.num_gpus}, but in {self.hostfile} {name} has {slots} slots"
                )
        here = (*LOCAL_NAMES, socket.gethostname(), socket.getfqdn())
        if len(chosen) == 1 and next(iter(chosen)) in here:
            return {}
        return {name: self.num_gpus or slots for name, slots in chosen.items()}


def is_host(name: str) -> bool:
    """Returns whether `name` can be given to ssh or pdsh as a host."""
    try:
        zone = name.partition("%")[2]  # of IPv6, such as eth0; Python takes any text as one
        return bool(
            HOST.fullmatch(name) or (re.fullmatch("[A-Za-z0-9_.-]*", zone) and ip_address(name))
        )
    except ValueError:
        return False


def read_hostfile(path: Path) -> dict[str, int]:
    """Returns name -> slots in the file's order.

    Raises ValueError that names a missing file or a wrong line.
    """
    if not path.is_file():
        raise ValueError(
            f"there is no hostfile {path}; write one with a line `name slots=N` for each node"
        )
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"the hostfile {path} cannot be read: {error.strerror}") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"(\S+)\s+slots=([0-9]{1,4})", line)
        if not found or not int(found[2]):
            raise ValueError(
                f"{path}, line {number}: {line[:200]!r} is not `name slots=N` with N from 1 to 9999"
            )
        if not is_host(found[1]):
            raise ValueError(
                f"{path}, line {number}: {found[1][:200]!r} is not a host name, an ssh alias or an address"
            )
        if found[1] in hosts:
            raise ValueError(
                f"{path}, line {number}: {found[1]} occurs twice; give all its slots in one line"
            )
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise ValueError(f"{path} names no machine; write a line `name slots=N` for each")
    return hosts


def deepspeed_command(nodes: Nodes, script: Sequence[str]) -> list[str]:
    """Returns the command that starts the job from this machine.

    `script` is in the form that `own_script` returns.
    """
    slots = nodes.slots()
    assert nodes.hostfile is not None
    command = ["deepspeed", "--hostfile", nodes.hostfile]
    if nodes.num_nodes:
        command += ["--num_nodes", str(len(slots))]
    if nodes.num_gpus:
        command += ["--num_gpus", str(nodes.num_gpus)]
    if nodes.master_addr:
        command += ["--master_addr", nodes.master_addr]
    command += ["--master_port", str(nodes.master_port), "--launcher", nodes.launcher]
    if len(slots) == 1:
        # Else DeepSpeed would run a one-machine job here, whatever the machine's name.
        command.append("--force_multi")
    command.append("--no_local_rank")
    if script[0] == "-m":
        return [*command, "--module", *script[1:]]
    return [*command, *script]


def check_launcher(launcher: str) -> None:
    """Raises ValueError if DeepSpeed could not reach the machines with this launcher."""
    programs = {"pdsh": "pdsh", "slurm": "sinfo", "openmpi": "ompi_info", "mpich": "mpirun", "impi": "mpirun",
                "mvapich": "mpiname"}  # fmt: skip
    if launcher not in programs:
        raise ValueError(
            f"DeepSpeed has no launcher {launcher!r}; use one of {', '.join(programs)}"
        )
    if shutil.which(programs[launcher]) is None:
        raise ValueError(
            f"launcher {launcher!r} needs the program {programs[launcher]}, which is not installed here; install it, "
            "choose another launcher, or start the script on every node with torchrun or srun"
        )


def launcher_command(nodes: Nodes, script: Sequence[str]) -> list[str]:
    """Returns the command with which DeepSpeed's launcher reaches the machines, for `--dry-run`.

    `%n` is the machine's number, which pdsh inserts.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.launcher import runner

    arguments = runner.parse_args(deepspeed_command(nodes, script)[1:])
    arguments.master_addr = _address(nodes)
    pool = read_hostfile(Path(arguments.hostfile))
    machines = runner.apply_num_nodes_and_gpus(
        runner.parse_inclusion_exclusion(pool, "", ""), arguments.num_nodes, arguments.num_gpus
    )
    world = runner.encode_world_info(machines)
    is_pdsh = nodes.launcher == "pdsh"
    given = [arguments, world] if is_pdsh else [arguments, world, pool]
    made = runner.LAUNCHER_CLASSES[nodes.launcher](*given)
    environ = dict(os.environ)
    environ["PYTHONPATH"] = ":".join(filter(None, [os.getcwd(), environ.get("PYTHONPATH")]))
    accelerator = get_accelerator()
    assert accelerator is not None
    for name, value in environ.items():
        if name.startswith(tuple(runner.EXPORT_ENVS + accelerator.export_envs())):
            made.add_export(name, value)
    command = made.get_cmd(environ, machines)
    if is_pdsh:  # which gets its environment too
        return command[0]
    return command


def rank_commands(nodes: Nodes, script: Sequence[str]) -> dict[str, list[str]]:
    """Returns the commands of the ranks of each machine, with their variables, for `--dry-run`."""
    slots = nodes.slots()
    shared = {
        "WORLD_SIZE": sum(slots.values()),
        "MASTER_ADDR": _address(nodes),
        "MASTER_PORT": nodes.master_port,
    }
    commands: dict[str, list[str]] = {}
    rank = 0
    for name, count in slots.items():
        commands[name] = []
        for local_rank in range(count):
            variables = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_SIZE": count, **shared}
            words = [f"{key}={value}" for key, value in variables.items()]
            commands[name].append(" ".join([*words, shlex.join([sys.executable, "-u", *script])]))
            rank += 1
    return commands


def _address(nodes: Nodes) -> str:
    """Returns the address at which the ranks connect, or the command with which DeepSpeed would ask
    for it.
    """
    return (
        nodes.master_addr
        or f"$(ssh {shlex.quote(next(iter(nodes.slots())))} hostname -I | cut -d' ' -f1)"
    )
