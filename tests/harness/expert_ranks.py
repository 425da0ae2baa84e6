"""Runs a model whose experts are dealt over ranks, for the tests that compare it with transformers'."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

LENGTH = 12  # tokens of a sample


class Found(NamedTuple):
    """What a rank has after one step of all samples.

    Attributes:
        loss: Of all samples.
        grads: Whole gradients, by their names in files.
        norm: Of all gradients.
        tokens: Generated from the first two samples.
    """

    loss: float
    grads: dict[str, torch.Tensor]
    norm: float
    tokens: torch.Tensor


def draw_ids(samples: int) -> torch.Tensor:
    return torch.randint(3, 97, (samples, LENGTH), generator=torch.Generator().manual_seed(5))


def run(folder: str, again: str, tensor: int, expert: int, **mode: Any) -> Found:
    """Computes six samples in fp64, a part of them on each rank, and saves the model in the folder `again`."""
    import torch.distributed as dist

    import shardzoo
    from shardzoo.models import ParallelConfig
    from shardzoo.mpu import ParallelMesh, grad_norm
    from shardzoo.mpu.mesh import SAMPLE_AXES

    mesh = ParallelMesh(tensor, expert_parallel_size=expert)
    model = shardzoo.from_pretrained(
        folder, mesh=mesh, dtype=torch.float64, parallel_config=ParallelConfig(**mode)
    )
    ids = draw_ids(6)
    own = ids.tensor_split(mesh.size(*SAMPLE_AXES))[mesh.rank_in(*SAMPLE_AXES)]
    model.train()
    output = model(input_ids=own, labels=own, num_items_in_batch=6 * (LENGTH - 1))
    output.loss.backward()
    loss = output.loss.detach().clone()
    dist.all_reduce(loss, group=mesh.group(*SAMPLE_AXES))
    model.save_pretrained(again)
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in trained:
        if not getattr(parameter, "expert_parallel", False):
            dist.all_reduce(parameter.grad, group=mesh.group("data", "context", "expert"))
    norm = grad_norm(trained, mesh).item()
    if mode.get("sequence_parallel"):
        decoder = shardzoo.from_pretrained(folder, mesh=mesh, dtype=torch.float64)
    else:
        decoder = model.eval()
    tokens = decoder.generate(ids[:2, :5], max_new_tokens=6, do_sample=False, eos_token_id=None)
    for parameter in trained:
        parameter.data = parameter.grad
    return Found(loss.item(), shardzoo.models.hf_state.hf_state_dict(model), norm, tokens)
