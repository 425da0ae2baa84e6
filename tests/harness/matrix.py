"""Compares every architecture of the zoo with transformers, from tiny checkpoints that transformers itself writes.

A row of the matrix is a `Case`; the rows of a family are in `tests/zoo/rows/<model_type>.py`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from packaging.version import Version
from parity import merge_gradients, randomize
from stored_models import tensor_hashes
from torch import Tensor

ROWS = Path(__file__).parents[1] / "zoo" / "rows"
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence parallel": {"sequence_parallel": True},
    "recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
    "sequence parallel and recompute": {"sequence_parallel": True, "recompute": "full"},
}
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "dropout": torch.float32}
LARGEST_ERROR = 1e-5  # of fp32 outputs and gradients; `Comparison` says relative to what
SLACK_OF_A_GPU = (
    4.0  # times the tolerances of fp32: __expf costs a few more bits, as in tests/ops/test_gpu.py
)
LARGEST_RATIO = 1.5  # of the error of bf16 to that of transformers' bf16
RESOLUTION = 2**-7  # of bf16, relative
SMALL = 1e-2  # gradients smaller than this part of the largest one are sums whose terms cancel
ROWS_OF_BATCH, LENGTH, CHOICES, NEW_TOKENS = 6, 12, 2, 6
BF16_MODES = ("plain", "sequence parallel", "recompute")
BATCHES = (
    15  # in bf16, whose errors on one batch are random; the other comparisons use the first ones
)
DEALT = (
    (1, 2),
    (2, 2),
    (1, 4),
)  # tensor x expert ranks of mixtures, besides a case's tensor-parallel sizes
OUTPUTS = (
    "logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits", "last_hidden_state",
    "pooler_output", "encoder_last_hidden_state", "encoder_z_loss", "decoder_z_loss", "encoder_aux_loss",
    "decoder_aux_loss",
)  # fmt: skip
HIDDEN_STATES = ("hidden_states", "decoder_hidden_states", "encoder_hidden_states")
ENDS = [
    2,
    *range(7, 20),
]  # of a vocabulary of about a hundred tokens, so many that answers of all lengths occur
GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy without cache": {"use_cache": False},
    "two beams": {"num_beams": 2},
}


@dataclass(frozen=True)
class Case:
    """A tiny model, written by transformers.

    Attributes:
        config: Arguments of transformers' configuration class. The vocabulary has about 100 tokens.
        sizes: The tensor-parallel sizes.
        padding: The sides on which the rows of a batch are padded in turn; "" is a row without padding. Question
            answering has no labels to ignore, so leave out rows with padding that sees nothing (on the left of a causal
            model; beyond a window).
        shape: The rows of a batch and their length; only of a model without a head other than the default.
        untied: Give the model its own output head, where transformers 5 ties the head of a new model.
        options: Further arguments of a call.
        mend: Corrects what transformers' model computes wrongly, in place.
        since: The first release of transformers whose model is right.
    """

    config: dict[str, Any]
    sizes: tuple[int, ...] = (1, 2, 3)
    padding: tuple[str, ...] = ("right", "left", "")
    shape: tuple[int, int] = (ROWS_OF_BATCH, LENGTH)
    untied: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    mend: Callable[[Any], None] | None = None
    since: str = "5.0"

    @property
    def obstacle(self) -> str:
        """Why the installed transformers cannot be compared with; "" if it can."""
        installed = version("transformers")
        if Version(installed) >= Version(self.since):
            return ""
        return f"not compared: transformers {installed} computes it wrongly, {self.since} does not"


@dataclass
class Run:
    """What a model computed: its outputs, whole, the loss, and the gradients by stored name."""

    outputs: dict[str, Tensor]
    loss: float
    grads: dict[str, Tensor]


@dataclass
class Figures:
    """The largest errors of a case, whether its model has dropout, and what it does not do right."""

    outputs: float = 0.0
    grads: float = 0.0
    bf16_outputs: float = 0.0
    bf16_grads: float = 0.0
    tokens: int = 0
    dropout: bool = False
    problems: list[str] = field(default_factory=list)


def load_rows(folder: Path = ROWS) -> dict[str, tuple[str, Case]]:
    """Returns name of a case -> (family, case).

    The name is the architecture, or the architecture, a comma and what is special about the case.
    """
    rows: dict[str, tuple[str, Case]] = {}
    for path in sorted(folder.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"rows_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert not rows.keys() & module.CASES.keys()
        rows |= {name: (path.stem, case) for name, case in module.CASES.items()}
    return rows


def architecture_of(name: str) -> str:
    return name.partition(",")[0]


def list_sizes(name: str, row: tuple[str, Case]) -> list[tuple[int, int]]:
    """Returns the numbers of tensor-parallel and expert-parallel ranks at which a case is compared.

    The experts of a mixture are dealt over ranks as well, if there are enough of them.
    """
    from shardzoo.models import config_from_dict, family
    from shardzoo.models.config import ModelConfig

    family_name, case = row
    sizes = [(size, 1) for size in case.sizes]
    if getattr(family(family_name).config, "expert_count", None) is ModelConfig.expert_count:
        return sizes
    config = find_class(architecture_of(name)).config_class(**case.config)
    experts = config_from_dict(config.to_dict()).expert_count
    dealt = [(tp, ep) for tp, ep in DEALT if tp in case.sizes and ep <= experts]
    return sizes + dealt


def show_sizes(tensor: int, expert: int) -> str:
    return str(tensor) if expert == 1 else f"{tensor}x{expert}"


def find_class(architecture: str) -> Any:
    """Returns transformers' class of that name, which it may show only in the module of its family."""
    import transformers

    found = getattr(transformers, architecture, None)
    if found is None:
        config = getattr(transformers, architecture.removesuffix("Encoder") + "Config")
        module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
        found = getattr(module, architecture)
    return found


