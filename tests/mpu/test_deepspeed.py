"""DeepSpeed, given the mesh as its `mpu`, sees the gradient norm of the unsplit model."""

from __future__ import annotations

import torch
from small_transformer import build_transformer

from shardzoo import mpu


def engine_norm(mesh, build, zero_stage):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at run time
    model = build(mesh, layers=1, vocabulary=37, hidden=16, sequence_parallel=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mesh)[0]
    ids = torch.arange(24).view(2, 12)
    mpu.dropout_state.set(1, mesh.dp_rank)
    row = ids[mesh.dp_rank : mesh.dp_rank + 1]
    engine.backward(engine(row, row) * mesh.dp_size)
    engine.step()
    weights = {
        name: (p.detach().clone(), getattr(p, "shard", None))
        for name, p in model.named_parameters()
    }
    return float(engine.get_global_grad_norm()), weights


def test_norm_clipping_and_step_are_those_of_the_unsplit_model(run_mesh, helpers):
    model = build_transformer(None, layers=1, vocabulary=37, hidden=16)
    ids = torch.arange(24).view(2, 12)
    mpu.dropout_state.set(1, 0)
    model(ids, ids).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    results = run_mesh(2, engine_norm, build_transformer, 1, data=2, isolated=True)
    for seen, weights in results:
        torch.testing.assert_close(seen, float(norm), rtol=1e-5, atol=0.0)
        for name, parameter in model.named_parameters():
            shard = weights[name][1]
            parts = [rank_weights[name][0] for _, rank_weights in results[:2]]
            helpers.close(shard.merge(parts) if shard else weights[name][0], parameter.detach())
