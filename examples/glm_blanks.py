"""Trains GLM to fill blanks (tokens, sentences, or the rest of a document), and then fills a blank.

Without arguments a small random GLM is trained on docstrings; `--model` takes a real one with its tokenizer.
"""

from pathlib import Path

import tiny
import tyro

import shardzoo
from shardzoo.data import (
    GLMObjective,
    IndexedDataset,
    PrepareOptions,
    PretrainingData,
    build_loader,
    glm_tokenizer,
    load_tokenizer,
    prepare_dataset,
    train_byte_level_bpe,
)
from shardzoo.data.tokenizers.glm_tokens import GLMVocabulary
from shardzoo.generation import TextGenerationPipeline
from shardzoo.trainer import Trainer
from shardzoo.trainer.arguments.training_arguments import EnvType
from shardzoo.trainer.launch.ranks import on_first_rank

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 128}


def main(
    model: Path | None = None,
    data: Path | None = None,
    text: str = "Return the [MASK] of the message.",
    glm_vocabulary: GLMVocabulary = "gpt2",
    env_type: EnvType = "pytorch",
    num_gpus: int = 1,
    model_parallel_size: int = 1,
    batch_size: int = 8,
    train_steps: int = 60,
    lr: float = 3e-3,
    sequence_length: int = 64,
    token: float = 0.5,
    sentence: float = 0.3,
    save_dir: Path = Path("runs/examples"),
) -> None:
    """
    Args:
        model: a GLM's folder.
        data: texts: a file, a folder, or JSON lines with `text`.
        text: the text to complete at the end: [MASK] stands for words, [sMASK] for sentences, [gMASK] for the rest.
        glm_vocabulary: the base vocabulary of the model.
        token: share of samples whose blanks are some tokens.
        sentence: share of samples whose blanks are sentences; the others continue a document.
    """
    trainer = Trainer(
        env_type=env_type,
        num_gpus=num_gpus,
        model_parallel_size=model_parallel_size,
        train_steps=train_steps,
        batch_size=batch_size,
        lr=lr,
        log_interval=5,
        experiment_name=f"glm-{env_type}",
        save_dir=str(save_dir),
        resume=True,
    )
    source = data or tiny.json_lines(
        [{"text": doc.text} for doc in tiny.docstrings()], save_dir / "docstrings.jsonl"
    )
    folder, prefix = model or save_dir / "tiny-glm", trainer.run_folder.data / "texts"

    def prepare() -> None:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        if model is None:
            train_byte_level_bpe((doc.text for doc in tiny.docstrings()), 600, folder)
        prepare_dataset(source, prefix, PrepareOptions(folder), overwrite=True)

    on_first_rank(prepare)
    tokenizer = load_tokenizer(folder)
    vocabulary = glm_tokenizer(tokenizer, glm_vocabulary).padded_vocab_size()
    objective = GLMObjective(vocabulary=glm_vocabulary, token=token, sentence=sentence)
    mixture = PretrainingData(objective, sequence_length, micro_batch_size=batch_size)
    share = trainer.share
    loader = build_loader(
        mixture, IndexedDataset(prefix), tokenizer, rank=share.rank, world_size=share.world_size
    )

    if model:
        net = shardzoo.from_pretrained(model, trainer.mesh)
    else:
        net = shardzoo.from_config(
            {"model_type": "glm", "vocab_size": vocabulary, **SIZES}, trainer.mesh
        )
    values = trainer.train(net, train_dataset=loader, extra_files=None if model else folder)

    trained = trainer.run_folder.checkpoint(
        int(values["step"])
    )  # a checkpoint also has its tokenizer
    fill = TextGenerationPipeline(
        trained, trainer.mesh, device=trainer.device, glm_vocabulary=glm_vocabulary
    )
    trainer.console.print(fill(text, max_new_tokens=8)[0], markup=False)


if __name__ == "__main__":
    tyro.cli(main)
