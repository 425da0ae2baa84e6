"""The loss of a step is the mean over the targets of the global batch, however unequal its micro-batches are.

transformers' causal models and ours shift labels inside: the first label of a row is never a target, whether it is
ignored or not. The reference knows no batches: it runs each row by itself in fp64, without padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import hf_model, tiny
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED, LR = -100, 0.5
# Steps of data-parallel ranks of micro-batches of rows: each a length, and the positions whose labels are ignored.
Row = tuple[int, tuple[int, ...]]
STEPS: list[list[list[list[Row]]]] = [
    [
        [
            [(7, (0,)), (3, ())],
            [(1, ()), (1, ())],
        ],  # a micro-batch without a target, but with first labels
        [[(1, (0,)), (5, (2,))], [(9, (0, 1, 8)), (2, ())]],
    ],
    [[[(4, ()), (4, ())], [(8, (0, 3, 4)), (1, ())]], [[(2, (1,)), (1, ())], [(6, ()), (6, (0,))]]],
    [[[(2, ()), (2, ())], [(2, ()), (2, ())]], [[(9, (0,)), (8, (0,))], [(7, (0, 1)), (9, (0,))]]],
]
RANKS, ACCUMULATED, SIZE = 2, 2, 2


def row_of(step: int, rank: int, k: int, place: int) -> dict[str, Tensor]:
    length, ignored = STEPS[step][rank][k][place]
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + 10 * k + place)
    ids = torch.randint(0, 40, (length,), generator=generator)
    labels = ids.clone()
    labels[list(ignored)] = IGNORED
    return {"input_ids": ids, "labels": labels}


def rows_of(step: int) -> list[dict[str, Tensor]]:
    places = (
        (rank, k, place)
        for rank in range(RANKS)
        for k in range(ACCUMULATED)
        for place in range(SIZE)
    )
    return [row_of(step, *at) for at in places]


class MicroBatches:
    """The micro-batches of one rank, padded by the trainer's own collate function."""

    def __init__(self, rank: int, accumulated: int, size: int) -> None:
        self.rank, self.accumulated, self.size = rank, accumulated, size

    def __iter__(self):
        from shardzoo.data.loading.collate import DataCollator

        collate = DataCollator(0)
        for step in range(len(STEPS)):
            rows = rows_of(step)
            for k in range(self.accumulated):
                first = (self.rank * self.accumulated + k) * self.size
                yield collate(rows[first : first + self.size])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the run does not resume")


def hf_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).train()


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], Any]:
    """The losses, and the model after the last step of SGD."""
    model = hf_gpt2().double()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    losses = []
    for step in range(len(STEPS)):
        total, targets = torch.zeros((), dtype=torch.float64), 0
        for row in rows_of(step):
            log_probabilities = model(row["input_ids"][None]).logits[0].log_softmax(-1)
            for position, label in enumerate(row["labels"].tolist()[1:]):
                if label != IGNORED:
                    total = total - log_probabilities[position, label]
                    targets += 1
        optimizer.zero_grad()
        (total / targets).backward()
        optimizer.step()
        losses.append(float(total.detach()) / targets)
    return losses, model.float()


def train(
    mesh: Any, folder: Any, *, native: bool, accumulated: int, size: int
) -> tuple[list[float], dict[str, Tensor]]:
    """SGD without clipping: unlike Adam's, its updates are as wrong as the loss is."""
    import shardzoo
    from shardzoo.trainer import Trainer, TrainingArguments
    from shardzoo.trainer.logging.reporter import SilentReporter

    class Losses(SilentReporter):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def training(self, step: int, values: dict[str, float]) -> None:
            self.losses.append(values["loss"])

    arguments = TrainingArguments(
        env_type="pytorchDDP", micro_batch_size=size, gradient_accumulation_steps=accumulated, train_steps=len(STEPS),
        lr_schedule="constant", warmup_ratio=0.0, clip_grad=0.0, log_interval=1, save_dir=str(folder / "run"),
    )  # fmt: skip
    reporter, trainer = Losses(), Trainer(arguments, mesh=mesh)
    model = shardzoo.from_pretrained(folder / "hf").train() if native else hf_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    data = MicroBatches(trainer.share.rank, accumulated, size)
    trainer.train(model, optimizer, train_dataset=data, reporter=reporter)
    return reporter.losses, {
        name: value.detach().clone() for name, value in model.named_parameters()
    }


