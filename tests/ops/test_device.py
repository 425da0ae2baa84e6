"""What is done about a GPU, on a machine that has none: its calls are recorded."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from shardzoo import ops
from shardzoo.ops import device as devices
from shardzoo.ops import registration, variants

GPU = torch.device("cuda", 1)


def test_triton_launches_on_the_device_of_its_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    context = devices.make_current(GPU)
    assert isinstance(context, torch.cuda.device)
    assert context.idx == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert isinstance(devices.make_current(GPU), nullcontext)
    assert isinstance(devices.make_current(torch.device("cpu")), nullcontext)


def test_every_triton_launch_makes_its_device_current(monkeypatch):
    pytest.importorskip("triton")
    chosen = []

    def note(device):
        chosen.append(device)
        return nullcontext()

    monkeypatch.setattr(registration, "make_current", note)
    x = torch.randn(2, 8)
    with ops.kernels("triton"):
        ops.rms_norm(x, torch.ones(8), eps=1e-5)
    assert chosen == [x.device]


@pytest.mark.parametrize("enabled", [True, False])
def test_decoding_leaves_cudnn_out_and_restores_the_choice(enabled):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        with devices.attending_to_growing_cache(torch.device("cpu")):
            assert torch.backends.cuda.cudnn_sdp_enabled() is enabled
        with devices.attending_to_growing_cache(GPU):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() is enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_generate_attends_to_a_growing_cache(monkeypatch):
    from tiny_models import tiny

    from shardzoo import from_config

    chosen = []

    def note(device):
        chosen.append(device)
        return nullcontext()

    generation = importlib.import_module("shardzoo.models.generation.generate")
    monkeypatch.setattr(generation, "attending_to_growing_cache", note)
    from_config(tiny("gpt2")).generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2)
    assert chosen == [torch.device("cpu")]


def test_amd_gpus_run_the_triton_kernels(monkeypatch):
    """PyTorch calls them "cuda", too, but they run no code of NVIDIA's, and have other matrix instructions."""
    kernels = pytest.importorskip("shardzoo.ops.triton_kernels.attention")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "this PyTorch is for AMD's" in str(variants.unavailable("cuda", "cuda"))
    assert variants.unavailable("triton", "cuda") is None
    assert variants._best_variant.__wrapped__("auto", "cuda") == "triton"
    with pytest.raises(RuntimeError, match="SHARDZOO_KERNELS=cuda cannot run here: the compiled"):
        variants._best_variant.__wrapped__("cuda", "cuda")
    device = torch.device("cuda")
    assert kernels._precision(device) == "ieee"
    target = SimpleNamespace(backend="hip", arch="gfx942")
    active = SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(kernels, "driver", SimpleNamespace(active=active))
    q = SimpleNamespace(device=device, shape=(1, 1, 1, 64), itemsize=2)
    rules = SimpleNamespace(bias=None, mask=None, query_starts=None)
    tile = kernels.choose_tile(kernels.forward, q, rules)
    assert (tile.warps, tile.registers) == (4, 0)
