"""Runs a model of the zoo on every rank of a mesh with given weights, and compares it with numbers from elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MODES = tuple(
    itertools.product((False, True), ("none", "selective", "full"))
)  # sequence_parallel, recompute


@dataclass
class Run:
    """logits: whole; loss: a number; grads: of the stored names, whole."""

    logits: Tensor
    loss: float
    grads: dict[str, Tensor]


def load_stored(model, name_map, stored: dict[str, Tensor], mesh) -> None:
    """Fills a model from tensors by their stored names, each cut here and not by the loader under test."""
    from shardzoo.mpu import tp_rank, tp_size

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for native, entry in name_map.match(parameters, stored).entries.items():
            pieces = [stored[name] for name in entry.stored_names()]
            full = torch.cat([piece.t() if entry.transpose else piece for piece in pieces])
            shard = getattr(parameters[native], "shard", None)
            parameters[native].copy_(
                full if shard is None else shard.slice(full, tp_rank(mesh), tp_size(mesh))
            )


def run_modes(
    mesh,
    config: dict,
    stored: dict[str, Tensor],
    inputs: dict,
    modes=MODES,
    seed: int | None = None,
):
    """On one rank: for each mode (logits, loss, {native name: (this rank's gradient, its shard)}).

    seed: of the dropout masks; None means evaluation.
    """
    from shardzoo.models import ParallelConfig, config_from_dict, family
    from shardzoo.models.auto import build_on_meta
    from shardzoo.mpu import dropout_state, materialize

    name_map = family(config["model_type"]).find_names(config_from_dict(config))
    results = []
    for sequence_parallel, recompute in modes:
        parallel_config = ParallelConfig(sequence_parallel=sequence_parallel, recompute=recompute)
        model = materialize(build_on_meta(config_from_dict(config), mesh, parallel_config), "cpu")
        load_stored(model, name_map, stored, mesh)
        model.train(seed is not None)
        if seed is not None:
            dropout_state.set(seed, 0)
        output = model(**inputs)
        output.loss.backward()
        logits = next(
            getattr(output, name)
            for name in ("logits", "prediction_logits")
            if hasattr(output, name)
        )
        grads = {n: (p.grad, getattr(p, "shard", None)) for n, p in model.named_parameters()}
        results.append((model.gather_logits(logits).detach(), output.loss.item(), grads))
    return results


def whole(config: dict, ranks: list, mode: int) -> Run:
    """One run from what all ranks returned. Replicated results must be the same on every rank."""
    first, loss, _ = ranks[0][mode]
    for logits, other_loss, _ in (rank[mode] for rank in ranks[1:]):
        assert torch.equal(logits, first)
        assert other_loss == loss
    return Run(
        first, loss, merge_gradients(config["model_type"], [rank[mode][2] for rank in ranks])
    )


def merge_gradients(family_name: str, ranks: list[dict], config: Any = None) -> dict[str, Tensor]:
    """Whole gradients by stored name, from {native name: (this rank's gradient, its shard)} of all ranks.

    Gradients of replicated parameters must be the same on every rank. The names may depend on a configuration.
    """
    from shardzoo.models import family

    grads = ranks[0]
    merged: dict[str, Tensor] = {}
    facts = family(family_name)
    name_map = facts.name_map if facts.name_map_of is None else facts.name_map_of(config)
    name_map = name_map.with_own_embeddings()
    for native, entry in zip(grads, name_map.resolve(grads), strict=True):
        shard = grads[native][1]
        if "{e}" in entry.stored_names()[0]:
            entry = entry.with_experts(len(shard.groups) // len(entry.stored_names()))
        parts = [rank[native][0] for rank in ranks]
        if shard is None:
            for part in parts[1:]:
                torch.testing.assert_close(
                    part, parts[0], rtol=0, atol=0, msg=f"{native} differs between ranks"
                )
            full = parts[0]
        else:
            full = shard.merge(parts)
        names = entry.stored_names()
        if entry.by_expert:
            full = full.unflatten(0, (-1, shard.splits[0].unit))
        stacked = full.split(list(shard.groups) if len(names) > 1 else len(full))
        pieces = [piece.mT if entry.transpose else piece for piece in stacked]
        merged |= dict(zip(names, pieces, strict=True))
    return merged


def assert_same(actual: Run, expected: Run, logits: float = 1e-5) -> None:
    """Logits within `logits` of their scale, the loss within 1e-6, each gradient within 1e-4 relative norm.

    The loss's tolerance is relative above 1, for fp32 resolves a loss of 5 only to 5e-7.
    A gradient that is nothing but rounding (of a key's bias, to which the softmax is blind) must stay that small.
    """
    error = (actual.logits - expected.logits).abs().max() / expected.logits.abs().max()
    assert error < logits, f"logits differ by {error:.1e} of their scale"
    assert abs(actual.loss - expected.loss) < 1e-6 * max(1.0, abs(expected.loss)), (
        f"loss {actual.loss} instead of {expected.loss}"
    )
    assert actual.grads.keys() == expected.grads.keys()
    rounding = 1e-6 * max(grad.norm() for grad in expected.grads.values())
    for name, grad in expected.grads.items():
        if grad.norm() < rounding:
            assert actual.grads[name].norm() < rounding, f"the gradient of {name} should be zero"
            continue
        difference = (actual.grads[name] - grad).norm() / grad.norm()
        assert difference < 1e-4, f"the gradient of {name} differs by {difference:.1e}"


def randomize(model, seed: int) -> None:
    """Weights large enough that every part matters: norms around 1, all else around 0, biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # a table of sinusoids
                continue
            is_norm = ("norm" in name.lower() or ".ln" in name) and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.15, generator=generator)


def oracle(model, inputs: dict) -> Run:
    """What a model of transformers computes."""
    model.eval()
    output = model(**inputs)
    output.loss.backward()
    logits = output["prediction_logits"] if "prediction_logits" in output else output["logits"]
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Run(logits.detach(), output.loss.item(), grads)
