"""FlagAI's T5 tutorial: trains T5 to write titles for texts, with a custom forward step.

The script works in all four environments and starts the processes that it needs. Without arguments a small random T5
learns to write the first line of a docstring from the rest.
"""

from pathlib import Path

import tiny
import tyro
from torch.utils.data import Dataset
from transformers import AutoTokenizer, T5ForConditionalGeneration

import shardzoo
from shardzoo.data import load_pairs
from shardzoo.trainer import Trainer
from shardzoo.trainer.arguments.training_arguments import EnvType


class MyTrainer(Trainer):
    def forward_step(self, data, model, mems):
        outputs = model(**data)
        return {"loss": outputs.loss, "logits": outputs.logits}


class TitleDataset(Dataset):
    """Gives samples that the default collate_fn pads: token ids with the padding token, labels with -100."""

    def __init__(self, pairs, tokenizer, max_length):
        self.pairs, self.tokenizer, self.max_length = pairs, tokenizer, max_length

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        source, target = self.pairs[i]
        sample = self.tokenizer(
            source, text_target=target, max_length=self.max_length, truncation=True
        )
        return {"input_ids": sample.input_ids, "labels": sample.labels}


def main(
    model: Path | None = None,
    data: Path | None = None,
    env_type: EnvType = "pytorch",
    pytorch_device: str = "cpu",
    num_gpus: int = 1,
    model_parallel_size: int = 1,
    fp16: bool = False,
    checkpoint_activations: bool = False,
    batch_size: int = 8,
    lr: float = 1e-3,
    epochs: int = 1,
    max_length: int = 64,
    save_dir: Path = Path("runs/examples"),
) -> None:
    """
    Args:
        model: a T5's Hugging Face folder.
        data: NAME of two files, NAME.source with texts and NAME.target with their titles, line by line.
        num_gpus: number of processes, also without GPUs.
    """
    trainer = MyTrainer(
        env_type=env_type,
        pytorch_device=pytorch_device,
        epochs=epochs,
        batch_size=batch_size,
        eval_interval=50,
        log_interval=5,
        experiment_name=f"flagai-t5-{env_type}",
        save_dir=str(save_dir),
        resume=True,
        lr=lr,
        fp16=fp16,
        checkpoint_activations=checkpoint_activations,
        num_gpus=num_gpus,
        model_parallel_size=model_parallel_size,
        training_script=__file__,
    )
    pairs = load_pairs(data) if data else [(doc.text, doc.title) for doc in tiny.docstrings()]
    folder = model or tiny.checkpoint(
        "t5", [" ".join(pair) for pair in pairs], save_dir / "tiny-t5"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if env_type == "deepspeed+mpu":  # splits the layers, which only the zoo's models support
        net = shardzoo.from_pretrained(folder, mesh=trainer.mesh)
    else:
        net = T5ForConditionalGeneration.from_pretrained(folder)

    train_size = int(len(pairs) * 0.8)
    trainer.train(
        net,
        train_dataset=TitleDataset(pairs[:train_size], tokenizer, max_length),
        valid_dataset=TitleDataset(pairs[train_size:], tokenizer, max_length),
    )
    text, title = pairs[-1]
    ids = tokenizer(text, max_length=max_length, truncation=True, return_tensors="pt").input_ids
    # So small a model, trained for so short a time, would end its title at once.
    output = net.eval().generate(ids.to(trainer.device), min_new_tokens=4, max_new_tokens=12)
    ours = tokenizer.decode(output[0], skip_special_tokens=True)
    trainer.console.print(f"{text[:70]} …\n  title: {title}\n  ours:  {ours}", markup=False)


if __name__ == "__main__":
    tyro.cli(main)