@pytest.mark.parametrize("native", [False, True], ids=["transformers' model", "ours"])
@pytest.mark.parametrize(
    ("ranks", "accumulated"), [(RANKS, ACCUMULATED), (1, RANKS * ACCUMULATED), (RANKS, 1)]
)
def test_ragged_global_batches_are_the_mean_over_all_targets(
    run_mesh, tmp_path, reference, native, ranks, accumulated
):
    """The same global batches by accumulation on two ranks, by accumulation alone, and by two ranks alone."""
    import shardzoo

    expected_losses, trained = reference
    hf_gpt2().save_pretrained(tmp_path / "hf")
    trained.save_pretrained(tmp_path / "trained")
    expected = shardzoo.from_pretrained(tmp_path / "trained") if native else trained
    expected_weights = {name: value.detach() for name, value in expected.named_parameters()}
    size = RANKS * ACCUMULATED * SIZE // (ranks * accumulated)
    work = partial(train, folder=tmp_path, native=native, accumulated=accumulated, size=size)
    for losses, weights in run_mesh(1, work, data=ranks):
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


TINY = {"vocab_size": 40, "max_position_embeddings": 16}
BLOCKS = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_start_token_id": 0,
}  # fmt: skip
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
CLASSES = {
    "GPT2LMHeadModel": GPT2,
    "OpenAIGPTLMHeadModel": GPT2,
    "LlamaForCausalLM": {**TINY, **BLOCKS},
    "BertLMHeadModel": {**TINY, **BLOCKS, "is_decoder": True},
    "BertForMaskedLM": {**TINY, **BLOCKS},
    "BartForCausalLM": {**TINY, **BART},
    "BartForConditionalGeneration": {**TINY, **BART},
    "T5ForConditionalGeneration": T5,
    "XLNetLMHeadModel": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
    # not in the table, so the model is asked
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 1, "n_head": 2},
    "MBartForConditionalGeneration": {**TINY, **BART},
    "MambaForCausalLM": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "PegasusForCausalLM": {**TINY, **BART},
}


def tiny_transformers_model(kind: str) -> Any:
    import transformers

    model_class = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(model_class.config_class(**{"vocab_size": 40, **CLASSES[kind]}))


@pytest.mark.parametrize("kind", CLASSES)
def test_the_first_label_is_counted_where_the_model_counts_it(kind):
    """The model's loss is the mean over the counted targets alone, computed from its logits in fp64."""
    from shardzoo.trainer.batches.loss_normalization import LossNormalizer

    model = tiny_transformers_model(kind).eval()
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    count = LossNormalizer(model, mean_losses=True).count({**inputs, "labels": ids})
    others = ids.clone()
    others[:, 0] = IGNORED
    with torch.no_grad():
        counted = bool(model(**inputs, labels=ids).loss != model(**inputs, labels=others).loss)
        output = model.double()(**inputs, labels=ids)
    assert count == [12.0 if counted else 10.0]
    log_probabilities = output.logits.double().log_softmax(-1)
    if not counted:
        log_probabilities = log_probabilities[:, :-1]
    targets = ids if counted else ids[:, 1:]
    own = log_probabilities.gather(-1, targets[..., None])
    assert float(output.loss) == pytest.approx(-float(own.sum()) / count[0], rel=1e-6)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_table_agrees_with_the_models_answer(kind):
    from shardzoo.trainer.batches import label_shift

    model = tiny_transformers_model(kind)
    known = label_shift._look_up(model)
    in_table = kind in label_shift.SHIFTS_LABELS or kind.endswith(label_shift.ALIGNED_HEADS)
    assert (known is not None) == in_table
    assert known in (None, label_shift._ask(model))


class UsersModel(torch.nn.Module):
    """A language model of a user's own, whose logits are all equal before training."""

    def __init__(self, *, shifts: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 8)
        self.dropout = torch.nn.Dropout(0.5)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 40)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.shifts = shifts

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(self.embedding(input_ids))
        logits = self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))
        if self.shifts:
            logits = logits[:, :-1]
            labels = labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("shifts", [False, True])
