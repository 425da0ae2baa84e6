"""Defines the arguments of fine-tuning: the trainer's, and t2t-tuner's for model, files, lengths
and evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..files.object_store import check_local
from ..files.working_copies import find_source
from ..trainer.arguments.aliases import with_argument_aliases
from ..trainer.arguments.deepspeed_file import read_deepspeed_file
from ..trainer.arguments.training_arguments import TrainingArguments
from ..trainer.arguments.value_types import texts
from ..trainer.distillation import check_teacher_arguments
from ..trainer.environments import ENVIRONMENTS, EnvType
from ..trainer.launch.rank_info import RankInfo
from ..trainer.schedules import ScheduleName

Task = Literal[
    "text2text-generation", "text-generation", "chat", "text-classification", "token-classification",
    "question-answering", "multiple-choice", "embedding", "reranking", "preference", "reward",
]  # fmt: skip
# What is measured -> the metrics that can measure it, of which the first is the default.
METRICS = {
    "texts": ("sacrebleu", "rouge", "chrf", "ter", "exact_match", "accuracy"),
    "tokens": ("accuracy",),
    "classes": ("accuracy", "f1", "precision", "recall", "matthews_correlation"),
    "several classes": ("accuracy", "f1", "precision", "recall"),
    "numbers": ("pearsonr", "spearmanr", "mse", "mae"),
    "words": ("accuracy", "seqeval"),
    "answers": ("squad",),
    "retrieval": ("retrieval",),
    "similarities": ("similarity",),
    "rankings": ("retrieval",),
    "preferences": ("preferences",),
    "rewards": ("rewards",),
}
# The smallest values of arguments that count something.
SMALLEST = {
    "max_source_length": 2,
    "max_target_length": 2,
    "block_size": 2,
    "generation_num_beams": 1,
    "generation_max_length": 1,
    "max_train_samples": 1,
    "max_eval_samples": 1,
    "embedding_mini_batch": 1,
}
BasePrecision = Literal["nf4", "int8", "fp8"]
WITH_LABELS = ("text-classification", "token-classification")
Pooling = Literal["mean", "cls", "last", "weighted_mean"]
EmbeddingLoss = Literal[
    "multiple_negatives_ranking", "cosent", "angle", "cosine", "contrastive", "online_contrastive",
    "triplet", "margin_mse", "distill_kl",
]  # fmt: skip
RankingLoss = Literal["bce", "ranknet", "listnet", "listmle"]
PreferenceLoss = Literal["dpo", "ipo", "kto", "orpo", "simpo"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@with_argument_aliases
@dataclass(frozen=True)
class FinetuningArguments(TrainingArguments):
    """Arguments of fine-tuning. Also accepts FlagAI's and transformers' names of the training
    arguments.

    All values are checked on construction; a `ValueError` names the values that would work.
    """

    env_type: EnvType | None = None  # type: ignore[assignment]
    """By default pytorch for one process and deepspeed+mpu for several."""
    epochs: int = 3
    micro_batch_size: int = 8
    lr: float = 5e-5
    lr_schedule: ScheduleName = "linear"
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    log_interval: int = 10

    model_name_or_path: str = ""
    """A Hugging Face folder or a shardzoo folder with its tokenizer, or a name on the Hugging Face
    Hub.
    """
    task: Task | None = None
    """By default it follows from the model and the training file: text2text-generation for pairs,
    text-classification for pairs with an encoder, text-generation for plain text, and the others
    for the keys of their records."""
    problem_type: ProblemType | None = None
    """Of text-classification; by default it follows from the labels: names and whole numbers,
    lists, other numbers.
    """
    crf: bool = False
    """Let a conditional random field choose the labels of token-classification together. A stored
    one is kept in any case."""
    base_precision: BasePrecision | None = None
    """Pack the frozen linear layers under LoRA weights: in 4 bits (nf4) or 8 (int8, fp8)."""
    native: bool | None = None
    """Train the zoo's model, whose layers can be split, or transformers'; by default the zoo's if
    it has one.
    """

    train_file: str | None = None
    """Pairs of texts, or what the task learns: JSON lines {"translation": {"s": source,
    "t": target}} or with the two keys at the top, NAME.source beside NAME.target, parquet, or a
    datasets folder; for text-generation text files, folders, or JSON lines with `text`."""
    validation_file: str | None = None
    """A file like train_file, for evaluations during training."""
    test_file: str | None = None
    """A file like train_file, for a test at the end."""
    validation_split: float = 5
    """Percent of the training data to use for validation if there is no validation_file; a number
    below 1 is a share, as in t2t-tuner."""
    source_id: str = "s"
    """Key of the source texts."""
    target_id: str = "t"
    """Key of the target texts, or of the labels."""
    pair_id: str | None = None
    """Key of a second text, for text-classification; for multiple-choice, of a text that begins
    each choice.
    """
    choices_id: str = "choices"
    """Key of the choices of multiple-choice."""
    messages_id: str = "messages"
    """Key of the messages of a conversation."""
    weight_id: str | None = None
    """Key of the weight of a record in the loss of text-classification."""
    prefix: str = ""
    """Text to put before every source."""
    separator: str = "\n"
    """Text between source and target when a decoder learns pairs."""
    max_source_length: int = 128
    """Maximum tokens of a source, including the end token; longer sources are cut."""
    max_target_length: int = 128
    """Maximum tokens of a target, including the end token; longer targets are cut."""
    doc_stride: int = 64
    """Tokens that the windows of a long text share, for question-answering."""
    block_size: int | None = None
    """Tokens of a sample of plain text; by default the model's maximum, up to 1024."""
    max_train_samples: int | None = None
    """Train on only the first samples of the file; by default on all."""
    max_eval_samples: int | None = None
    ignore_pad_token_for_loss: bool = True
    """If False, an encoder-decoder also learns to predict the padding after a target."""

    predict_with_generate: bool = False
    """Generate texts in evaluations, and compare them with the targets by `metric`."""
    generation_num_beams: int = 4
    generation_max_length: int | None = None
    """Maximum new tokens of generated texts; by default max_target_length."""
    metric: str = "sacrebleu"
    """Names of metrics, separated by commas; see docs/finetune.md for those of each task. The
    default is for generated texts; the other tasks have their own, to which the named ones are
    added."""

    label_smoothing: float = 0.0
    """Share of a target's probability that all classes, or all tokens, get equally."""
    class_weights: str | None = None
    """Factors of the loss of each class: numbers separated by commas, or "balanced" for n /
    (classes · count).
    """
    packing: bool = False
    """Put several conversations, or pairs of a decoder, into one row; each attends to itself only.
    """
    document_mask: bool = True
    """Rows of `packing` keep their samples apart. Always on; named as in pretraining."""
    group_by_length: bool = False
    """Let the samples of a batch have similar lengths."""
    dropout_rate: float | None = None
    """Replaces the dropout rates in the model's configuration, but not those of its classifier."""
    columns: tuple[str, ...] = ()
    """Keys of the texts to embed, such as anchor, positive and negatives; by default all texts of
    the first record, in its order. Scores have the key score, scores, label or labels."""
    pooling: Pooling | None = None
    """How the states of tokens become an embedding; by default as the model's folder says, else the
    mean, and the last token for decoders."""
    normalize: bool | None = None
    """Give embeddings the length 1; by default as the model's folder says."""
    query_prompt: str | None = None
    """Text before the first column, as sentence-transformers' prompt "query"."""
    document_prompt: str | None = None
    """Text before the other columns, as sentence-transformers' prompt "document"."""
    embedding_loss: EmbeddingLoss | None = None
    """By default cosent for texts with a score, else multiple_negatives_ranking."""
    similarity_scale: float = 20.0
    """Factor of the cosine similarities in the loss, the inverse of a temperature."""
    margin: float | None = None
    """Of triplet (by default 5), contrastive and online_contrastive (by default 0.5)."""
    distance: Literal["cosine", "euclidean", "manhattan"] | None = None
    """Of triplet (by default euclidean), contrastive and online_contrastive (by default cosine)."""
    matryoshka_dims: tuple[int, ...] = ()
    """Sizes of truncated embeddings that the loss is computed of, such as 384 192 96."""
    embedding_mini_batch: int | None = None
    """Texts in one forward pass, for large batches in little memory: activations are computed again
    in the backward pass."""

    ranking_loss: RankingLoss | None = None
    """Of the task reranking; by default bce for one document in a record, else ranknet."""

    preference_loss: PreferenceLoss = "dpo"
    """Of the task preference."""
    beta: float = 0.1
    """The strength of the loss of preferences, as in TRL."""
    simpo_gamma: float = 0.5
    """The margin by which SimPO wants the better answer to be ahead."""
    desirable_weight: float = 1.0
    """Factor of KTO's loss of desirable answers; undesirable_weight is that of the others."""
    undesirable_weight: float = 1.0
    reference_model: str | None = None
    """Folder of the reference model of dpo, ipo and kto; by default the model as it is before
    training: without its LoRA weights, or a second copy."""
    precompute_reference: bool = False
    """Compute the reference's log-probabilities of the whole file before training, so that no
    second model is in memory."""
    center_rewards: float = 0.0
    """Factor of the squared sum of two answers' rewards, for the task reward."""

    teacher_model: str | None = None
    """Folder of a model whose distributions of target tokens are learned beside the targets
    (distillation); it has the same vocabulary."""
    teacher_weight: float = 0.5
    """Share of the divergence from the teacher in the loss."""
    teacher_temperature: float = 1.0
    """Divisor of the logits of both models in the divergence."""
    teacher_parallel_size: int | None = None
    """Tensor-parallel ranks that the teacher is split over, by default as many as the model; 1 for
    a whole teacher on each rank."""

    cache_dir: str | None = None
    """Folder for models downloaded from the Hugging Face Hub."""
    gradient_checkpointing: bool = False
    """Equivalent to recompute="full"."""
    output_dir: str | None = None
    """Folder of the run; by default a new one under runs/."""

    def __post_init__(self) -> None:
        # The checks of the base class need the environment that the run will have.
        chosen = self.env_type
        object.__setattr__(self, "env_type", self._find_environment())
        super().__post_init__()
        object.__setattr__(self, "env_type", chosen)
        object.__setattr__(self, "columns", texts("columns", self.columns))
        object.__setattr__(self, "matryoshka_dims", tuple(self.matryoshka_dims))
        self._check_own_ranges()
        self._check_folders()
        self._check_splitting()
        self._check_packing()
        self._check_metric()

    def _check_own_ranges(self) -> None:
        for name, least in SMALLEST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if 0 < self.validation_split < 1:
            object.__setattr__(self, "validation_split", 100 * self.validation_split)
        if not 0 <= self.validation_split < 100:
            raise ValueError(
                "validation_split must be a percentage from 0 to 99 or a share below 1, not "
                f"{self.validation_split}"
            )
        check_teacher_arguments(self)
        for name in ("similarity_scale", "beta"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if min(self.matryoshka_dims, default=1) < 1:
            raise ValueError(f"matryoshka_dims must be at least 1, not {self.matryoshka_dims}")
        for name in ("label_smoothing", "dropout_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value}")

    def _check_folders(self) -> None:
        if self.resume and self.output_dir is None:
            raise ValueError("resume needs output_dir, the folder of the run to resume")
        if self.cache_dir is not None:
            check_local(self.cache_dir, "cache_dir")
        for name in ("save_dir", "experiment_name"):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported in fine-tuning; set "
                    "--output-dir instead"
                )

    def _check_splitting(self) -> None:
        for name in (
            "model_parallel_size",
            "pipeline_parallel_size",
            "context_parallel_size",
            "expert_parallel_size",
        ):
            size = getattr(self, name)
            if self.native is False and size > 1:
                raise ValueError(
                    f"{name}={size} splits the model, which only the zoo's models support; use "
                    f"native=True, or {name}=1"
                )
        names = ("label_smoothing", "class_weights", "weight_id", "packing", "embedding_mini_batch")
        for name in names:
            if getattr(self, name) and self.pipeline_parallel_size > 1:
                raise ValueError(
                    f"{name} does not work with pipeline stages; use pipeline_parallel_size=1"
                )
        environment = self._find_environment()
        repeats_backward = environment in ("pytorch", "deepspeed", "deepspeed+mpu")
        if self.embedding_mini_batch is not None and (not repeats_backward or self.zero_stage == 3):
            raise ValueError(
                "embedding_mini_batch runs the model again in the backward pass, which "
                f"env_type={environment!r} does not support; use env_type='pytorch' or "
                "'deepspeed+mpu' with zero_stage below 3"
            )
        if self.predict_with_generate and self.zero_stage == 3:
            raise ValueError(
                "predict_with_generate needs whole parameters, which ZeRO stage 3 splits; use "
                "stage 2"
            )

    def _check_packing(self) -> None:
        """Raises ValueError for what does not work with packed rows or a packed base."""
        if not self.document_mask:
            raise ValueError(
                "document_mask=False: samples that `packing` puts into one row never see one another; "
                "leave document_mask out"
            )
        if self.base_precision is None:
            return
        environment = ENVIRONMENTS[self.env_type or "pytorch"]
        wrong = {
            "native=False": self.native is False,
            f"env_type={self.env_type!r}": environment.uses_fsdp,
            "zero_stage=3": self.zero_stage == 3,
            f"pipeline_parallel_size={self.pipeline_parallel_size}": self.pipeline_parallel_size
            > 1,
            "torch_compile": self.torch_compile,
        }
        for name in (name for name, given in wrong.items() if given):
            raise ValueError(
                f"base_precision={self.base_precision!r} does not work with {name}; use a model of "
                "the zoo with env_type='pytorch', 'pytorchDDP' or 'deepspeed+mpu', ZeRO below 3, "
                "and neither pipeline stages nor torch_compile"
            )

    def _check_metric(self) -> None:
        known = list(dict.fromkeys(name for names in METRICS.values() for name in names))
        for name in self.metric.split(","):
            if name.strip() not in known:
                raise ValueError(
                    f"metric must be one of {', '.join(known)}, or several with commas, not "
                    f"{name!r}"
                )

    def _find_environment(self) -> EnvType:
        """Returns `env_type`, or the one that the number of processes and ZeRO ask for."""
        if self.env_type is not None:
            return self.env_type
        stage = self.zero_stage
        if stage is None:
            zero = read_deepspeed_file(self.deepspeed_config).get("zero_optimization", {})
            stage = zero.get("stage")
        splits = max(self.model_parallel_size, self.pipeline_parallel_size) > 1
        if stage == 3 and not splits:
            return "deepspeed"
        processes = max(
            self.num_gpus,
            self.model_parallel_size,
            self.pipeline_parallel_size,
            self.context_parallel_size,
            self.expert_parallel_size,
            self.num_nodes,
            RankInfo.from_environment().world_size,
        )
        needs_deepspeed = (
            processes > 1
            or self.zero_stage is not None
            or self.offload_optimizer
            or self.deepspeed_config is not None
        )
        return "deepspeed+mpu" if needs_deepspeed else "pytorch"

    def resolved(self) -> FinetuningArguments:
        """Returns the arguments with defaults resolved for this machine and the number of
        processes.

        Raises ValueError if a named file does not exist. NAME stands for NAME.source with
        NAME.target.
        """
        for name in ("train_file", "validation_file", "test_file"):
            path = getattr(self, name)
            if path is None or find_source(path) is not None:
                continue
            if not Path(path).exists() and not Path(f"{path}.source").exists():
                raise ValueError(f"{name} {path} does not exist")
        return replace(
            self,
            env_type=self._find_environment(),
            recompute="full" if self.gradient_checkpointing else self.recompute,
        )
