"""What ranks communicate by, and which GPU each of them has, on a CPU that passes for a machine with one GPU."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist

from shardzoo.mpu.process_group import init_process_group
from shardzoo.trainer import Trainer, TrainingArguments
from shardzoo.trainer.launch import environment, launch
from shardzoo.trainer.launch.rank_info import RankInfo

TRAINER = importlib.import_module("shardzoo.trainer.trainer")


@pytest.fixture
def one_gpu(monkeypatch):
    """The machine has one GPU: returns the calls that choose a GPU and a backend."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(("device", index)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **_: calls.append(("backend", backend))
    )
    monkeypatch.setattr(environment, "watch_peers", lambda *_: None)
    monkeypatch.setattr(launch, "GPU_DEVICES", ("null",))  # a file of /dev that every machine has
    for name, value in {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 1,
        "MASTER_ADDR": "there",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    return calls


@pytest.mark.parametrize(
    ("backend", "chosen"), [("auto", "nccl"), ("nccl", "nccl"), ("gloo", "gloo")]
)
def test_ranks_beyond_the_gpus_share_them(one_gpu, backend, chosen):
    """DeepSpeed takes the number of the GPU from LOCAL_RANK, which the second rank must therefore not keep."""
    device = environment.initialize_distributed(RankInfo.from_environment(), backend=backend)
    assert device == torch.device("cuda", 0)
    assert one_gpu == [("backend", chosen), ("device", 0)]
    assert RankInfo.from_environment().local_rank == 0


def test_only_gloo_starts_more_processes_than_gpus(one_gpu, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    arguments = {
        "env_type": "pytorchDDP",
        "num_gpus": 2,
        "dry_run": True,
        "training_script": __file__,
    }
    with pytest.raises(ValueError, match=r"has 1\. With distributed_backend='gloo' the"):
        launch.ensure_processes_for(TrainingArguments(**arguments))
    with pytest.raises(SystemExit, match="0"):
        launch.ensure_processes_for(TrainingArguments(**arguments, distributed_backend="gloo"))
    assert capsys.readouterr().out.count("WORLD_SIZE=2") == 2


def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(
        ValueError, match="needs a GPU, and this process sees none; use 'gloo' or 'auto'"
    ):
        init_process_group(backend="nccl")


def test_gloo_passes_no_gpu_tensors_between_stages(monkeypatch):
    monkeypatch.setattr(TRAINER, "initialize_distributed", lambda *_, **__: torch.device("cuda", 0))
    monkeypatch.setattr(TRAINER, "ensure_processes_for", lambda _: RankInfo(0, 2, 0, 2))
    split = {"env_type": "deepspeed+mpu", "pipeline_parallel_size": 2}
    with pytest.raises(
        ValueError, match="cannot pass a GPU's tensors between pipeline stages; use 'nccl'"
    ):
        Trainer(**split, distributed_backend="gloo", train_steps=1)