def test_a_users_model_is_asked_and_left_as_it_was(shifts):
    from shardzoo.trainer.batches import label_shift

    model = UsersModel(shifts=shifts).train()
    model.norm.eval()  # as in fine-tuning
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert label_shift._ask(model) is shifts
    assert torch.equal(torch.get_rng_state(), state)
    assert [model.training, model.dropout.training, model.norm.training] == [True, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_name_decides_where_a_model_refuses_the_question():
    from shardzoo.trainer.batches import label_shift

    class Refuses(torch.nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            raise KeyError("a longer row")

    class RefusesForCausalLM(Refuses):
        pass

    class TakesImages(torch.nn.Module):
        def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            raise AssertionError("the labels are no tokens")

    found = [
        label_shift.shifts_labels(kind()) for kind in (Refuses, RefusesForCausalLM, TakesImages)
    ]
    assert found == [False, True, False]


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        (
            "ForSequenceClassification",
            {"labels": torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 1, 1], [1, 1, 1]])},
        ),
        ("ForSequenceClassification", {"labels": torch.tensor([0, 2, -100, 1])}),
        (
            "ForTokenClassification",
            {"labels": torch.tensor([[0, 2, -100], [1, -100, -100], [2, 2, 1], [0, 0, 1]])},
        ),
        (
            "ForQuestionAnswering",
            {"start_positions": torch.arange(4) % 3, "end_positions": torch.ones(4).long()},
        ),
    ],
)
def test_the_losses_of_micro_batches_add_up_for_every_head(head, labels):
    """Two micro-batches, normalized as in the trainer, have the loss and gradient of the batch's mean."""
    from shardzoo.models import family, from_config
    from shardzoo.trainer.batches.loss_normalization import LossNormalizer

    config = (
        family("bert")
        .presets["bert-quickstart"]
        .with_changes(architecture=f"Bert{head}", num_labels=3)
    )
    model: Any = from_config(config).eval()
    batch = {"input_ids": torch.arange(10, 22).view(4, 3), **labels}
    parts = [
        {name: value[rows] for name, value in batch.items()} for rows in (slice(0, 3), slice(3, 4))
    ]
    normalizer = LossNormalizer(model, mean_losses=False)
    counts = [normalizer.count(part) for part in parts]
    totals = [sum(numbers) for numbers in zip(*counts, strict=True)]
    losses = [model(**part, **normalizer.model_arguments(totals)).loss for part in parts]
    torch.testing.assert_close(sum(losses), model(**batch).loss)


@pytest.mark.parametrize("missing", ["labels", "next_sentence_label"])
def test_pretraining_without_targets_of_one_kind_learns_the_other(missing, tmp_path):
    """A global batch without a sentence label, or without a masked token, has the other loss alone.

    The oracle is transformers' model with PyTorch's loss of the kind that has targets.
    """
    import shardzoo
    from shardzoo.trainer.batches.loss_normalization import LossNormalizer

    reference = hf_model("BertForPreTraining", 0.0, vocab_size=40)
    reference.save_pretrained(tmp_path)
    ids = torch.randint(3, 40, (4, 7), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids % 3 == 0, ids, IGNORED)
    assert (labels != IGNORED).any()
    batch = {
        "input_ids": ids,
        "labels": labels,
        "next_sentence_label": torch.tensor([0, 1, 1, IGNORED]),
    }
    batch[missing] = torch.full_like(batch[missing], IGNORED)

    found = reference(ids)
    if missing == "labels":
        expected = cross_entropy(found.seq_relationship_logits, batch["next_sentence_label"])
    else:
        expected = cross_entropy(found.prediction_logits.flatten(0, 1), labels.flatten())
    expected.backward()

    model = shardzoo.from_pretrained(tmp_path)
    normalizer = LossNormalizer(model, mean_losses=False)
    parts = [
        {name: value[rows] for name, value in batch.items()} for rows in (slice(0, 3), slice(3, 4))
    ]
    counts = [normalizer.count(part) for part in parts]
    totals = [sum(numbers) for numbers in zip(*counts, strict=True)]
    loss = torch.zeros(())
    for part, count in zip(parts, counts, strict=True):
        output = model(**part, **normalizer.model_arguments(totals))
        share = normalizer.normalize(output.loss, count, totals)
        share.backward()
        loss = loss + share.detach()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    gradient = model.encoder.word_embeddings.weight.grad[:40]
    wanted = reference.get_input_embeddings().weight.grad
    # fp32: the sums over tokens differ in their order, relative to the largest of them.
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("name", "place", "value", "told"),
    [
        ("labels", (1, 2), 99, "labels of training sample 41 at position 2 is 99; it must be from 0 to "),
        ("labels", (0, 1), -1, "labels of training sample 40 at position 1 is -1; it must be from 0 to "),
        ("input_ids", (1, 0), 99, "input_ids of training sample 41 at position 0 is 99; it must be from "),
        ("input_ids", (0, 3), -1, "input_ids of training sample 40 at position 3 is -1; it must be from "),
        ("input_ids", (0, 3), IGNORED, "input_ids of training sample 40 at position 3 is -100; it must"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_named_with_its_own_sample(name, place, value, told):
    from shardzoo.models import from_config
    from shardzoo.trainer.batches.loss_normalization import describe_label_problem

    model = from_config(tiny("gpt2"))
    batch = {key: torch.full((2, 4), 3) for key in ("input_ids", "labels")}
    batch["labels"][0, 0] = IGNORED
    assert describe_label_problem(batch, model, 40) == ""
    batch[name][place] = value
    assert describe_label_problem(batch, model, 40).startswith(told)
