"""Models whose sequences are split over the context axis compute what whole ones do: losses, gradients, logits.

Oracle: the same model in one process; under tensor parallelism, on the same tensor-parallel ranks with whole sequences.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_case import every_day
from tiny_models import tiny

LENGTH = 16
# The kinds of masks, biases and heads that differ; `make test-all` visits all.
DAILY = ["llama", "packed t5", "bert", "glm", "t5"]
KINDS = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "packed llama": ("llama", {}),
    "packed mistral": ("mistral", {}),
    "packed bert": ("bert", {"architecture": "BertForMaskedLM"}),
    "packed modernbert": ("modernbert", {"architecture": "ModernBertForMaskedLM"}),
    "packed t5": ("t5", {}),
    "bert": ("bert", {"architecture": "BertForPreTraining"}),
    "modernbert": ("modernbert", {"architecture": "ModernBertForMaskedLM"}),
    "glm": ("glm", {}),
    "t5": ("t5", {}),
    "mt5": ("mt5", {}),
    "umt5": ("umt5", {}),
    "bart": ("bart", {}),
    "m2m_100": ("m2m_100", {}),
    "mixtral": ("mixtral", {"output_router_logits": True}),
    "gpt_oss": ("gpt_oss", {"output_router_logits": True}),
    "packed gpt_oss": ("gpt_oss", {}),
    "bert sequence": ("bert", {"architecture": "BertForSequenceClassification"}),
    "bert answer": ("bert", {"architecture": "BertForQuestionAnswering"}),
    "llama sequence": (
        "llama",
        {"architecture": "LlamaForSequenceClassification", "pad_token_id": 0},
    ),
    "bert tokens": ("bert", {"architecture": "BertForTokenClassification"}),
}


def example(kind: str) -> dict[str, torch.Tensor]:
    """A ragged batch, with its labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    family = KINDS[kind][0]
    if kind == "glm":
        labels[:, :6] = -100
        return {"input_ids": ids, "attention_mask": torch.tensor([9, 3]), "labels": labels}
    if kind == "packed llama":
        positions = torch.cat([torch.arange(5), torch.arange(7), torch.arange(4)])[None]
        return {"input_ids": ids, "position_ids": positions, "labels": ids}
    if kind.startswith("packed"):
        numbers = torch.repeat_interleave(torch.tensor([3, 1, 9, 3]))[None]
        batch = {
            "input_ids": ids,
            "seq_idx": torch.cat([numbers, numbers.flip(1).neg()]),
            "labels": ids,
        }
        if family == "t5":
            batch |= {"decoder_seq_idx": batch["seq_idx"], "decoder_input_ids": ids.flip(1)}
        return batch
    if kind.endswith("sequence"):
        ids = ids.masked_fill(mask == 0, 0)
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1, 0])}
    if kind == "bert answer":
        return {"input_ids": ids, "attention_mask": mask, "start_positions": torch.tensor([2, 9]),
                "end_positions": torch.tensor([12, 10])}  # fmt: skip
    if kind == "bert tokens":
        labels = torch.where(labels < 0, labels, labels % 2)
    if family in ("t5", "mt5", "umt5", "bart", "m2m_100"):
        labels = labels[:, : LENGTH // 2].flip(1).clone()
        labels[0, 5:] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if kind == "bert":
        batch["next_sentence_label"] = torch.tensor([1, 0])
    return batch


def compute(
    kind: str, mesh: Any, **settings: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """The loss of a training step with dropout, this rank's gradients, and the output."""
    from shardzoo.models import ParallelConfig, from_config
    from shardzoo.mpu import dropout_state

    family, changes = KINDS[kind]
    config = tiny(family, 0.1, **changes)
    model = from_config(config, mesh, parallel_config=ParallelConfig(**settings), seed=3).train()
    dropout_state.set(5, 0)
    output = model(**example(kind))
    output.loss.backward()
    gradients = {
        name: value.grad for name, value in model.named_parameters() if value.grad is not None
    }
    return output.loss.detach(), gradients, (model, output)


def differences(
    mesh: Any, whole_mesh: Any, kinds: list[str], all_settings: list[dict[str, Any]]
) -> list[str]:
    """What the split models compute otherwise than the whole ones."""
    import torch.distributed as dist

    wrong = []
    for kind in kinds:
        loss, gradients, (model, output) = compute(kind, whole_mesh)
        logits = None
        if hasattr(output, "logits"):
            logits = model.gather_logits(output.logits)
        for settings in all_settings:
            name = f"{kind} {settings}"
            if kind.startswith("m2m") and settings.get("sequence_parallel"):
                continue
            own_loss, own, (own_model, own_output) = compute(kind, mesh, **settings)
            if (own_loss - loss).abs() > 1e-5:
                wrong.append(f"{name}: the loss is {own_loss} and not {loss}")
            if logits is not None:
                whole = own_model.gather_logits(own_output.logits)
                if whole.shape != logits.shape or not torch.allclose(whole, logits, atol=1e-5):
                    wrong.append(f"{name}: logits")
            for parameter, gradient in gradients.items():
                total = own[parameter].clone()
                dist.all_reduce(total, group=mesh.cp_group)
                difference = float((total - gradient).abs().max())
                if difference > 1e-5 * max(1.0, float(gradient.abs().max())):
                    wrong.append(f"{name}: {parameter} by {difference:.1e}")
                    break
    return wrong


def test_every_family_is_the_same_with_split_sequences(run_mesh):
    exchanges = [{"context_exchange": name} for name in ("heads", "keys", "ring")]
    kinds = every_day(DAILY, more=[kind for kind in KINDS if kind not in DAILY])
    for wrong in run_mesh(1, differences, None, kinds, exchanges, context=2):
        assert wrong == []


def test_tensor_parallel_ranks_split_sequences_too(run_mesh):
    settings = [
        {"context_exchange": "heads"},
        {"context_exchange": "keys", "sequence_parallel": True},
        {"context_exchange": "ring", "sequence_parallel": True},
        {"recompute": "full", "context_exchange": "keys"},
        {"recompute": "selective"},
    ]

    def compare(mesh, kinds):
        from shardzoo.mpu import ParallelMesh

        return differences(mesh, ParallelMesh(2), kinds, settings)

    for wrong in run_mesh(
        2, compare, every_day(["gpt2", "t5"], more=["mistral", "glm", "bert"]), context=2
    ):
        assert wrong == []


def differentiate_bias(mesh: Any, positions: int, dropout: float, exchange: str) -> torch.Tensor:
    """The gradient of the relative bias of an encoder, in fp64 without a mesh."""
    import torch.distributed as dist

    from shardzoo.models import ParallelConfig, from_config
    from shardzoo.mpu import dropout_state

    config = tiny("t5", dropout, architecture="T5EncoderModel", num_layers=1)
    parallel = ParallelConfig(context_exchange=exchange)
    dtype = torch.float64 if mesh is None else torch.float32
    model = from_config(config, mesh, dtype=dtype, parallel_config=parallel, seed=3).train()
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(5, 90, (1, positions), generator=generator)
    weights = torch.randn(1, positions, config["d_model"], generator=generator, dtype=torch.float64)
    dropout_state.set(5, 0)
    states = model(input_ids=ids).last_hidden_state
    # Every context-parallel rank gets all states, and computes the same sum of them.
    ranks = 1 if mesh is None else mesh.cp_size
    ((states * weights.to(dtype)).sum() / ranks).backward()
    [gradient] = [
        value.grad
        for name, value in model.named_parameters()
        if "relative" in name and "bias" in name
    ]
    if mesh is not None:
        dist.all_reduce(gradient, group=mesh.cp_group)
    return gradient.double()


@pytest.mark.before_release
def test_gradients_of_the_relative_bias_of_a_long_sequence(run_mesh):
    """Of 4,096 positions on four ranks: each number sums up to 67 million scores."""
    positions = 4096
    for dropout, exchanges in ((0.1, ("heads", "keys", "ring")), (0.0, ("ring",))):
        expected = differentiate_bias(None, positions, dropout, "auto")
        limit = 1e-4 * float(expected.abs().max())
        for exchange in exchanges:
            results = run_mesh(1, differentiate_bias, positions, dropout, exchange, context=4)
            for found in results:
                difference = float((found - expected).abs().max())
                print(exchange, dropout, difference / float(expected.abs().max()))
                assert difference < limit