def build(name: str, case: Case, folder: Path) -> Any:
    """Returns transformers' model, in evaluation mode, with eager attention, after writing it to a folder.

    The weights can be represented in bf16, so that one folder serves both types without rounding.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = find_class(architecture_of(name))
    config = model_class.config_class(**case.config)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
    if case.untied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    randomize(model, seed=3)
    if case.mend is not None:
        case.mend(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # not a table of sinusoids, which files need not have
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return model.eval()


def stacks(name: str) -> str:
    """Which stacks of blocks an architecture has."""
    from shardzoo.models import FAMILIES, family

    architecture = architecture_of(name)
    if architecture.endswith(("EncoderModel", "Encoder", "T5ForTokenClassification")):
        return "encoder"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "decoder"
    return next(family(f).kind for f in FAMILIES if architecture in family(f).architectures)


def padded(sides: Sequence[str], rows: int = ROWS_OF_BATCH, length: int = LENGTH) -> Tensor:
    """Returns an attention mask [B, S] whose rows have unequal lengths and are padded on these sides in turn."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        side = sides[row % len(sides)]
        if side == "right":
            mask[row, length - 1 - row :] = 0
        elif side == "left":
            mask[row, : 1 + row] = 0
    return mask


class Inputs:
    """Makes the batch of a case."""

    def __init__(self, name: str, case: Case, config: Any) -> None:
        self.architecture, self.config, self.kind = architecture_of(name), config, stacks(name)
        self.generator = torch.Generator().manual_seed(7)
        self.padding = case.padding
        self.shape = case.shape
        self.options = case.options

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=self.generator)

    def ids(self, mask: Tensor) -> Tensor:
        """Ids that are no special tokens where the mask is 1, and padding elsewhere."""
        padding = 0 if self.config.pad_token_id is None else self.config.pad_token_id
        ids = self.integers(self.config.vocab_size - 8, *mask.shape) + 8
        ids[ids == padding] = 9
        return ids.masked_fill(mask == 0, padding)

    def batch(self) -> dict[str, Tensor]:
        mask = padded(self.padding, *self.shape)
        if self.architecture.endswith(("ForMultipleChoice", "DoubleHeadsModel")):
            mask = mask[:, None].repeat(1, CHOICES, 1)
        inputs = {"input_ids": self.ids(mask), "attention_mask": mask}
        if self.kind == "encoder" and getattr(self.config, "type_vocab_size", 0):
            inputs["token_type_ids"] = self.integers(self.config.type_vocab_size, *mask.shape)
        if self.kind == "encoder-decoder" and "ForSequenceClassification" in self.architecture:
            last = (mask * torch.arange(1, LENGTH + 1)).argmax(1)
            inputs["input_ids"][torch.arange(len(mask)), last] = self.config.eos_token_id
        return inputs | self.targets(inputs) | self.options

    def targets(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The labels that the head takes; for a body the decoder's ids."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        architecture, rows = self.architecture, len(ids)
        if "ForSequenceClassification" in architecture:
            return {"labels": self.class_labels(rows)}
        if "ForMultipleChoice" in architecture:
            return {"labels": self.integers(CHOICES, rows)}
        if architecture == "GPT2DoubleHeadsModel":
            labels = ids.masked_fill(mask == 0, -100)
            labels[..., 1:][mask[..., :-1] == 0] = -100  # what padding predicts is noise
            places = (mask * torch.arange(LENGTH)).argmax(-1)  # the last token of each text
            choices = self.integers(CHOICES, rows)
            return {"labels": labels, "mc_token_ids": places, "mc_labels": choices}
        if "ForNextSentencePrediction" in architecture:
            return {"labels": self.integers(2, rows)}
        if "ForQuestionAnswering" in architecture:
            return {
                name: self.integers(LENGTH, rows) for name in ("start_positions", "end_positions")
            }
        if "ForTokenClassification" in architecture:
            return {
                "labels": self.integers(self.config.num_labels, rows, LENGTH).masked_fill(
                    mask == 0, -100
                )
            }
        if architecture == "ElectraForPreTraining":
            return {"labels": self.integers(2, rows, LENGTH)}
        if self.kind == "decoder" and ("LMHead" in architecture or "CausalLM" in architecture):
            labels = ids.masked_fill(mask == 0, -100)
            labels[:, 1:][mask[:, :-1] == 0] = -100  # what padding predicts is noise
            labels[2:3, 5:7] = -100
            return {"labels": labels}
        if self.kind == "encoder-decoder":
            return self.decoder_targets(rows)
        if "ForMaskedLM" in architecture or "ForPreTraining" in architecture:
            hidden = torch.rand(mask.shape, generator=self.generator) < 0.5
            labels = {
                "labels": self.ids(torch.ones_like(ids)).masked_fill(hidden | (mask == 0), -100)
            }
            return labels | (
                {"next_sentence_label": self.integers(2, rows)}
                if "PreTraining" in architecture
                else {}
            )
        return {}

    def class_labels(self, rows: int) -> Tensor:
        if self.config.problem_type == "multi_label_classification":
            return self.integers(2, rows, self.config.num_labels).float()
        if self.config.problem_type == "regression" or self.config.num_labels == 1:
            shape = (rows, self.config.num_labels) if self.config.num_labels > 1 else (rows,)
            return torch.randn(shape, generator=self.generator)
        return self.integers(self.config.num_labels, rows)

    def decoder_targets(self, rows: int) -> dict[str, Tensor]:
        whole = torch.ones(rows, self.shape[1], dtype=torch.long)
        targets = self.ids(whole)
        mask = whole.clone()
        mask[1:2, 10:] = 0
        if "ForConditionalGeneration" not in self.architecture:
            return {"decoder_input_ids": targets, "decoder_attention_mask": mask}
        targets[1, 9:], targets[2, 3] = -100, -100
        return {"labels": targets, "decoder_attention_mask": mask}

    def prompts(self) -> tuple[Tensor, Tensor]:
        """Prompts of unequal lengths, ids and mask [B, S], padded on the side that generation needs."""
        mask = padded(["left" if self.kind == "decoder" else "right"])
        return self.ids(mask), mask


def loss_of(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """The loss of a body: a weighted sum of its outputs at the positions that are not padding."""
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros(())
    for name, value in outputs.items():
        weights = torch.randn(value.shape, generator=generator).to(value.device)
        total = total + (attended(name, value, inputs).float() * weights).mean()
    return total


def attended(name: str, value: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Sets what an output has at positions of padding to zero: what comes out of nothing is nobody's business."""
    is_decoders = "decoder_attention_mask" in inputs and not name.startswith("encoder")
    mask = inputs["decoder_attention_mask" if is_decoders else "attention_mask"]
    if name.startswith("hidden_states") and value.dim() == 3:
        mask = mask.view(-1, mask.shape[-1])  # the rows of all choices
    if value.shape[: mask.dim()] != mask.shape or name.startswith(("start", "end")):
        return value
    return value * mask.view(*mask.shape, *[1] * (value.dim() - mask.dim()))


def forward(model: Any, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Returns a model's outputs, whole, and its loss."""
    output = model(**inputs, output_hidden_states=True)
    names = output.keys()
    found = {name: output[name] for name in OUTPUTS if name in names}
    if hasattr(model, "gather_logits"):
        found |= {
            n: model.gather_logits(v)
            for n, v in found.items()
            if n in ("logits", "prediction_logits")
        }
    loss = output["loss"] if "loss" in names else loss_of(found, inputs)
    for name in HIDDEN_STATES:
        found |= {
            f"{name}.{i}": state for i, state in enumerate(output[name] if name in names else ())
        }
    return {name: attended(name, value.detach(), inputs) for name, value in found.items()}, loss


def moved(tensors: dict[str, Any], device: str) -> dict[str, Any]:
    """Tensors on a device; a call's other arguments stay as they are."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in tensors.items()
    }


def reference(
    model: Any, batches: Sequence[dict[str, Tensor]], family_name: str, device: str = "cpu"
) -> list[Run]:
    """What transformers' model computes of each batch; the gradients have the names of the family's name map."""
    from shardzoo.models import config_from_dict, family
    from shardzoo.models.auto import build_on_meta

    config = config_from_dict(model.config.to_dict())
    name_map = family(family_name).find_names(config)
    parameters = dict(build_on_meta(config, None).named_parameters())
    entries = [entry.stored_names() for entry in name_map.resolve(parameters)]
    stored = {name for names in entries for name in names}
    kept = dict(name_map.aliases)  # a tied head may be registered before the embedding
    model.to(device)
    runs = []
    for inputs in batches:
        model.zero_grad()
        outputs, loss = forward(model, moved(inputs, device))
        loss.backward()
        found = {}
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[key] = parameter.grad
            elif ".experts." in key:  # without a token
                found[key] = torch.zeros_like(parameter)
        named = {name_map.to_current_name(name, stored): grad for name, grad in found.items()}
        grads = {
            name if name in stored else kept.get(name, name): grad
            for name, grad in split_experts(named, entries).items()
        }
        runs.append(Run(moved(outputs, "cpu"), loss.item(), moved(grads, "cpu")))
    return runs


def split_experts(
    grads: dict[str, Tensor], entries: Sequence[tuple[str, ...]]
) -> dict[str, Tensor]:
    """The gradients with those of stacked experts, [E, 2F, H] and [E, H, F], by the names of their matrices on disk.

    entries: the stored names of each parameter of ours, of experts in the order of the stack.
    """
    found: dict[str, Tensor] = {}
    whole = {name for names in entries for name in names}  # gpt-oss stacks them on disk, too
    for name, grad in grads.items():
        module, stacked, kind = name.partition(".experts.")
        if not stacked or grad.dim() != 3 or name in whole:
            found[name] = grad
            continue
        count = len(grad) * (2 if kind == "gate_up_proj" else 1)
        [names] = [
            names for names in entries
            if f".{module}.experts." in f".{names[0]}" and len(names) == count
        ]  # fmt: skip
        found |= dict(zip(names, grad.reshape(count, -1, grad.shape[-1]), strict=True))
    return found


def run_layouts(
    mesh, folder: Path, batches, layouts, prompts, device="cpu"
) -> tuple[list[list], dict[str, Tensor]]:
    """On one rank: for each (mode, kind) the outputs, loss and gradients of each batch; and the generated tokens.

    They are computed on `device` and returned in CPU memory. At a time the ranks along the expert axis have batches
    that follow one another, but in bf16 the same one: its rounding makes a few tokens choose other experts, in ours or
    in theirs, and several batches together would have that too often for a median.
    """
    from shardzoo import (
        from_pretrained,
    )  # not from the models, which have no `generate` of their own
    from shardzoo.models import ParallelConfig
    from shardzoo.mpu import dropout_state

    results = []
    first = 0 if mesh is None else mesh.rank_in("expert")
    own = batches[first:] + batches[:first]
    for mode, kind in layouts:
        model: Any = from_pretrained(
            folder, mesh, KINDS[kind], parallel_config=ParallelConfig(**MODES[mode])
        )
        model.to(device).train(kind == "dropout")
        runs = []
        for inputs in batches if kind == "bf16" else own[:1]:
            model.zero_grad()
            dropout_state.set(5, 0)
            outputs, loss = forward(model, moved(inputs, device))
            loss.backward()
            found = {n: p for n, p in model.named_parameters() if p.grad is not None}
            grads = {n: (p.grad.cpu(), getattr(p, "shard", None)) for n, p in found.items()}
            runs.append((moved(outputs, "cpu"), loss.item(), grads))
        results.append(runs)
    if prompts is None:
        return results, {}
    model = from_pretrained(folder, mesh).to(device)
    prompts = [tensor.to(device) for tensor in prompts]
    return results, {
        name: decode(model, *prompts, options).cpu() for name, options in GENERATION.items()
    }


def decode(model: Any, ids: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": ENDS, "do_sample": False, **options}
    return model.generate(ids, attention_mask=mask, **settings)


def until_end(tokens: Tensor, prompt: int, ends: list[int]) -> list[list[int]]:
    """Each sequence up to its first end. What transformers fills the rest of beams with is the first end where the
    padding token is 0 (`pad_token_id or eos_token_id[0]`), and here always the padding token."""
    rows = []
    for row in tokens.tolist():
        stop = next((i for i in range(prompt, len(row)) if row[i] in ends), len(row))
        rows.append(row[: stop + 1])
    return rows


def error_ratio(ours: Tensor, theirs: Tensor, exact: Tensor) -> float:
    """The error of ours relative to that of theirs, or to the resolution of bf16 where that is larger."""
    errors = [(value.float() - exact).norm() for value in (ours, theirs)]
    return (errors[0] / max(errors[1], RESOLUTION * exact.norm())).item()


def joined(grads: dict[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([grads[name].flatten().float() for name in names])


@dataclass
class Comparison:
    """One case's references, with which the layouts are compared.

    In fp32, each output differs by at most 1e-5 of its largest value, and each gradient by at most 1e-5 of the sum of
    its own norm and a hundredth of the largest gradient's. The second term is for gradients that are only rounding (of
    a key's bias, to which the softmax is blind) or whose terms cancel (of a bias of two classes): fp32 resolves the
    terms, not the sum.

    In bf16, let e(x) be the Euclidean norm of x minus what transformers computes in fp32 from the same weights, which
    bf16 represents exactly. The ratio of our e to that of transformers in bf16 (or to 2^-7 of the norm, bf16's
    resolution, if that is larger) is at most 1.5, for each output and for all gradients taken as one vector. It is the
    median of fifteen batches: on a single batch, either error may happen to be many times the other.

    With dropout, every layout computes what the unsplit model computes, to the tolerances of fp32. On a GPU these are
    four times as wide, and the unsplit model with dropout is that of the CPU.
    """

    references: dict[str, list[Run]]  # by kind, each batch; "theirs" is transformers in bf16
    figures: Figures
    slack: float = 1.0  # times the tolerances of fp32

    def add(self, layout: str, kind: str, runs: list[Run], expert: int = 1) -> None:
        """Compares runs, each of which is what as many batches give as there are ranks along the expert axis."""
        if kind == "bf16":
            three = [
                (run, add_up([theirs] * expert), add_up([exact] * expert))
                for run, theirs, exact in zip(
                    runs, self.references["theirs"], self.references["fp32"], strict=True
                )
            ]
            problems = self.narrow(three)
        else:
            problems = self.wide(runs[0], add_up(self.references[kind][:expert]))
        self.figures.problems += [f"{layout}, {kind}: {problem}" for problem in problems]

    def wide(self, run: Run, expected: Run) -> list[str]:
        problems = []
        if run.outputs.keys() != expected.outputs.keys():
            problems.append(f"outputs are {list(run.outputs)}, not {list(expected.outputs)}")
        for name in run.outputs.keys() & expected.outputs.keys():
            error = (run.outputs[name] - expected.outputs[name]).abs().max() / expected.outputs[
                name
            ].abs().max()
            self.figures.outputs = max(self.figures.outputs, error.item())
            if not error <= self.slack * LARGEST_ERROR:
                problems.append(f"{name} differ by {error:.1e} of their scale")
        if not abs(run.loss - expected.loss) <= self.slack * 1e-6 * max(1.0, abs(expected.loss)):
            problems.append(f"the loss is {run.loss}, not {expected.loss}")
        if run.grads.keys() != expected.grads.keys():
            problems.append(
                f"only one has gradients of {sorted(run.grads.keys() ^ expected.grads.keys())}"
            )
        largest = max(grad.norm() for grad in expected.grads.values())
        for name in run.grads.keys() & expected.grads.keys():
            grad = expected.grads[name]
            error = (run.grads[name] - grad).norm() / (grad.norm() + SMALL * largest)
            self.figures.grads = max(self.figures.grads, error.item())
            if not error <= self.slack * LARGEST_ERROR:
                problems.append(f"the gradient of {name} differs by {error:.1e}")
        return problems

    def narrow(self, three: list[tuple[Run, Run, Run]]) -> list[str]:
        """Compares runs with transformers' in bf16 and in fp32."""
        problems: list[str] = []
        for name in three[0][0].outputs.keys() & set(OUTPUTS):
            ratio = median(error_ratio(*(run.outputs[name] for run in each)) for each in three)
            self.figures.bf16_outputs = max(self.figures.bf16_outputs, ratio)
            if not ratio <= LARGEST_RATIO:
                problems.append(f"{name} have {ratio:.2f} times the error of transformers' bf16")
        names = sorted(three[0][0].grads.keys() & three[0][2].grads.keys())
        ratio = median(error_ratio(*(joined(run.grads, names) for run in each)) for each in three)
        self.figures.bf16_grads = max(self.figures.bf16_grads, ratio)
        if not ratio <= LARGEST_RATIO:
            problems.append(f"the gradients have {ratio:.2f} times the error of transformers' bf16")
        return problems


def add_up(runs: Sequence[Run]) -> Run:
    """Several batches as one run: outputs side by side, sums of losses and gradients."""
    if len(runs) == 1:
        return runs[0]
    return Run(
        {name: torch.stack([run.outputs[name] for run in runs]) for name in runs[0].outputs},
        sum(run.loss for run in runs),
        {name: sum(run.grads[name] for run in runs) for name in runs[0].grads},
    )


def whole(family_name: str, ranks: list, expert: int = 1, config: Any = None) -> Run:
    """One run from what all ranks returned. Results that are replicated over the tensor axis must be the same."""
    tensor = len(ranks) // expert
    by_expert = [ranks[first : first + tensor] for first in range(0, len(ranks), tensor)]
    for group in by_expert:
        check_replicated(group)
    grads = []
    for each in zip(*by_expert, strict=True):  # the ranks that hold different experts
        joined = {}
        for name, (_, shard) in each[0][2].items():
            parts = [found[name][0] for *_, found in each]
            is_dealt = shard is not None and shard.splits_experts
            joined[name] = (torch.cat(parts) if is_dealt else sum(parts), shard)
        grads.append(joined)
    firsts = add_up([Run(*group[0][:2], {}) for group in by_expert])
    return Run(firsts.outputs, firsts.loss, merge_gradients(family_name, grads, config))


def check_replicated(ranks: list) -> None:
    """Raises AssertionError unless the outputs and losses of tensor-parallel ranks are the same."""
    outputs, loss, _ = ranks[0]
    for others, other_loss, _ in ranks[1:]:
        assert other_loss == loss, "the ranks' losses differ"
        differ = [name for name in outputs if not torch.equal(others[name], outputs[name])]
        assert not differ, f"the ranks' {', '.join(differ)} differ"


def check_case(
    name: str,
    row: tuple[str, Case],
    folder: Path,
    run_mesh: Callable[..., list],
    sizes: Sequence[tuple[int, int]] | None = None,
    layouts: Iterable[tuple[str, str]] = (),
    converts: bool = True,
    device: str = "cpu",
) -> Figures:
    """Compares one case with transformers in each layout and in each (mode, kind).

    Args:
        name: Of the row.
        row: The family and the case.
        folder: An empty folder for checkpoints.
        run_mesh: The fixture of that name.
        sizes: Numbers of tensor-parallel and expert-parallel ranks; by default those of `list_sizes`.
        layouts: Pairs of MODES and KINDS; by default all, in bf16 those of BF16_MODES.
        converts: Whether the files are converted, too.
        device: Where our model and transformers' in bf16 compute; what they are compared with is computed on the CPU.
    """
    from shardzoo.models import config_from_dict

    family_name, case = row
    model = build(name, case, folder / "hf")
    config = config_from_dict(model.config.to_dict())
    inputs, figures = Inputs(name, case, model.config), Figures()
    todo = list(layouts) or [(m, k) for m in MODES for k in KINDS if k != "bf16" or m in BF16_MODES]
    has_bf16 = any(kind == "bf16" for _, kind in todo)
    sizes = list_sizes(name, row) if sizes is None else sizes
    most = max(expert for _, expert in sizes)
    batches = [inputs.batch() for _ in range(BATCHES if has_bf16 else most)]
    dropped = [
        run_layouts(None, folder / "hf", [batch], [("plain", "dropout")], None)[0][0]
        for batch in batches[:most]
    ]
    comparison = Comparison(
        {
            "fp32": reference(model, batches, family_name),
            "theirs": reference(copy.deepcopy(model).bfloat16(), batches, family_name, device)
            if has_bf16
            else [],
            "dropout": [whole(family_name, runs, config=config) for runs in dropped],
        },
        figures,
        1.0 if device == "cpu" else SLACK_OF_A_GPU,
    )
    losses = [comparison.references[kind][0].loss for kind in ("fp32", "dropout")]
    figures.dropout = abs(losses[0] - losses[1]) > 1e-4
    prompts, expected = None, {}
    if generates(name, family_name):
        prompts = inputs.prompts()
        if hasattr(model.config, "output_router_logits"):
            # transformers cannot compute the auxiliary loss of a step with a cache.
            model.config.output_router_logits = False
        expected = {key: decode(model, *prompts, options) for key, options in GENERATION.items()}
    for size, expert in sizes:
        options = {"expert": expert} if expert > 1 else {}
        ranks = run_mesh(
            size, run_layouts, folder / "hf", batches, todo, prompts, device, **options
        )
        layout = f"TP {show_sizes(size, expert)}"
        for i, (mode, kind) in enumerate(todo):
            try:
                by_batch = zip(*(results[i] for results, _ in ranks), strict=True)
                runs = [whole(family_name, list(results), expert, config) for results in by_batch]
            except AssertionError as error:
                figures.problems.append(f"{layout}, {mode}, {kind}: {error}")
                continue
            comparison.add(f"{layout}, {mode}", kind, runs, expert)
        compare_tokens(
            layout, [tokens for _, tokens in ranks], expected, prompts, inputs.kind, figures
        )
        if converts and expert == 1:  # files do not know the expert axis
            check_conversion(folder, size, figures)
    return figures


def generates(name: str, family_name: str) -> bool:
    from shardzoo.models import family

    return getattr(family(family_name).architectures[architecture_of(name)], "generates", "") in (
        "continuation", "answer",
    )  # fmt: skip


def compare_tokens(
    layout: str, ranks: list, expected: dict[str, Tensor], prompts, kind: str, figures: Figures
) -> None:
    for key, tokens in expected.items():
        prompt = prompts[0].shape[1] if kind == "decoder" else 1
        wanted = until_end(tokens, prompt, ENDS)
        figures.tokens += sum(len(row) - prompt for row in wanted)
        for rank, found in enumerate(ranks):
            if (rows := until_end(found[key], prompt, ENDS)) != wanted:
                figures.problems.append(
                    f"{layout}, {key}, rank {rank}: tokens are {rows}, not {wanted}"
                )


def check_conversion(folder: Path, size: int, figures: Figures) -> None:
    """HF -> ranks -> HF gives equal bytes, as read here; and `shardzoo convert verify --round-trip` says the same."""
    from shardzoo.convert.operations import Options, merge, split
    from shardzoo.convert.verification import verify_round_trip

    split(folder / "hf", folder / f"shards-{size}", size)
    merge(folder / f"shards-{size}", folder / f"merged-{size}")
    if tensor_hashes(folder / f"merged-{size}") != tensor_hashes(folder / "hf"):
        figures.problems.append(f"TP {size}: split and merge change the stored tensors")
    verdict = verify_round_trip(folder / "hf", size, Options(), lambda done, total: None)
    figures.problems += [f"TP {size}, --round-trip: {problem}" for problem in verdict.differences]
