"""transformers' own Trainer draws the same curve on the same model, data and schedule."""

from __future__ import annotations

import pytest
import torch
from every_case import every_day
from training import Pairs, losses, run_training, tiny_t5

STEPS, BATCH = 50, 4


class Endless:
    """Taken in order, over and over."""

    def __getitem__(self, index):
        return Pairs(64)[index % 64]


def collate(samples):
    from shardzoo.data.loading.collate import DataCollator

    return DataCollator(0)(samples)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    from transformers import Trainer, TrainingArguments

    class InOrder(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (Endless()[i] for i in range(STEPS * BATCH))

    arguments = TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("theirs")), max_steps=STEPS, per_device_train_batch_size=BATCH,
        logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, lr_scheduler_type="linear", warmup_steps=5, weight_decay=0.0,
        max_grad_norm=1.0, disable_tqdm=True, remove_unused_columns=False, logging_nan_inf_filter=False,
        learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(tiny_t5(), arguments, data_collator=collate, train_dataset=InOrder())
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("native", every_day([True], more=[False]), ids="native={}".format)
def test_the_curve_is_that_of_transformers(tmp_path, expected, native):
    model = None
    if native:
        import shardzoo

        tiny_t5().save_pretrained(tmp_path / "hf")
        model = shardzoo.from_pretrained(tmp_path / "hf")
    steps, _ = run_training(
        None,
        tmp_path / "ours",
        model=model,
        data=Endless(),
        train_steps=STEPS,
        micro_batch_size=BATCH,
        lr_schedule="linear",
        warmup_steps=5,
        weight_decay=0.0,
    )
    assert len(expected) == STEPS
    assert losses(steps) == pytest.approx(expected, abs=1e-4)
    assert losses(steps)[-1] < losses(steps)[0] - 1
