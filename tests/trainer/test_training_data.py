"""What comes out of the kinds of data, labels and metrics that users have."""

from __future__ import annotations

import sys
from collections import UserDict

import datasets
import numpy as np
import pytest
import torch
from every_case import by_turns
from torch import nn
from training import Pairs, Stream, run_training

SIZE = 600  # more than the 256 records of a window


class BySelf(torch.utils.data.IterableDataset):
    """Splits itself by worker, as torch's manual tells."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return ({"input_ids": [i]} for i in range(worker, SIZE, workers))


def shuffled(shards: int = 2, size: int = SIZE):
    rows = datasets.Dataset.from_list([{"input_ids": [i]} for i in range(size)])
    return rows.to_iterable_dataset(num_shards=shards).shuffle(seed=1, buffer_size=8)


def training_data(dataset, batch: int = 10, **arguments):
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.batches.training_data import make_training_data
    from shardzoo.trainer.launch.ranks import Ranks

    return make_training_data(
        dataset, TrainingArguments(micro_batch_size=batch, **arguments), Ranks(None), None
    )


def ids(batches) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() for batch in batches]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is elsewhere")
@pytest.mark.parametrize("problem", ["missing", "full"])
def test_workers_without_shared_memory(tmp_path, monkeypatch, problem):
    """torch's workers would be killed by SIGBUS, or fail without a word about the cause."""
    from shardzoo.trainer.batches import training_data

    if problem == "missing":
        monkeypatch.setattr(training_data, "SHARED_MEMORY", str(tmp_path / "shm"))
    else:
        monkeypatch.setattr(training_data, "LEAST_SHARED_MEMORY", 1 << 62)
    with pytest.raises(
        ValueError, match=r"num_workers=1 needs shared memory, but .* set num_workers=0"
    ):
        run_training(None, tmp_path / "run", train_steps=1, num_workers=1)
    run_training(None, tmp_path / "run", train_steps=1)


@pytest.mark.parametrize(
    "make", by_turns([BySelf, shuffled, lambda: shuffled(1), lambda: shuffled(4)], 2)
)
def test_workers_change_nothing_of_streams_that_split_themselves(make):
    plain = ids(training_data(make(), epochs=2).batches)
    assert ids(training_data(make(), epochs=2, num_workers=2).batches) == plain
    assert sorted(number for batch in plain[:60] for number in batch) == list(range(SIZE))


@pytest.mark.parametrize("at", [40, 70, 95, 110])
def test_shuffled_streams_go_on_in_any_epoch(at):
    whole = ids(training_data(shuffled(), epochs=2).batches)
    first, after = (
        training_data(shuffled(), epochs=2).batches,
        training_data(shuffled(), epochs=2).batches,
    )
    for _ in zip(range(at), first, strict=False):
        pass
    after.load_state_dict(first.state_dict())
    assert ids(after) == whole[at:]


def test_a_worker_s_epoch_is_its_own():
    """Several workers are epochs apart where these are short."""
    stream = shuffled(size=40)
    records = training_data(stream, epochs=3).batches.records
    other = torch.multiprocessing.get_context("fork").Process(target=lambda: records.make(2))
    other.start()
    other.join()
    assert stream.epoch == 0


class Sized(Stream):
    def __len__(self):
        return len(self.samples)


class SizedOfTorch(Sized, torch.utils.data.IterableDataset):
    pass


def test_streams_that_know_their_length_know_the_steps():
    assert training_data(Sized(Pairs(24)), epochs=2).steps == 4
    assert training_data(SizedOfTorch(Pairs(24)), epochs=2).steps == 4
    assert training_data(Sized(Pairs(24)), train_steps=9).steps is None
    chain = torch.utils.data.ChainDataset([BySelf(), BySelf()])  # whose len() raises
    assert training_data(chain, epochs=2).steps is None


def test_samples_may_hold_any_numbers():
    from shardzoo.data.loading.collate import DataCollator

    sample = {
        "input_ids": np.array([1, 65535], np.uint16),
        "bytes": torch.tensor([3], dtype=torch.uint8),
        "half": torch.full((2,), 0.5, dtype=torch.bfloat16),
        "learned": torch.ones(1, requires_grad=True),
        "float": 0.5,
        "double": np.float64(0.5),
        "flag": True,
    }
    batch = DataCollator(0)([UserDict(sample)] * 2)
    assert batch["input_ids"].tolist() == [[1, 65535]] * 2
    assert batch["half"].tolist() == [[0.5, 0.5]] * 2
    kinds = {
        "input_ids": torch.int64,
        "bytes": torch.int64,
        "double": torch.float64,
        "flag": torch.bool,
    }
    for name, value in batch.items():
        assert value.dtype == kinds.get(name, torch.float32), name


def test_rows_of_different_types_keep_their_values():
    from shardzoo.data.loading.collate import DataCollator

    batch = DataCollator(0)([{"x": [1, 2], "labels": []}, {"x": [0.5, 0.75, 1.5], "labels": [3]}])
    assert batch["x"].tolist() == [[1, 2, 0], [0.5, 0.75, 1.5]]
    assert batch["labels"].tolist() == [[-100], [3]]
    assert (batch["x"].dtype, batch["labels"].dtype) == (torch.float32, torch.int64)


