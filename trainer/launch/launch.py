"""Starts the processes of a run, if no launcher has done so."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..arguments.training_arguments import TrainingArguments
from .failure import Faults, shell_code
from .nodes import (
    LOCAL_NAMES,
    Nodes,
    check_launcher,
    deepspeed_command,
    launcher_command,
    rank_commands,
    read_hostfile,
)
from .rank_info import RankInfo, count_threads
from .rank_process import LAUNCHER_PID, join_job
from .stop_signal import leave_closed_terminal, signals_that_save

THIS_MACHINE = Nodes()
DEFAULT_FAULTS = Faults()
POLL_SECONDS = 0.05
# As an option, as `key=value`, and as FlagAI's scripts write it.
DRY_RUN = re.compile(r"(--)?dry[-_]run(=\w+)?")
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")


def ensure_processes(
    world_size: int,
    nodes: Nodes = THIS_MACHINE,
    *,
    script: str | None = None,
    dry_run: bool = False,
    faults: Faults = DEFAULT_FAULTS,
    shares_gpus: bool = False,
) -> RankInfo:
    """Returns the rank of this process, after starting the processes of the run if no launcher has.

    Under `torchrun`, `deepspeed` or `srun`, and in the processes that it has started itself, the
    function returns at once, and the launcher determines the number of processes. Otherwise, or if
    a launcher has started only one process, it runs this command line again in `world_size`
    processes of this machine, or in those of `nodes`. It waits for them, and ends this process with
    their exit code. The code after the call therefore runs only in those processes.

    Args:
        script: A file to run with the arguments of this process; by default the script of this
            process.
        dry_run: Print the commands of the job, start nothing, and raise `SystemExit(0)`.
        faults: What to do about ranks that die or stand still.
        shares_gpus: Whether there may be more processes than GPUs on a machine.

    Raises:
        ValueError: There are fewer machines or GPUs than asked for, or the script cannot be run
            again.
    """
    launch = RankInfo.from_environment()
    started_here = os.environ.get(LAUNCHER_PID) == str(os.getppid())
    if launch.world_size > 1 or started_here:
        if dry_run:
            raise SystemExit(0)
        launch.export()
        join_job()
        return launch
    if world_size == 1 and not nodes.slots() and not (faults.max_restarts and not dry_run):
        if dry_run:
            print(shlex.join([sys.executable, *_without_dry_run(own_command(script))]))
            raise SystemExit(0)
        return launch
    raise SystemExit(
        start_processes(
            world_size,
            nodes,
            script=script,
            dry_run=dry_run,
            faults=faults,
            shares_gpus=shares_gpus,
        )
    )


def ensure_processes_for(arguments: TrainingArguments) -> RankInfo:
    """Calls `ensure_processes` with the machines and processes of training arguments."""
    processes = count_processes(arguments)
    nodes = Nodes(
        hostfile=arguments.hostfile,
        master_addr=None if arguments.master_ip in LOCAL_NAMES else arguments.master_ip,
        master_port=arguments.master_port,
    )
    if arguments.num_nodes > 1:
        nodes = replace(nodes, num_nodes=arguments.num_nodes, num_gpus=processes)
    if arguments.env_type == "pytorch":
        if arguments.hostfile:
            read_hostfile(Path(arguments.hostfile))
        nodes = THIS_MACHINE
    faults = Faults(
        stall_timeout=arguments.stall_timeout,
        grace_period=arguments.grace_period,
        max_restarts=arguments.max_restarts,
        smaller=find_smaller_jobs(arguments),
    )
    return ensure_processes(
        processes,
        nodes,
        script=arguments.training_script,
        dry_run=arguments.dry_run,
        faults=faults,
        shares_gpus=arguments.distributed_backend == "gloo",
    )


def count_processes(arguments: TrainingArguments) -> int:
    """Returns the number of processes that the arguments ask for on one machine."""
    if arguments.env_type == "pytorch":
        return 1
    split = arguments.processes_of_a_replica
    return max(arguments.num_gpus, -(-split // arguments.num_nodes))


def find_smaller_jobs(arguments: TrainingArguments) -> tuple[int, ...]:
    """Returns the smaller numbers of processes that train the same global batches, the largest
    first.
    """
    split = arguments.processes_of_a_replica
    batches, rest = divmod(arguments.global_batch_size or 0, arguments.micro_batch_size)
    if not batches or rest:
        return ()
    replicas = range(count_processes(arguments) // split - 1, 0, -1)
    experts = arguments.expert_parallel_size  # whose ranks read different samples
    return tuple(split * number for number in replicas if batches % (number * experts) == 0)


def start_processes(
    world_size: int,
    nodes: Nodes = THIS_MACHINE,
    *,
    script: str | None = None,
    dry_run: bool = False,
    faults: Faults = DEFAULT_FAULTS,
    shares_gpus: bool = False,
) -> int:
    """Runs this process's command line as a job of several processes; returns its exit code.

    See `ensure_processes`.
    """
    slots = nodes.slots()
    if not slots:
        if not shares_gpus:
            check_gpus(world_size)
        count_threads(world_size)  # refuses a wrong OMP_NUM_THREADS before processes start
        command = [sys.executable, *own_command(script)]
        if not dry_run:
            from .agent import run_ranks  # imports torch, which a started rank may not need yet

            return run_ranks(command, world_size, faults)
        line = shlex.join(_without_dry_run(command))
        where = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={nodes.master_port}"
        for rank in range(world_size):
            print(f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={world_size} {where} {line}")
        return 0
    words = own_script(script)
    if dry_run:
        words = _without_dry_run(words)
    command = deepspeed_command(nodes, words)
    if dry_run:
        print("\n".join(_describe(nodes, command, words)))
        return 0
    check_launcher(nodes.launcher)
    return _run(command, faults.grace_period)


def _without_dry_run(words: Sequence[str]) -> list[str]:
    """Returns a command line without what makes it print itself."""
    return [word for word in words if not DRY_RUN.fullmatch(word)]


def own_command(script: str | None = None) -> list[str]:
    """Returns this process's command line after the interpreter, or `script` with the arguments of
    this process.

    Raises ValueError if there is no file to run.
    """
    if script is not None:
        if not Path(script).is_file():
            raise ValueError(
                f"training_script {script} is not a file; leave it out to run the current command"
            )
        return [script, *sys.argv[1:]]
    arguments = sys.orig_argv[1:]
    is_interactive = hasattr(sys, "ps1") or "ipykernel_launcher" in arguments
    if is_interactive or not arguments or arguments[-1] == "-":
        raise ValueError(
            "several processes can only run a script that is a file: save this code to a file, or use one process here"
        )
    return arguments


def own_script(script: str | None = None) -> list[str]:
    """Returns the script and its arguments, or "-m", the module and its arguments."""
    command = own_command(script)
    if script is not None:
        return command
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return ["-m", main.__spec__.name.removesuffix(".__main__"), *sys.argv[1:]]
    return list(sys.argv)


def check_gpus(world_size: int) -> None:
    """Raises ValueError if this machine has GPUs, but fewer than processes."""
    if not any(path for pattern in GPU_DEVICES for path in Path("/dev").glob(pattern)):
        return  # importing torch only to find no GPU would take seconds
    import torch

    if 0 < torch.cuda.device_count() < world_size:
        raise ValueError(
            f"{world_size} processes need as many GPUs; this machine has {torch.cuda.device_count()}. With "
            "distributed_backend='gloo' the trainer's processes may share them"
        )


def _describe(nodes: Nodes, command: Sequence[str], script: Sequence[str]) -> list[str]:
    lines = [
        "# on this machine",
        shlex.join(command),
        "",
        f"# DeepSpeed then reaches the machines by {nodes.launcher}",
    ]
    lines.append(" ".join(launcher_command(nodes, script)))
    for name, commands in rank_commands(nodes, script).items():
        lines += ["", f"# on {name}", *commands]
    return lines


def _run(command: Sequence[str], grace_period: float) -> int:
    """Runs DeepSpeed's launcher, which forwards SIGTERM and SIGINT to the machines. Returns its
    exit code.

    A SIGHUP becomes a SIGTERM, because DeepSpeed would end at once and leave the ranks behind. The
    launcher is killed if it does not end within `grace_period` seconds of a signal.
    """
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []
    deadline = 0.0  # of the first signal

    def forward(number: int, frame: object) -> None:
        nonlocal deadline
        leave_closed_terminal()
        if not received:
            deadline = time.monotonic() + grace_period
        number = signal.SIGTERM if number == signal.SIGHUP else number
        received.append(number)
        if process is not None:
            process.send_signal(number)

    numbers = [*signals_that_save(), signal.SIGINT]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        # A terminal that is closed sends SIGHUP to DeepSpeed and to pdsh too.
        process = subprocess.Popen(
            command,
            env=dict(os.environ),
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
        for number in received:  # those that came while it was started
            process.send_signal(number)
        while process.poll() is None:
            if received and time.monotonic() > deadline:
                process.kill()
            time.sleep(POLL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return shell_code(process.returncode)
