"""How many of the package's files one optimizer step runs through: a step must be readable in a few of them.

`python tests/test_step_trace.py [gpt2|t5|bert|glm]` prints the files, with the number of calls into each.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import shardzoo
from shardzoo.trainer import Trainer

PACKAGE = Path(shardzoo.__file__).parent
LENGTH = 16
TINY = {
    "gpt2": {"vocab_size": 64, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "t5": {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "bert": {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": LENGTH,
    },
    "glm": {
        "vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "max_sequence_length": LENGTH,
    },
}  # fmt: skip
MOST_FILES = 20
MOST_OF_THE_MODEL = 14  # files of ops/, mpu/ and models/ together


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(LENGTH) + index) % 64
        return {"input_ids": ids, "labels": ids}


class FileTrace:
    """Records the file of each call into the package, in all threads of Python, from one forward pass to the next."""

    def __init__(self, model: torch.nn.Module, step: int) -> None:
        self.files: list[str] = []
        self.forwards, self.step = 0, step
        model.register_forward_pre_hook(self.at_forward)

    def at_forward(self, *_):
        self.forwards += 1
        if self.forwards == self.step:
            threading.setprofile(self.profile)  # a backward pass on an accelerator runs in threads of its own
            sys.setprofile(self.profile)
        elif self.forwards == self.step + 1:
            sys.setprofile(None)
            threading.setprofile(None)

    def profile(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            name = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
            if not name.startswith(("tests/", ".venv/")):  # the virtual environment lies in the checkout too
                self.files.append(name)

    @property
    def switches(self) -> int:
        """How often a call goes to another file than the call before it."""
        return sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))


def trace_step(family: str, folder: Path) -> FileTrace:
    """One step of a steady run with dropout, from a forward pass to the next, with the fetching of the batch."""
    config = shardzoo.models.family(family).config(**TINY[family])
    trainer = Trainer(
        env_type="pytorch", train_steps=5, batch_size=2, log_interval=100, save_dir=str(folder), save_interval=100
    )
    model = shardzoo.from_config(config)
    trace = FileTrace(model, step=3)
    trainer.train(model, train_dataset=Tokens())
    return trace


@pytest.mark.parametrize("family", TINY)
def test_a_step_runs_through_few_files(family, tmp_path):
    trace = trace_step(family, tmp_path)
    files = set(trace.files)
    of_the_model = {name for name in files if name.startswith(("ops/", "mpu/", "models/"))}
    assert any(name.startswith("trainer/") for name in files)
    assert len(of_the_model) <= MOST_OF_THE_MODEL, sorted(of_the_model)
    assert len(files) <= MOST_FILES, sorted(files)


if __name__ == "__main__":
    for name in sys.argv[1:] or TINY:
        with tempfile.TemporaryDirectory() as folder:
            step = trace_step(name, Path(folder))
        print(f"{name}: {len(set(step.files))} files, {len(step.files)} calls, {step.switches} switches")
        for file, calls in sorted(Counter(step.files).items()):
            print(f"  {calls:5} {file}")