def test_lengths_are_a_multiple_of_what_sequence_parallelism_needs():
    from shardzoo.data.loading.collate import DataCollator

    def shapes(*samples, multiple_of=4):
        batch = DataCollator(0, multiple_of)(samples)
        return {name: tuple(value.shape) for name, value in batch.items()}

    one, mask = {"input_ids": [5] * 9, "labels": [1.0] * 5}, {"attention_mask": (2, 12)}
    assert shapes(one, one) == {
        "input_ids": (2, 12),
        "labels": (2, 5),
        **mask,
    }  # five labels of a sequence
    assert shapes(one, one, multiple_of=3) == {"input_ids": (2, 9), "labels": (2, 5)}
    two = {"input_ids": [5] * 8, "labels": [5] * 7}
    assert shapes(two, two) == {"input_ids": (2, 8), "labels": (2, 8), "attention_mask": (2, 8)}
    classes = {"input_ids": [5] * 9, "labels": 1}
    assert shapes(classes, {**classes, "input_ids": [5]}) == {
        "input_ids": (2, 12),
        "labels": (2,),
        **mask,
    }


def bert(kind: str, **config):
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return getattr(transformers, kind)(
        transformers.BertConfig(**sizes, intermediate_size=8, **config)
    )


class FiveClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = bert("BertModel")
        self.config = self.bert.config

    def forward(self, **batch):
        return None


LABELS = [
    ("BertForMultipleChoice", {}, [3, 0], ""),
    ("BertForSequenceClassification", {}, [1, 2], "sample 1 is 2; it must be from 0 to 1"),
    ("BertForSequenceClassification", {"num_labels": 1}, [7, 0], ""),
    (
        "BertForTokenClassification",
        {"num_labels": 3},
        [[2, -100], [2, 3]],
        "is 3; it must be from 0 to 2",
    ),
    ("BertForMaskedLM", {}, [[39, -100], [39, 40]], "is 40; it must be from 0 to 39"),
]


@pytest.mark.parametrize(("kind", "config", "labels", "message"), LABELS)
def test_labels_are_limited_where_the_classes_are_known(kind, config, labels, message):
    from shardzoo.trainer.batches.loss_normalization import describe_label_problem

    problem = describe_label_problem({"labels": torch.tensor(labels)}, bert(kind, **config), 0)
    assert bool(problem) == bool(message)
    assert message in problem


def test_labels_of_an_own_head_are_not_limited():
    from shardzoo.trainer.batches.loss_normalization import describe_label_problem

    assert not describe_label_problem({"labels": torch.tensor([4, 0])}, FiveClasses(), 0)


def test_labels_that_are_no_tensors_count_as_rows():
    from shardzoo.trainer.batches.loss_normalization import LossNormalizer

    normalizer = LossNormalizer(FiveClasses(), mean_losses=True)
    for labels in ([{"boxes": 1}] * 3, np.arange(3)):
        assert normalizer.count({"pixel_values": torch.zeros(3, 2), "labels": labels}) == [3.0]


def test_batches_that_are_no_dicts_are_refused():
    from shardzoo.trainer.batches.loss_normalization import describe_label_problem, to_device

    batch = (torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="collate_fn must return a dict of tensors, not a tuple"):
        describe_label_problem(batch, FiveClasses(), 0)
    with pytest.raises(ValueError, match="collate_fn must return a dict of tensors, not a tuple"):
        to_device(batch, torch.device("cpu"))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (0.5, "not a float"),
        (torch.ones(2), r"not one of shape \(2,\)"),
        (torch.ones(()), "not one without a gradient"),
    ],
)
def test_losses_that_cannot_be_trained_on_are_refused(loss, message):
    from shardzoo.trainer.batches.loss_normalization import LossNormalizer, find_loss

    with pytest.raises(
        ValueError, match=f"forward_step must return a scalar tensor as loss, {message}"
    ):
        LossNormalizer(FiveClasses(), mean_losses=True).normalize(
            find_loss({"loss": loss}), [1.0], [1.0]
        )


def test_metrics_may_give_a_list_and_must_give_a_number(tmp_path):
    steps, _ = run_training(
        None, tmp_path / "list", eval_interval=1, valid=Pairs(8), metrics={"a": lambda *_: [1, 2]}
    )
    assert steps[0]["valid_a"] == 0.5
    for value, found in (
        (torch.ones(3), r"a tensor of shape \(3,\)"),
        (None, "None"),
        ((1, 2, 3), r"\(1, 2, 3\)"),
    ):
        with pytest.raises(
            ValueError, match=rf"the metric a must return a number or \[sum, count\], not {found}"
        ):
            run_training(
                None,
                tmp_path / "other",
                eval_interval=1,
                valid=Pairs(8),
                metrics={"a": lambda *_, value=value: value},
            )
