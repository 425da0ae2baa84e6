"""Lets every command spell an option alike, and take the other spellings.

An option has one name in all commands, such as `--model-parallel-size`, and may have a short one,
such as `--tp`. Names of earlier releases and of one command alone go on, with a notice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Sequence

from ..files.verbosity import is_quiet

# Another name, which is as good -> the name.
SHORT = {
    "tp": "model_parallel_size",
    "tensor_parallel_size": "model_parallel_size",
    "tensor_model_parallel_size": "model_parallel_size",
    "pp": "pipeline_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}
# A name of earlier releases -> the name.
OLD = {
    "length": "sequence_length",
    "accumulation_steps": "gradient_accumulation_steps",
    "dtype": "precision",
}
# What names the model: in all commands the first one is taken, too.
MODEL = ("model", "model_name_or_path")
# The options' values in other spellings -> ours.
VALUES = {
    "precision": {
        **dict.fromkeys(("float32", "float"), "fp32"),
        **dict.fromkeys(("float16", "half"), "fp16"),
        "bfloat16": "bf16",
    }
}
SHORT_NAMES = {
    "model_parallel_size": "--tp",
    "pipeline_parallel_size": "--pp",
    "data_parallel_size": "--dp",
    "context_parallel_size": "--cp",
    "expert_parallel_size": "--ep",
}
"""The short names that help pages show."""


def respell(
    argv: Sequence[str], known: Collection[str], *, positional: str = "", quiet: bool = False
) -> list[str]:
    """Returns a command line with the command's own names of options and values.

    Prints a notice for each name of earlier releases.

    Args:
        known: The command's options, by the names of their fields.
        positional: The name of the command's first positional argument if other commands have it as
            an option: `--model NAME` is then taken too.
        quiet: Print no notice; for every rank except the first.
    """
    options: list[str] = []
    first: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if not option.startswith("--"):
            options.append(word)
            continue
        name = option[2:].replace("-", "_")
        if positional and name in (positional, f"{positional}_name_or_path"):
            if not equals:
                value = words.pop(0) if words else ""
            first.append(value)
            continue
        target = name
        if name not in known:
            target = SHORT.get(name, OLD.get(name, name))
            if name in MODEL:
                target = next((other for other in MODEL if other in known), name)
        if target not in known:
            options.append(word)
            continue
        written = f"--{target.replace('_', '-')}"
        if name in OLD and target != name and not quiet and not is_quiet():
            print(f"notice: {option} is called {written} now", file=sys.stderr)
        if target not in VALUES:
            options.append(f"{written}{equals}{value}" if target != name else word)
            continue
        if not equals:
            value = words.pop(0) if words else ""
        options.append(f"{written}={VALUES[target].get(value, value)}")
    return [*first, *options]


def name_as_typed(message: str, argv: Iterable[str]) -> str:
    """Returns a message that names options as they were typed: `--tp` for `--model-parallel-size`,
    `train.train_iter` for `--train-steps`.

    Args:
        message: A message whose options have their own names.
        argv: The command line.
    """
    from ..trainer.arguments.aliases import SPELLINGS  # It takes long to import.

    typed: dict[str, str] = {}
    for word in argv:
        option, equals, _ = word.partition("=")
        if not option.startswith("--") and not equals:
            continue
        name = option.removeprefix("--").replace("-", "_")
        target = SHORT.get(name, SPELLINGS.renamed.get(name, name))
        typed.setdefault(target, option if option.startswith("--") or target != name else "")
    for target, option in typed.items():
        if option:
            long = f"--{target.replace('_', '-')}"
            message = re.sub(rf"(?<![\w-]){long}(?![\w-])", lambda _, text=option: text, message)
    return message


# Files whose keys are spelled with underscores, so that a message about one keeps them.
KEYED_FILE = re.compile(
    r"(config|deepspeed|state|manifest|meta|tokenizer|index)[\w.-]*\.json|\.ya?ml\b"
)


# What peft calls an argument, in messages of adapters.
PEFT = {
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
}


def name_options(message: str, names: Iterable[str]) -> str:
    """Returns a message in which the arguments of a command are spelled as on the command line:
    `do_sample=True` is `--do-sample`, and `num_beams=1` is `--num-beams 1`.

    A message about a file of settings stays as it is.

    Args:
        names: The command's arguments. One of a single word is found before a `=`, and as the
            subject of a message that says what it must be.
    """
    known = set(names)
    if not known or KEYED_FILE.search(message):
        return message

    def spell(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in known:
            name = PEFT.get(name, name)
        if name not in known or ("_" not in name and value is None):
            return found[0]
        option = name.replace("_", "-")
        if value == "False":
            return f"--no-{option}"
        return f"--{option}" if value in (None, "True") else f"--{option} {value}"

    spelled = re.sub(
        r"(?<![\w./'\"{-])([a-z]\w*)(?:=('[^']*'|[\w.+-]*\w))?(?![\w'\"(/}]|\.\w)", spell, message
    )
    # A message that begins with a name of one word is about that argument.
    subject = re.match(r"([a-z]+)(?= must (?:be|not)\b)", spelled)
    if subject is not None and subject[0] in known:
        spelled = f"--{spelled}"
    # What was said for Python too, as in `--overwrite (overwrite=True)`.
    return re.sub(r"(--[\w-]+) \(\1\)", r"\1", spelled)
