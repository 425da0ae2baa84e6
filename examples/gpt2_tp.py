"""Trains GPT-2 split over two processes, generates text, and exports one folder for transformers.

Without arguments a small random GPT-2 is trained on docstrings; `--model` takes a real one, `--data` any text.
"""

from pathlib import Path

import tiny
import torch
import tyro
from torch.utils.data import Subset
from transformers import GPT2LMHeadModel

import shardzoo
from shardzoo.convert import Options, merge
from shardzoo.data import BlockDataset, iter_documents, load_tokenizer
from shardzoo.trainer import Trainer
from shardzoo.trainer.launch.ranks import on_first_rank


def main(
    model: Path | None = None,
    data: Path | None = None,
    prompt: str = "Return the",
    model_parallel_size: int = 2,
    num_gpus: int = 2,
    batch_size: int = 16,
    epochs: int = 1,
    lr: float = 3e-3,
    block_size: int = 64,
    save_dir: Path = Path("runs/examples"),
) -> None:
    """
    Args:
        model: a GPT-2's Hugging Face folder.
        data: texts: a file, a folder, or JSON lines with `text`.
        num_gpus: number of processes; a multiple of model_parallel_size gives data-parallel ranks.
    """
    trainer = Trainer(
        env_type="deepspeed+mpu",
        model_parallel_size=model_parallel_size,
        num_gpus=num_gpus,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        log_interval=5,
        experiment_name="gpt2-tp",
        save_dir=str(save_dir),
        resume=True,
    )
    texts = list(iter_documents(data)) if data else [doc.text for doc in tiny.docstrings()]
    folder = model or tiny.checkpoint("gpt2", texts, save_dir / "tiny-gpt2")
    tokenizer = load_tokenizer(folder)
    blocks = BlockDataset(texts, tokenizer, block_size)
    net = shardzoo.from_pretrained(folder, trainer.mesh)  # each rank reads its own part
    values = trainer.train(net, train_dataset=blocks)

    few = Subset(blocks, range(min(8, len(blocks))))
    loss = trainer.evaluate(net, few)["loss"]
    ids = torch.tensor([tokenizer.encode(prompt)])
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    continued = net.eval().generate(ids.to(trainer.device), **settings)

    hf = trainer.run_folder.hf

    def export() -> None:
        merge(trainer.run_folder.checkpoint(int(values["step"])), hf, Options(overwrite=True))

    on_first_rank(export)
    whole = GPT2LMHeadModel.from_pretrained(hf).eval()
    batch = torch.tensor([sample["input_ids"].tolist() for sample in few])
    with torch.no_grad():
        same = whole(input_ids=batch, labels=batch).loss
    assert torch.equal(whole.generate(ids, **settings), continued.cpu())
    say = trainer.console.print
    say(f"loss split {model_parallel_size} ways {loss:.6f}; in transformers, from {hf}, {same:.6f}")
    say(tokenizer.decode(continued[0].tolist()), markup=False)


if __name__ == "__main__":
    tyro.cli(main)
