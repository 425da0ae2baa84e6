"""Encoder-decoders whose experts are dealt over ranks equal transformers', and what they refuse."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from parity import randomize

import shardzoo
from shardzoo.models import config_from_dict, from_config

LENGTH = 10


def load_row(family: str):
    path = Path(__file__).parents[1] / "zoo" / "rows" / f"{family}.py"
    spec = importlib.util.spec_from_file_location("row", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = {
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", True),
    "nllb-moe": ("NllbMoeForConditionalGeneration", False),
}


def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randint(3, 97, (4, LENGTH), generator=generator) for _ in range(2))


def compute_by_transformers(family: str, folder: Path, dealt: int):
    """The mean of the losses of the parts of a batch, which have equally many targets, its gradients, and tokens."""
    architecture, asks = CASES[family]
    row = load_row(family)
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**row.SIZES, attn_implementation="eager"))
    randomize(model, seed=3)
    if family == "nllb-moe":
        row.use_all_experts(model)
    model.save_pretrained(folder)
    model.eval()
    losses = []
    for ids, labels in zip(*(part.chunk(dealt) for part in draw_batch()), strict=True):
        losses.append(model(input_ids=ids, labels=labels, output_router_logits=asks).loss)
    loss = torch.stack(losses).mean()
    loss.backward()
    grads = {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in model.named_parameters()
    }
    ids, _ = draw_batch()
    tokens = model.generate(ids[:2], max_new_tokens=5, do_sample=False)
    return loss.item(), grads, tokens


def compute_on_ranks(folder: str, tensor: int, expert: int, asks: bool, mode: dict):
    """Returns the loss, whole gradients by stored name, and tokens."""
    import torch.distributed as dist

    from shardzoo.models import ParallelConfig
    from shardzoo.models.hf_state import hf_state_dict
    from shardzoo.mpu import ParallelMesh
    from shardzoo.mpu.mesh import SAMPLE_AXES

    mesh = ParallelMesh(tensor, expert_parallel_size=expert)
    decoder = shardzoo.from_pretrained(folder, mesh=mesh)
    ids, labels = draw_batch()
    tokens = decoder.generate(ids[:2], max_new_tokens=5, do_sample=False)
    model = shardzoo.from_pretrained(folder, mesh=mesh, parallel_config=ParallelConfig(**mode))
    share = slice(*(len(ids) // expert * (mesh.rank_in("expert") + i) for i in (0, 1)))
    output = model(
        input_ids=ids[share], labels=labels[share], num_items_in_batch=labels.numel(), output_router_logits=asks
    )  # fmt: skip
    output.loss.backward()
    loss = output.loss.detach().clone()
    dist.all_reduce(loss, group=mesh.group(*SAMPLE_AXES))
    for parameter in model.parameters():
        if not getattr(parameter, "expert_parallel", False):
            dist.all_reduce(parameter.grad, group=mesh.group("expert"))
        parameter.data = parameter.grad
    return loss.item(), hf_state_dict(model), tokens


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize(
    ("tensor", "expert", "mode"),
    [(1, 2, {}), (2, 2, {"sequence_parallel": True, "recompute": "full"})],
)
def test_dealt_experts_equal_those_of_transformers(
    family, tensor, expert, mode, run_ranks, tmp_path
):
    loss, grads, tokens = compute_by_transformers(family, tmp_path, expert)
    asks = CASES[family][1]
    for found in run_ranks(
        tensor * expert, compute_on_ranks, str(tmp_path), tensor, expert, asks, mode
    ):
        assert found[0] == pytest.approx(loss, rel=1e-6)
        assert torch.equal(found[2], tokens)
        largest = max(grad.norm() for grad in grads.values())
        aliases = {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
        for name, grad in grads.items():
            if name in aliases:
                continue
            error = (found[1][name] - grad).norm() / (grad.norm() + 1e-2 * largest)
            assert error < 1e-5, name


def drop_on_ranks(family: str, expert: int):
    """Returns the loss of a training step with dropout everywhere, whose samples are dealt over the ranks."""
    import torch.distributed as dist

    from shardzoo.mpu import ParallelMesh, dropout_state  # the rank's own state
    from shardzoo.mpu.mesh import SAMPLE_AXES

    mesh = ParallelMesh(expert_parallel_size=expert)
    config = {"model_type": family, **load_row(family).SIZES, "expert_capacity": 99}
    model = from_config(config_from_dict(config), mesh).train()
    ids, labels = draw_batch()
    start = len(ids) // expert * mesh.rank_in("expert")
    share = slice(start, start + len(ids) // expert)
    dropout_state.set(7, start)
    loss = model(
        input_ids=ids[share], labels=labels[share], num_items_in_batch=labels.numel()
    ).loss.detach()
    dist.all_reduce(loss, group=mesh.group(*SAMPLE_AXES))
    model.eval()
    whole = model(input_ids=ids, labels=labels).loss.item()
    return loss.item(), whole


@pytest.mark.parametrize("family", CASES)
def test_dropout_of_experts_does_not_depend_on_where_they_are(family, run_ranks):
    [(alone, whole)] = run_ranks(1, drop_on_ranks, family, 1)
    for found, _ in run_ranks(2, drop_on_ranks, family, 2):
        assert found == pytest.approx(alone, rel=1e-6)
    assert alone != pytest.approx(whole, rel=1e-4)


def test_what_depends_on_the_layout_is_refused():
    sizes = {"model_type": "switch_transformers", **load_row("switch_transformers").SIZES}
    ids = torch.arange(3, 13)[None]
    model = from_config(config_from_dict({**sizes, "router_jitter_noise": 0.1}))
    model.eval()(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match=r"router_jitter_noise=0\.1 is not supported"):
        model.train()(input_ids=ids, labels=ids)
    model = from_config(config_from_dict(sizes))
    with pytest.raises(ValueError, match="packed rows are not supported in switch_transformers"):
        model(input_ids=ids, decoder_input_ids=ids, seq_idx=ids * 0, decoder_seq_idx=ids * 0)
    with pytest.raises(ValueError, match="tie_word_embeddings=false is not supported"):
        config_from_dict({**sizes, "tie_word_embeddings": False})
    with pytest.raises(ValueError, match="second_expert_policy"):
        config_from_dict({"model_type": "nllb-moe", "second_expert_policy": "sampling"})
