"""Makes the folder of a fine-tuning run, and writes folders that transformers and the zoo load."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.folder_files import GENERATION_CONFIG, STATE, replace_saved_model
from ..data.tokenizers.tokenizer import check_saved_copy
from ..files.working_copies import WorkingCopy, find_source, name_urls
from ..models import family
from ..models.generation.generation_config import TOKENS, GenerationConfig
from ..models.lora import save_adapter
from ..models.saving import CARD
from ..trainer.launch.rank_process import mark_run_as_begun
from ..trainer.launch.ranks import on_first_rank
from ..trainer.run_folder import RunFolder, make_run_folder
from ..trainer.run_lock import return_folder, take_folder
from .arguments import FinetuningArguments
from .loading import ModelSource

# Arguments that describe one invocation and not the run.
INVOCATION = ("resume", "overwrite", "config", "local_rank", "dry_run")


def check_run(arguments: FinetuningArguments) -> None:
    """Raises ValueError if output_dir cannot be used for this run, or if load_dir has no
    checkpoint. Writes nothing.
    """
    if arguments.output_dir:
        folder = RunFolder.named(arguments.output_dir)
        texts = (arguments.train_file, arguments.validation_file, arguments.test_file)
        reads = (arguments.model_name_or_path, arguments.load_dir, *texts)
        folder.first_step(resume=arguments.resume, overwrite=arguments.overwrite, reads=reads)
    if arguments.load_dir is not None:
        path = find_source(arguments.load_dir) or Path(arguments.load_dir)
        if not RunFolder(path).steps() and not (path / STATE).exists():
            raise ValueError(f"load_dir {path} holds no checkpoint")


def open_run(arguments: FinetuningArguments, write_companions: Callable[[Path], None]) -> RunFolder:
    """Takes the run's folder, either output_dir or a new one, for this process. Called by the first
    rank.

    Raises:
        ValueError: as for `check_run`, or the folder cannot be made.
    """
    if not arguments.output_dir:
        folder = RunFolder(make_run_folder(arguments.model_name_or_path))
    else:
        folder = RunFolder.named(arguments.output_dir)
    take_folder(folder.path)
    try:
        check_run(arguments)
        if arguments.overwrite:
            folder.clear()
        kept = {name: value for name, value in asdict(arguments).items() if name not in INVOCATION}
        folder.record_arguments(kept)
        write_companions(tokenizer_folder(folder))
    except BaseException:
        return_folder(folder.path)
        raise
    mark_run_as_begun()
    return folder


def tokenizer_folder(run: RunFolder) -> Path:
    """Returns the folder of a run whose files every checkpoint gets."""
    return run.path / "tokenizer"


def write_companions(tokenizer: Any, source: ModelSource, folder: Path) -> None:
    """Writes the files that belong to the weights: the tokenizer and the generation settings."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    check_saved_copy(tokenizer, folder)
    if not source.native:
        return  # transformers writes its model's settings itself.
    stored = source.folder / GENERATION_CONFIG
    if stored.exists():
        shutil.copy2(stored, folder)
        return
    # An old folder has settings in its config.json, which is written anew without them.
    settings = GenerationConfig.from_folder(source.folder, None)
    if not settings.to_dict().keys() <= set(TOKENS):
        settings.save(folder)


def save_whole(model: Any, source: ModelSource, companions: Path, folder: Path) -> None:
    """Writes a Hugging Face folder of the whole model with a model card, or of its LoRA weights.
    Collective.

    Args:
        companions: A folder whose files, such as the tokenizer's, are copied beside the weights.

    Raises:
        ValueError: `folder` holds files other than a model that was saved there before.
    """
    on_first_rank(lambda: check_destination(folder))
    partial = folder.with_name(f".{folder.name}.partial")
    on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True))
    adapted = getattr(model, "lora", None)
    if adapted is not None:
        save_adapter(model, partial, name_urls(str(source.folder.resolve())))
    elif source.native:
        model.save_pretrained(partial)
    else:
        on_first_rank(lambda: model.save_pretrained(partial))

    def complete() -> None:
        if adapted is not None and not (partial / CARD).exists():
            text = adapter_card(source, adapted.config.task_type)
            (partial / CARD).write_text(text, encoding="utf-8")
        # peft's files do not hold the labels of a head.
        if adapted is not None and adapted.config.task_type not in ("CAUSAL_LM", "SEQ_2_SEQ_LM"):
            model.config.save(partial)
        for file in companions.rglob("*"):
            target = partial / file.relative_to(companions)
            if file.is_dir():
                target.mkdir(exist_ok=True)
            elif not target.exists():
                shutil.copy2(file, target)
        replace_saved_model(folder, partial)

    on_first_rank(complete)


def adapter_card(source: ModelSource, task: str | None) -> str:
    """Returns the text of a README.md beside LoRA weights: of which model they are, and how they are
    used.

    Args:
        task: peft's name of the task, such as "CAUSAL_LM".
    """
    base = name_urls(str(source.folder.resolve()))
    command = f"shardzoo generate --model {shlex.quote(base)} --adapter . --prompt TEXT"
    classes = {"CAUSAL_LM": "AutoPeftModelForCausalLM", "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM"}
    text = f"---\nlibrary_name: peft\ntags:\n- shardzoo\n- lora\n- {source.model_type}\n---\n\n"
    text += f"# LoRA weights, fine-tuned with shardzoo\n\nThey are for the model in `{base}`.\n"
    if task in classes:
        text += f"\n## How they are used\n\nIn this folder:\n\n```bash\n{command}\n```\n"
        if family(source.model_type).in_transformers:
            name = classes[task]
            text += f"\n```python\nfrom peft import {name}\n\n"
            text += f'model = {name}.from_pretrained(".")\n```\n'
    return text


def check_destination(folder: Path) -> None:
    """Makes the parent of a folder. Raises ValueError unless a model may be saved in the folder,
    which is then new, empty, or holds a model that it replaces.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder to save the model in")
    holds_model = (folder / "config.json").exists() or (folder / "adapter_config.json").exists()
    if folder.is_dir() and any(folder.iterdir()) and not holds_model:
        raise ValueError(f"{folder} holds files other than a model; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def sending_run(folder: Path) -> Generator[None]:
    """Sends what is written into a run's folder after the run, if it is the local copy of one in an
    object store. Collective.

    Raises:
        ValueError: Another run uses the folder.
    """
    if WorkingCopy.find_whole(folder) is None:
        yield
        return
    taken: list[Path] = []  # empty on the other ranks

    def take() -> None:
        take_folder(folder)
        taken.append(folder)

    on_first_rank(take)
    try:
        yield
    except BaseException:
        for path in taken:
            return_folder(path, send=False)
        raise
    on_first_rank(lambda: return_folder(folder))
