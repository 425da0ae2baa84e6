"""Fine-tunes: loads a model and its texts, trains, evaluates, generates and saves, with t2t-tuner's
API.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..checkpoint.manifest import checked_tokenizer
from ..data.tokenizers.tokenizer import load_transformers_tokenizer
from ..files.working_copies import find_work, name_urls, pull, push
from ..models.huggingface import CRF_NOTE
from ..models.loading import check_stored_model, missing_modules
from ..models.lora import list_stored_modules, merge_lora
from ..mpu import Dropout, ParallelMesh
from ..mpu.packed import PackedParameter
from ..trainer.arguments.training_arguments import TrainingArguments
from ..trainer.batches.loss_normalization import find_output_field
from ..trainer.batches.training_data import check_size
from ..trainer.distillation import Distillation, Teacher, make_teacher_mesh
from ..trainer.engines.factory import gather_parameters, shard_model
from ..trainer.engines.precision import prepare_model
from ..trainer.estimate.pipeline import check_layout
from ..trainer.evaluation import Metric
from ..trainer.launch.launch import count_processes
from ..trainer.launch.rank_info import RankInfo
from ..trainer.launch.ranks import on_first_rank
from ..trainer.logging.descriptions import describe_engine, describe_mesh
from ..trainer.lora import check_lora_names, convert_to_lora, has_lora, lora_settings, take_adapter
from ..trainer.run_folder import RunFolder
from ..trainer.run_lock import return_folder
from ..trainer.trainer import Trainer as BaseTrainer
from .arguments import FinetuningArguments
from .data import Collate, FinetuningData, TextTokenizer
from .embedding.data import ColumnCollate
from .embedding.objective import COLUMNS, EmbeddingObjective
from .evaluation import (
    answer_values,
    best_answers,
    collect_predictions,
    generated_texts,
    metric_names,
    next_token_accuracy,
    perplexity,
    predicted_values,
    text_values,
    value_names,
)
from .freezing import ModelSummary, merge_summaries, part_parameters, summarize
from .loading import (
    ModelSource,
    find_positions,
    find_source,
    label_modules,
    load_model,
    task_config,
)
from .losses import SMOOTHED, WEIGHTED, WeightedLoss, parse_class_weights
from .preference.data import PreferenceCollate
from .preference.objective import WITH_REFERENCE, PreferenceObjective, RewardObjective
from .ranking.data import RankingCollate, count_documents
from .ranking.objective import RankingObjective
from .saving import check_run, open_run, save_whole, sending_run, tokenizer_folder, write_companions
from .soft_prompt import (
    add_prompt,
    initial_rows,
    input_embedding,
    load_prompt,
    save_prompt,
    without_prompt,
)
from .tasks import WITH_ANSWERS, choose_task, stored_labels
from .text_generator import TextGenerator

SCORED = ("reranking", "reward")  # tasks of a classifier with one output


class Trainer(BaseTrainer):
    """A trainer that gets model and data from its arguments.

        trainer = Trainer(model_name_or_path=folder, train_file="pairs.json")
        trainer.freeze(embeddings=True)
        trainer.train(valid=False)

    Every rank must make the same calls.

    Attributes:
        model: This rank's part of the model.
        tokenizer: transformers' tokenizer.
        task: What is learned.
        metrics: The names of the metrics of evaluations.

    Raises:
        ValueError: The arguments, the model and the files do not fit together.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = FinetuningArguments
    # `arguments_class` is what the constructor accepts and makes.
    arguments: FinetuningArguments  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        arguments: FinetuningArguments | None = None,
        *,
        mesh: ParallelMesh | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(arguments, mesh=mesh, **keywords)
        self.source = find_source(self.arguments)
        self.task = choose_task(self.arguments, self.source)

        # An adapter's folder has the tokenizer that the adapter was trained with.
        tokenizer_source = self.source.adapter or self.source.folder
        self.tokenizer: Any = load_transformers_tokenizer(tokenizer_source)
        checked_tokenizer(self.source.folder, tokenizer_source)
        if self.task == "embedding" and self.tokenizer.pad_token is None:
            # Who loads the exported folder embeds several texts at a time.
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self._texts = TextTokenizer(self.tokenizer)
        self._data = FinetuningData(self.arguments, self.task, self.source, self._texts)
        self.metrics = metric_names(self.arguments.metric, self._data.kind)

        head = None if self._data.labels is None else self._data.labels.head(self.task)
        if self.task in SCORED:
            head = self._score_head()
        self.model: Any = load_model(
            self.source, self.task, self.arguments, self.mesh, self.device, head
        )
        if not _is_on_meta(self.model):
            self.model.to(self.device)
        self._complete_padding()
        self.weighted_loss = self._make_loss()
        self.objective = self._make_objective()
        self.positions = find_positions(self.model, self.source)
        self._data.check_lengths(self.positions)

        self._generator = TextGenerator(
            self.source,
            self._texts,
            positions=self.positions,
            max_source_length=self.arguments.max_source_length,
            max_new_tokens=self.arguments.generation_max_length or self.arguments.max_target_length,
            num_beams=self.arguments.generation_num_beams,
            batch_size=self.arguments.micro_batch_size,
            blanks=self._data.blanks,
            segments=self._data.segments,
            is_chat=self.task == "chat",
        )

        self._prompt: Any = None
        stored_prompt = load_prompt(self.source.folder)
        if stored_prompt is not None:
            self._add_prompt(*stored_prompt)
        self._add_adapter()

        self._has_run = False
        self._is_trained = False
        # What the evaluation in progress measures: the records, their samples, and the model's
        # prediction for each sample by its number.
        self._eval_records: Any = None
        self._eval_samples: Any = None
        self._predictions: dict[int, Any] = {}

    def check_before_launch(self) -> None:
        """Raises ValueError, before any process is started, if the model or the batch cannot be
        split over them, or the model's files are damaged.

        A dry run reads the other files too, and prints what it would train.
        """
        rank_info = RankInfo.from_environment()
        if rank_info.world_size > 1:
            return
        source = find_source(self.arguments)
        task = choose_task(self.arguments, source)
        if source.native:
            config = task_config(source, task)
            check_layout(self.arguments, config, rank_info)
            check_stored_model(source.folder, config, label_modules(config))
            check_lora_names(config, self.arguments)
        if self.arguments.dry_run:
            self._show_plan(source, task)

    def show_run(self) -> None:
        """Prints how the run is split, its precision, what runs its steps, and its folder."""
        lines = describe_run(self.arguments, self.ranks.dp_size)
        self.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def _show_plan(self, source: ModelSource, task: str) -> None:
        """Reads the files that the arguments name, and prints what a run would do with them.

        Raises:
            ValueError: A file, the tokenizer or the run's folder cannot be used.
        """
        arguments = self.arguments
        backend = load_transformers_tokenizer(source.adapter or source.folder)
        data = FinetuningData(arguments, task, source, TextTokenizer(backend))
        lines = [f"model        {source.folder} ({source.model_type})", f"task         {task}"]
        if arguments.train_file is not None:
            validates = arguments.validation_file is not None or arguments.validation_split > 0
            samples = len(data.train(validates))
            processes = count_processes(arguments) * max(1, arguments.num_nodes)
            replicas = processes // arguments.processes_of_a_replica
            dp_size = replicas * arguments.expert_parallel_size
            batch = arguments.global_batch(dp_size)
            check_size(samples, batch)
            lines.append(f"train_file   {samples} samples, {batch} in a step")
            lines += describe_run(arguments, dp_size)
        for name in ("validation_file", "test_file"):
            path = getattr(arguments, name)
            if path is not None:
                lines.append(f"{name.ljust(12)} {len(data.read(path, None))} records")
        check_run(arguments)
        print("\n".join(lines))

    def run_model(self, data: dict[str, Any], model: Any, mems: Any) -> Any:
        """Runs one forward pass; its loss is the task's own, or has the smoothing and weights of
        the arguments.
        """
        if self.objective is not None:
            return self.objective(data, model)
        if self.weighted_loss is not None:
            return self.weighted_loss(data, model)
        return super().run_model(data, model, mems)

    # What is trained

    def freeze(
        self,
        encoder: bool | None = None,
        decoder: bool | None = None,
        embeddings: bool | None = None,
    ) -> None:
        """Freezes a part (True), makes it trainable again (False), or leaves it unchanged (None).

        Embeddings are the tables of tokens, positions and segments; a head that is tied to the
        token table is frozen with it.

        Raises:
            ValueError: The model does not have the part.
        """
        choices = {"encoder": encoder, "decoder": decoder, "embeddings": embeddings}
        for part, frozen in choices.items():
            if frozen is None:
                continue
            parameters = part_parameters(self.model, self.source, part).values()
            if not frozen and any(isinstance(each, PackedParameter) for each in parameters):
                raise ValueError(
                    f"{part}=False trains weights that base_precision has packed; leave either out"
                )
            for parameter in parameters:
                parameter.requires_grad = not frozen

    def FreezeEmbeds(self) -> None:
        """Freezes the embeddings, as `freeze(embeddings=True)` does."""
        self.freeze(embeddings=True)

    def GradCheckpoint(self) -> None:
        """Computes the activations of blocks again in the backward pass, to save memory, as the
        argument gradient_checkpointing=True does.
        """
        self.arguments = replace(self.arguments, recompute="full")
        self.model.gradient_checkpointing_enable()

    def convert_to_prompt_tuning(
        self, prompt_list: Sequence[str], device: Any = None, use_hook: bool = True
    ) -> None:
        """Freezes the model and makes an input vector for each new token trainable, such as
        ["<p0>", "<p1>"].

        The tokens are put before every source that has none of them; `prefix` or the data may place
        them elsewhere.

        Args:
            prompt_list: The new tokens.
            device: The model's own, where the vectors are; for scripts for t2t-tuner.
            use_hook: True, as in t2t-tuner, which has nothing else.

        Raises:
            ValueError: The tokenizer has one of the tokens already, the model has a soft prompt
                already, or the task has no sources, as plain text.
        """
        self._check_device(device)
        if not use_hook:
            raise ValueError("use_hook=False is not implemented, as in t2t-tuner; leave it out")
        if isinstance(prompt_list, str):
            prompt_list = [prompt_list]
        tokens = list(dict.fromkeys(prompt_list))
        if not tokens or "" in tokens:
            raise ValueError('prompt_list must name new tokens, such as ["<prompt0>", "<prompt1>"]')
        vocabulary = self.tokenizer.get_vocab()
        for token in tokens:
            if token in vocabulary:
                raise ValueError(
                    f"the tokenizer has the token {token!r} already; name new ones in prompt_list"
                )

        has_sources = self.task in ("text2text-generation", "text-classification")
        if not has_sources or self._data.blanks is not None:
            what = "plain text" if self.task == "text-generation" else f"data for {self.task}"
            raise ValueError(
                f"prompt tuning puts tokens before sources, and {what} has no sources; use pairs"
            )
        if self.arguments.base_precision is not None:
            raise ValueError(
                "a soft prompt is saved with the whole model, so that base_precision "
                "does not work with it; use lora_rank"
            )
        if self._prompt is not None:
            raise ValueError(f"the model has a soft prompt already: {', '.join(self._data.prompt)}")

        if _is_on_meta(self.model):
            raise ValueError(
                "a soft prompt begins as vectors of the embedding, which env_type='fsdp' reads when "
                "training begins; use env_type='deepspeed+mpu' or 'pytorchDDP'"
            )

        # The new vectors begin as those of tokens that the tokenizer and the model both have.
        first_id = max(len(self.tokenizer), max(vocabulary.values()) + 1)
        known_tokens = min(self.model.config.vocab_size, len(self.tokenizer))
        embedding = input_embedding(self.model)
        rows = initial_rows(embedding, len(tokens), known_tokens, self.arguments.seed)
        self._add_prompt(tokens, first_id, rows)

    def convert_to_lora(self, **settings: Any) -> None:
        """Freezes the model and adds LoRA weights. The head of a classifier is trained besides, as
        in peft.

        Args:
            settings: Those of peft's LoraConfig (r, target_modules, …).

        Raises:
            ValueError: The model has LoRA weights or a soft prompt already, or does not follow a
                setting.
        """
        if has_lora(self.model) or self._prompt is not None:
            raise ValueError(
                "the model has LoRA weights or a soft prompt already; load it again for others"
            )
        settings = {"task_type": self._peft_task(), **settings}
        heads = self._heads_to_save()
        if heads:
            named = settings.get("modules_to_save") or ()
            settings["modules_to_save"] = list(dict.fromkeys([*named, *heads]))
        convert_to_lora(self.model, settings, self.arguments.seed, self.source.folder)

    def _add_adapter(self) -> None:
        """Adds the LoRA weights that the arguments name, or that the model's folder holds."""
        folder = self.arguments.adapter or self.source.adapter
        if folder is not None and not has_lora(self.model):
            take_adapter(self.model, folder)
        if self.arguments.lora_rank:
            self.convert_to_lora(**lora_settings(self.arguments))

    def _peft_task(self) -> str:
        """Returns peft's name of the task."""
        if self._data.kind in ("texts", "tokens", "preferences"):
            return "SEQ_2_SEQ_LM" if self.source.shape == "encoder-decoder" else "CAUSAL_LM"
        names = {
            "token-classification": "TOKEN_CLS",
            "question-answering": "QUESTION_ANS",
            "embedding": "FEATURE_EXTRACTION",
        }
        return names.get(self.task, "SEQ_CLS")

    def _heads_to_save(self) -> list[str]:
        """Returns transformers' names of the modules of a new head, which are trained whole."""
        if self._data.kind in ("texts", "tokens") or not self.source.native:
            return []
        if self.task in ("embedding", "preference"):
            return []
        missing = missing_modules(self.source.folder, self.model.config)
        return list_stored_modules(self.model, {*label_modules(self.model.config), *missing})

    def model_summary(self, no_print: bool = False) -> ModelSummary:
        """Prints, unless `no_print`, and returns the number of parameters and of trainable
        parameters of the whole model.
        """
        summary = summarize(self.model, self.source)
        if self.ranks.pp_size > 1:
            # One rank of each pipeline stage counts the parameters of its stage.
            counts = self.ranks.replica_rank == self.ranks.tp_rank == 0
            parts = self.ranks.gather(summary.parts if counts else {})
            summary = merge_summaries(summary.name, parts)
        if not no_print:
            self.console.print(summary.table())
        return summary

    # Training and evaluation

    def load_data(self, valid: bool = True) -> None:
        """Reads the files that `train` needs and runs its checks, to find errors before training.

        Collective.
        """
        if self.arguments.train_file is None:
            raise ValueError("train_file is missing: name a file to train on")
        if self.arguments.base_precision is not None and not has_lora(self.model):
            raise ValueError(
                f"base_precision={self.arguments.base_precision!r} freezes the model, so that "
                "nothing is trained; set lora_rank, or adapter"
            )
        train = self._data.train(valid)
        check_size(len(train), self.arguments.global_batch(self.ranks.dp_size))
        best = self.arguments.save_best
        if best is not None and not (valid and self._data.validation() is not None):
            raise ValueError(
                f"save_best={best!r} is a validation value, but nothing validates: set a "
                "validation_file or a validation_split above 0, and call train(valid=True)"
            )
        names = ["loss"]
        if self._data.kind in ("texts", "tokens"):
            names.append("perplexity")
        if self._data.kind != "texts" or self._measures_texts():
            names += value_names(self.metrics)
        self.check_arguments(names)
        on_first_rank(lambda: check_run(self.arguments))

    def train(
        self,
        model: Any = None,
        *data: Any,
        valid: bool = True,
        batch_size: int | None = None,
        max_source_length: int | None = None,
        max_target_length: int | None = None,
        tensorboard: bool | None = None,
        dev_mode: bool = False,
        mode: str | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Trains the model in place and returns the last validation values, with `step`.

        Args:
            model: Another model, which is then trained on the data in `data` and `options`, as
                `trainer.Trainer` does.
            valid: Whether to evaluate every `eval_interval` steps and at the end, on
                validation_file or on validation_split percent of the training file, which are then
                not used for training.
            batch_size: Replaces the micro_batch_size of the arguments.
            max_source_length: Replaces that of the arguments; so does max_target_length.
            tensorboard: Whether to write TensorBoard's events; by default as report_to says.
            dev_mode: Runs 10 steps only.
            mode: t2t-tuner's name of the task, seq2seq or clm. The task is chosen when the trainer
                is made, so that another one is refused.
        """
        if model is not None:
            if isinstance(model, bool):
                raise ValueError(
                    f"model must be a torch.nn.Module, not {model!r}; options are keywords: "
                    "train(valid=False)"
                )
            return super().train(model, *data, batch_size=batch_size, dev_mode=dev_mode, **options)
        self._replace_arguments(batch_size, dev_mode)
        self._check_mode(mode)
        self._replace_lengths(max_source_length, max_target_length)
        self._switch_tensorboard(tensorboard)
        self.load_data(valid)
        collate = self._collate()
        folder = on_first_rank(lambda: open_run(self.arguments, self._write_companions).path)
        self.run_folder = RunFolder(folder)
        self._has_run = True
        self._prepare_answers()
        samples = self._data.training_samples(self._data.train(valid))
        self._add_reference(samples)
        self._prepare_evaluation(self._data.validation() if valid else None)
        self._is_trained = True
        try:
            return super().train(
                self.model,
                train_dataset=samples,
                valid_dataset=self._eval_samples,
                metric_methods=self._mean_metrics(),
                collate_fn=collate,
                extra_files=tokenizer_folder(self.run_folder),
            )
        finally:
            if self.ranks.rank == 0:
                return_folder(self.run_folder.path)

    def _check_mode(self, mode: str | None) -> None:
        """Raises ValueError if the task is not t2t-tuner's `mode`."""
        tasks = {"seq2seq": "text2text-generation", "clm": "text-generation"}
        if mode is not None and tasks.get(mode) != self.task:
            raise ValueError(
                f"mode={mode!r} is not this trainer's task, which is {self.task}; pass "
                f"task={tasks.get(mode, self.task)!r} to TrainerArguments"
            )

    def _replace_lengths(self, source: int | None, target: int | None) -> None:
        """Replaces the longest source and target of the arguments, before any data is read."""
        changes = {"max_source_length": source, "max_target_length": target}
        changes = {name: length for name, length in changes.items() if length is not None}
        if not changes:
            return
        prompt = self._data.prompt
        self.arguments = replace(self.arguments, **changes)
        self._data = FinetuningData(self.arguments, self.task, self.source, self._texts)
        self._data.prompt = prompt
        self._data.check_lengths(self.positions)
        self._generator.max_source_length = self.arguments.max_source_length
        if self.arguments.generation_max_length is None:
            self._generator.defaults["max_new_tokens"] = self.arguments.max_target_length

    def _switch_tensorboard(self, on: bool | None) -> None:
        """Adds TensorBoard to the trackers of the run, or removes it."""
        if on is None:
            return
        trackers = [name for name in self.arguments.report_to if name != "tensorboard"]
        if on:
            trackers.insert(0, "tensorboard")
        self.arguments = replace(self.arguments, report_to=tuple(trackers) or ("none",))

    def _check_device(self, device: Any) -> None:
        """Raises ValueError if a device is not where the model is; None is any."""
        if device is not None and torch.device(device).type != self.device.type:
            raise ValueError(
                f"device={str(device)!r} is not the model's, which is on {self.device}; leave it "
                "out, or set pytorch_device in TrainerArguments"
            )

    def evaluate(self, model: Any = None, *data: Any, **options: Any) -> dict[str, float]:
        """Returns the validation values of a file, by default of the validation data.

        Args:
            model: The file; or another model, which is then evaluated on the data in `data` and
                `options`, as `trainer.Trainer` does.
        """
        if isinstance(model, nn.Module):
            return super().evaluate(model, *data, **options)
        if model:
            records = self._data.read(str(model), self.arguments.max_eval_samples)
        else:
            records = self._data.validation()
        if records is None:
            raise ValueError(
                "there is no validation data: set a validation_file, or a validation_split above 0"
            )
        self._prepare_answers()
        self._prepare_evaluation(records)
        return super().evaluate(
            self.model, self._eval_samples, self._mean_metrics(), self._collate()
        )

    def test(self) -> dict[str, float]:
        """Evaluates on the test_file; see `evaluate`."""
        if self.arguments.test_file is None:
            raise ValueError("test_file is missing: name a file to test on")
        return self.evaluate(self.arguments.test_file)

    # Texts

    def generate_single(self, text: str, *, device: Any = None, **settings: Any) -> str:
        """Returns the answer to a text, or its continuation. Prefix and soft prompt are put before
        it, as in training.

        `settings` are the arguments of `generate`; by default beam search with
        generation_num_beams. `device` may name the model's own.
        """
        self._check_device(device)
        return self._generate(text, settings)[0]

    def generate_diverse(
        self,
        text: str,
        output_count: int = 8,
        beam_width: int = 4,
        num_beam_groups: int = 2,
        diversity_penalty: float = 0.5,
        *,
        device: Any = None,
        **settings: Any,
    ) -> list[str]:
        """Returns `output_count` answers by diverse beam search with beam_width · output_count
        beams.
        """
        self._check_device(device)
        search = {
            "num_return_sequences": output_count,
            "num_beams": beam_width * output_count,
            "num_beam_groups": num_beam_groups,
            "diversity_penalty": diversity_penalty,
        }
        return self._generate(text, {**search, **settings})

    def save_model(self, folder: str | Path | None = None, *, merge_adapter: bool = False) -> Path:
        """Writes a Hugging Face folder with the tokenizer, by default `hf` in the run's folder, and
        returns its path; of the URL of one in an object store, that of its local copy.

        With LoRA only the added weights are written, as peft does; a soft prompt is written beside
        the unchanged weights. This class loads both as model_name_or_path.

        Args:
            merge_adapter: Merge LoRA weights into the model, in place, and write the whole model.
        """
        self._split_if_on_meta()
        merges = merge_adapter and self.source.native and has_lora(self.model)
        if merges or self._prompt is not None or not self.source.native:
            gather_parameters(self.model)
        if merges:
            merge_lora(self.model)
        if folder is not None:
            path = find_work(folder)
            on_first_rank(lambda: pull(path))
            self._write_model(path)
            on_first_rank(lambda: push(path))
        elif self._has_run:
            path = self.run_folder.hf
            with sending_run(self.run_folder.path):
                self._write_model(path)
        else:
            raise ValueError("there is no run yet: name the folder to save the model in")
        if self._has_crf():
            self.console.print(f"{name_urls(str(path))}: {CRF_NOTE}")
        return path

    def _write_model(self, path: Path) -> None:
        scratch = path.with_name(f".{path.name}.tokenizer")
        on_first_rank(lambda: self._write_companions(scratch))
        with without_prompt(self.model):
            save_whole(self.model, self.source, scratch, path)

        def finish() -> None:
            shutil.rmtree(scratch)
            if self._prompt is not None:
                tokens = self._data.prompt
                first_id = self.tokenizer.convert_tokens_to_ids(tokens[0])
                save_prompt(self._prompt, tokens, first_id, path)

        on_first_rank(finish)

    def _add_prompt(self, tokens: list[str], first_id: int, rows: Any) -> None:
        """Adds a soft prompt: its tokens, numbered from `first_id`, and their vectors, [T, H]."""
        if self.ranks.pp_size > 1:
            raise ValueError(
                "soft prompts need the embedding on every process: use pipeline_parallel_size=1"
            )
        self.tokenizer.add_tokens(tokens, special_tokens=True)
        ids = self.tokenizer.convert_tokens_to_ids(tokens)
        if ids != list(range(first_id, first_id + len(tokens))):
            raise ValueError(
                f"the soft prompt's tokens have the ids {ids}, but must be numbered from {first_id}"
            )
        embedding: Any = input_embedding(self.model)
        rows = rows.to(embedding.weight.device, embedding.weight.dtype)
        self._prompt = add_prompt(self.model, embedding, first_id, rows)
        # A head that is longer than the tokenizer, as T5's is, has logits for the prompt's ids and
        # for ids after them, none of which is a word.
        self._generator.never_generated = list(range(first_id, self.model.config.vocab_size))
        self._data.prompt = tokens

    def _complete_padding(self) -> None:
        """Sets a missing pad_token_id, with which a decoder that classifies finds the end of a row."""
        config = self.model.config
        if getattr(config, "pad_token_id", None) is not None:
            return
        pad = self.tokenizer.pad_token_id
        if pad is None:
            pad = self.tokenizer.eos_token_id
        classifies = self._data.labels is not None or self.task in SCORED
        if not self.source.native or classifies:
            config.pad_token_id = pad

    def _make_loss(self) -> WeightedLoss | None:
        """Returns the loss with the smoothing and weights that the arguments ask for, or None.

        Raises ValueError if they ask for something that the task does not have.
        """
        arguments = self.arguments
        kind = self._data.kind
        weighs = arguments.weight_id is not None and self.task == "text-classification"
        for name, kinds in (("label_smoothing", SMOOTHED), ("class_weights", WEIGHTED)):
            if getattr(arguments, name) and kind not in kinds:
                raise ValueError(
                    f"{name} is for {', '.join(kinds)}, not for the {kind} of {self.task}"
                )
        if arguments.weight_id is not None and not weighs:
            raise ValueError(f"weight_id is for text-classification, not for {self.task}")
        for name in ("label_smoothing", "class_weights"):
            if self._has_crf() and getattr(arguments, name):
                raise ValueError(
                    f"{name} is for labels that are predicted one by one, and this model's "
                    f"conditional random field predicts them together: leave {name} out"
                )
        distillation = self._load_teacher()
        is_plain = not (arguments.label_smoothing or arguments.class_weights or weighs)
        if is_plain and distillation is None:
            return None

        weights = None
        if arguments.class_weights is not None:
            if self._data.labels is None:
                raise ValueError(f"class_weights needs labels, which {self.task} does not have")
            weights = tuple(parse_class_weights(arguments.class_weights, self._data.label_counts()))
        return WeightedLoss(
            self.model,
            kind,
            self.source.native,
            self.source.shape == "encoder-decoder",
            self.mesh,
            arguments.label_smoothing,
            weights,
            distillation,
        )

    def _has_crf(self) -> bool:
        """Returns whether labels are those of a conditional random field."""
        return self.task == "token-classification" and getattr(self.model.config, "crf", False)

    def _load_teacher(self) -> Distillation | None:
        """Returns what is learned of the teacher; None if the arguments name none. Collective.

        Raises ValueError if the task has no tokens to learn, or the models do not fit together.
        """
        arguments = self.arguments
        folder = arguments.teacher_model
        if folder is None:
            return None
        if self._data.kind not in ("texts", "tokens"):
            raise ValueError(
                f"teacher_model is for tasks that learn tokens, not for {self.task}, whose data may "
                "have a teacher's scores (embedding_loss margin_mse and distill_kl)"
            )
        size = arguments.teacher_parallel_size
        chosen = replace(
            arguments,
            model_name_or_path=folder,
            task=self.task,
            base_precision=None,
            sequence_parallel=arguments.sequence_parallel and size is None,
        )
        source = find_source(chosen)
        if source.native != self.source.native or source.shape != self.source.shape:
            raise ValueError(
                f"the teacher {folder} is a {source.shape} and the model a {self.source.shape}, "
                "both must be of one kind, and both of the zoo or both of transformers"
            )
        if not source.native and size not in (None, 1):
            raise ValueError(
                f"teacher_parallel_size={size} splits the teacher, which transformers' "
                f"{source.model_type} does not support; leave it out"
            )
        mesh = make_teacher_mesh(self.mesh, size) if source.native else self.mesh
        teacher: Any = load_model(source, self.task, chosen, mesh, self.device, None)
        if source.adapter is not None:
            take_adapter(teacher, source.adapter)
        if teacher.config.vocab_size != self.model.config.vocab_size:
            raise ValueError(
                f"the teacher {folder} has {teacher.config.vocab_size} tokens and the model "
                f"{self.model.config.vocab_size}; both must have the same vocabulary"
            )
        own_mesh = self.mesh if source.native else None
        return Distillation(
            self.model,
            Teacher(teacher.to(self.device), mesh if source.native else None, own_mesh),
            arguments.teacher_weight,
            arguments.teacher_temperature,
            own_mesh,
            source.native,
        )

    def _score_head(self) -> dict[str, Any] | None:
        """Returns the settings of a new head with one output; None if the model has one."""
        stored = stored_labels(self.source, "text-classification")
        if stored is not None and len(stored) == 1:
            return None
        return {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

    def _prepare_answers(self) -> None:
        """Turns dropout off and loads the reference model, for tasks that compare answers.

        As in TRL, the probabilities of two answers differ by their texts alone, unless
        dropout_rate is given.
        """
        if self.task not in WITH_ANSWERS:
            return
        if self.arguments.dropout_rate is None:
            for module in self.model.modules():
                if isinstance(module, Dropout):
                    module.p = 0.0
        objective = self.objective
        if not isinstance(objective, PreferenceObjective) or objective.loss not in WITH_REFERENCE:
            return
        folder = self.arguments.reference_model
        if folder is None and has_lora(self.model) and self.model.lora.saved:
            raise ValueError(
                "modules_to_save are trained whole, so that the model without LoRA weights is not "
                "the reference: name a reference_model"
            )
        is_needed = folder is not None or not has_lora(self.model)
        if self.arguments.precompute_reference and folder is None:
            is_needed = False
        if not is_needed or objective.reference_model is not None:
            return
        source = self.source
        if folder is not None:
            chosen = replace(self.arguments, model_name_or_path=folder, task=self.task)
            source = find_source(chosen)
        reference = load_model(source, self.task, self.arguments, self.mesh, self.device, None)
        if source.adapter is not None:
            take_adapter(reference, source.adapter)
        if reference.config.vocab_size != self.model.config.vocab_size:  # type: ignore[union-attr]
            raise ValueError(
                f"the reference model {source.folder} has another vocabulary than the model"
            )
        objective.reference_model = reference.to(self.device).eval().requires_grad_(False)

    def _add_reference(self, samples: Any) -> None:
        """Computes the reference's log-probabilities of all samples, if the arguments ask for it.

        With pipeline stages they are computed in any case: a schedule passes on the hidden states
        of one model only. Collective.
        """
        objective = self.objective
        has_reference = (
            isinstance(objective, PreferenceObjective) and objective.loss in WITH_REFERENCE
        )
        is_needed = self.arguments.precompute_reference
        is_needed = is_needed or (has_reference and self.ranks.pp_size > 1)
        if not is_needed or samples is None:
            return
        if not isinstance(objective, PreferenceObjective) or not has_reference:
            raise ValueError(
                f"precompute_reference is for {', '.join(WITH_REFERENCE)}, which have a reference"
            )
        if self._is_trained and objective.reference_model is None and not has_lora(self.model):
            raise ValueError(
                "the model has been trained and is no longer the reference: name a reference_model"
            )
        answers = getattr(samples, "samples", samples)
        if answers.records[0].reference and not self.arguments.precompute_reference:
            return  # The file has them.
        answers.reference = objective.measure_samples(
            answers, self._collate(), self.device, self.arguments.micro_batch_size
        )

    def _make_objective(
        self,
    ) -> EmbeddingObjective | RankingObjective | PreferenceObjective | RewardObjective | None:
        """Returns what computes the loss of a task that has a loss of its own; None for the others.

        Raises ValueError if the arguments, the model and the columns do not fit together.
        """
        arguments = self.arguments
        if self.task == "reranking":
            return self._make_ranking_objective()
        if self.task == "reward":
            return RewardObjective(arguments.center_rewards, self.mesh)
        if self.task == "preference":
            return PreferenceObjective(
                arguments.preference_loss,
                self.model,
                self.source.shape == "encoder-decoder",
                arguments.beta,
                arguments.simpo_gamma,
                arguments.desirable_weight,
                arguments.undesirable_weight,
                mesh=self.mesh,
            )
        columns = self._data.columns
        settings = self._data.embedding
        if columns is None or settings is None:
            return None
        largest = max(arguments.matryoshka_dims, default=0)
        if largest > self.model.hidden_size:
            raise ValueError(
                f"matryoshka_dims has {largest}, but the embeddings have {self.model.hidden_size}"
            )
        loss = arguments.embedding_loss
        if loss is None:
            loss = "multiple_negatives_ranking" if columns.score is None else "cosent"
        least, most, has_scores = COLUMNS[loss]
        count = len(columns.texts)
        fits = count >= least and (most is None or count <= most)
        if not fits or (has_scores and columns.score is None):
            wanted = f"{least}" if most == least else f"at least {least}"
            scores = " and a score" if has_scores else ""
            raise ValueError(
                f"the loss {loss} needs {wanted} columns of texts{scores}; the records have "
                f"{', '.join(columns.texts)}{'' if columns.score is None else ' and ' + columns.score}"
            )
        # A pooler is kept as it is, since embeddings do not depend on it.
        if self.model.pooler_name is not None and hasattr(self.model, self.model.pooler_name):
            self.model.get_submodule(self.model.pooler_name).requires_grad_(False)
        return EmbeddingObjective(
            loss,
            settings.pooling,
            settings.normalize,
            arguments.similarity_scale,
            arguments.margin,
            arguments.distance,
            arguments.matryoshka_dims,
            arguments.embedding_mini_batch,
            self.mesh,
        )

    def _make_ranking_objective(self) -> RankingObjective:
        """Returns the loss of rankings. ValueError if it does not fit the records."""
        loss = self.arguments.ranking_loss
        path = self.arguments.train_file
        if path is not None:
            most = count_documents(self._data.train(valid=False))
            if loss is None:
                loss = "bce" if most == 1 else "ranknet"
            if loss == "bce" and most > 1:
                raise ValueError(
                    f"the loss bce is for one document in a record, and {path} has lists of up to "
                    f"{most}; use ranknet, listnet or listmle"
                )
            if loss != "bce" and most == 1:
                raise ValueError(
                    f"the loss {loss} compares the documents of a record, and {path} has one in "
                    "each; use bce, or lists of documents and labels"
                )
        return RankingObjective(loss or "listnet", self.mesh)

    def _as_in_training(self, text: str) -> str:
        """Returns a text as training presents it: with prefix and soft prompt, or as a chat."""
        prefix = self.arguments.prefix
        if self.task == "chat":
            return self._data.chat([{"role": "user", "content": prefix + text}])
        if not self._data.generates:
            return text
        # The texts of t2t-tuner's users begin with the prefix already.
        if not text.startswith(prefix):
            text = prefix + text
        source, _ = self._data.pair((text, ""))
        return source

    def _collate(self) -> Callable[[Sequence[Any]], Any]:
        """Returns what makes a batch of samples."""
        if self.task == "embedding":
            pad = self.tokenizer.pad_token_id
            return ColumnCollate(0 if pad is None else pad, self.arguments.length_multiple)
        if self.task in WITH_ANSWERS or self.task in SCORED:
            pad = getattr(self.model.config, "pad_token_id", None)
            pad = 0 if pad is None else pad
            if self.task == "reranking":
                most = 1
                if self.arguments.train_file is not None:
                    most = count_documents(self._data.train(valid=False))
                return RankingCollate(pad, self.arguments.length_multiple, most)
            return PreferenceCollate(pad, self.arguments.length_multiple)
        has_pairs = self.task == "text2text-generation"
        learns_padding = not self.arguments.ignore_pad_token_for_loss
        if learns_padding and not (has_pairs and self.source.shape == "encoder-decoder"):
            raise ValueError(
                "ignore_pad_token_for_loss=False is for the targets of encoder-decoders"
            )
        pad = getattr(self.model.config, "pad_token_id", None)
        return Collate(
            0 if pad is None else pad,
            self.arguments.length_multiple,
            learn_padding=learns_padding,
            prefixes=has_pairs and self.source.shape == "encoder",
        )

    def _mean_metrics(self) -> dict[str, Any]:
        """Returns the metrics that are means over targets; the others need all predictions."""
        if self._data.kind == "tokens" and self.metrics:
            return {"accuracy": next_token_accuracy}
        return {}

    def _prepare_evaluation(self, records: Any) -> None:
        """Makes the samples of the records that the next evaluations measure, if any."""
        self._eval_records = records
        self._predictions = {}
        self._eval_samples = None if records is None else self._data.samples(records)
        self._add_reference(self._eval_samples)

    def collect_output(self, rows: range, batch: Mapping[str, Any], output: Any) -> None:
        """Keeps what the metrics need of the model's output for the samples `rows`."""
        if self._data.kind in ("texts", "tokens") or not self.ranks.reports:
            return
        if self._has_crf() and find_output_field(output, "predictions") is None:
            raise ValueError(
                "forward_step must return the predictions of the conditional random field, as the "
                'model\'s output has them: {"loss": …, "logits": …, "predictions": …}'
            )
        predictions = collect_predictions(self._data.kind, output, batch)
        self._predictions.update(zip(rows, predictions, strict=True))

    def _measures_texts(self) -> bool:
        """Returns whether evaluations generate texts and compare them with the targets."""
        return self.arguments.predict_with_generate and self._data.generates

    def validate(
        self,
        model: Any,
        module: nn.Module,
        dataset: Any,
        metrics: Mapping[str, Metric],
        collate: Callable[[Any], Any],
    ) -> dict[str, float]:
        """Returns the values of an evaluation with the perplexity, and the metrics of predictions
        or texts.
        """
        if self.objective is not None:
            return self._evaluate_objective(model, module, dataset, collate)
        values = super().validate(model, module, dataset, metrics, collate)
        kind = self._data.kind
        if kind in ("texts", "tokens"):
            # The perplexity stands beside the loss.
            loss = values.pop("loss")
            values = {"loss": loss, "perplexity": perplexity(loss), **values}
        records = self._eval_records
        if records is None or kind == "tokens" or (kind == "texts" and not self._measures_texts()):
            return values

        if kind == "texts":
            pairs = [self._data.pair(records[number]) for number in range(len(records))]
            sources = [source for source, _ in pairs]
            targets = [target for _, target in pairs]
            texts = generated_texts(self._generator, module, sources, self.ranks)
            return {**values, **text_values(self.metrics, texts, targets)}

        # Each data-parallel rank has the predictions for its own samples.
        own = self._predictions
        self._predictions = {}
        predictions: dict[int, Any] = {}
        for part in self.ranks.gather(own):
            predictions.update(part)
        in_order = [predictions[number] for number in range(len(self._eval_samples))]
        if kind == "answers":
            answers = best_answers(self._eval_samples, in_order)
            questions = [records[number] for number in range(len(records))]
            return {**values, **answer_values(answers, questions)}
        labels = self._data.labels.names if self._data.labels else []
        return {**values, **predicted_values(kind, self.metrics, in_order, labels)}

    def extra_training_values(self) -> dict[str, float]:
        """Returns the rewards, accuracies and margins of answers, of tasks that compare them."""
        if isinstance(self.objective, (PreferenceObjective, RewardObjective)):
            return self.objective.pop_values(self.ranks)
        return super().extra_training_values()

    def _evaluate_objective(
        self, model: Any, module: nn.Module, dataset: Any, collate: Callable[[Any], Any]
    ) -> dict[str, float]:
        """Returns the values of an evaluation of a task that has a loss of its own."""
        assert self.objective is not None
        was_training = module.training
        module.eval()
        values = self.objective.evaluate(
            model,
            self.device,
            dataset,
            self._eval_records,
            collate,
            self.arguments.eval_batch_size or self.arguments.micro_batch_size,
        )
        module.train(was_training)
        return values

    def _generate(self, text: str, settings: dict[str, Any]) -> list[str]:
        """Returns the texts that the model generates for one text."""
        if self._data.kind not in ("texts", "tokens"):
            raise ValueError(f"a model of {self.task} generates no text")
        self._split_if_on_meta()
        return self._generator(self.model, [self._as_in_training(text)], **settings)

    def _split_if_on_meta(self) -> None:
        """Splits a model that is used before it is trained, and reads its weights."""
        if _is_on_meta(self.model):
            prepare_model(self.model, self.device, self.arguments, self.ranks)
            shard_model(self.model, self.arguments, self.ranks, None)

    def _write_companions(self, folder: Path) -> None:
        """Writes what lies beside the weights; see `write_companions`."""
        write_companions(self.tokenizer, self.source, folder)
        if self._data.embedding is not None:
            self._data.embedding.save(
                folder,
                hidden_size=self.model.hidden_size,
                max_length=self.arguments.max_source_length,
                architecture=self.model.config.architecture,
            )


def _is_on_meta(model: nn.Module) -> bool:
    """Returns whether a model has no weights yet, because they are read when it is split."""
    return any(parameter.is_meta for parameter in model.parameters())


def describe_run(arguments: FinetuningArguments, dp_size: int) -> list[str]:
    """Returns lines that say how a run is split, its precision, what runs its steps, and its folder."""
    mesh = describe_mesh(
        arguments.pipeline_parallel_size,
        dp_size,
        arguments.model_parallel_size,
        arguments.context_parallel_size,
        arguments.expert_parallel_size,
    )
    folder = arguments.output_dir or "a new one, runs/MODEL-DATE"
    return [
        f"mesh         {mesh}",
        f"precision    {arguments.precision}",
        f"engine       {describe_engine(arguments)}",
        f"output_dir   {folder}",
    ]
