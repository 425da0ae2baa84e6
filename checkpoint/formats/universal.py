"""Reads DeepSpeed's universal checkpoints.

`latest_universal` names a folder. In it, `zero/PARAMETER/KIND.pt` has one state of one parameter,
whole and in fp32: its weights under the kind `fp32`, and an optimizer's moments. After DeepSpeed's
`checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...files.printable import describe
from ...files.safe_paths import checked_file
from ..stored_tensor import StoredTensor, read_file_state

UNIVERSAL = "latest_universal"  # names the newest folder of a universal checkpoint
FP32 = "fp32"  # DeepSpeed's name of a parameter's weights
PARAMETERS = "zero"  # the folder with a folder for each parameter
STEP = "step"  # the kind of an optimizer's count, which is no tensor of the parameter's shape
MOST_PARAMETERS = 1 << 17


@dataclass(frozen=True)
class UniversalState:
    """What a universal checkpoint has beside the weights.

    Attributes:
        states: Kind of an optimizer's state, such as `exp_avg` -> the tensors by parameter. DeepSpeed
            writes none for buffers, and for the second name of a tied parameter.
        step: Completed steps.
        samples: Samples trained on, or 0 if they are not recorded.
    """

    states: Mapping[str, Mapping[str, StoredTensor]]
    step: int
    samples: int


def open_universal(folder: Path) -> tuple[Mapping[str, StoredTensor], UniversalState]:
    """Reads where the tensors of a universal checkpoint are.

    Args:
        folder: The folder that `latest_universal` names.

    Returns:
        The weights by name, and what is beside them.

    Raises:
        ValueError: A file is missing or damaged.
    """
    place = folder / PARAMETERS
    if not place.is_dir() or place.resolve().parent != folder.resolve():
        raise ValueError(f"{folder} has no folder {PARAMETERS}, as a universal checkpoint has")
    kinds: dict[str, dict[str, StoredTensor]] = {}
    count = 0
    for entry in sorted(place.iterdir()):
        if not entry.is_dir():
            continue
        if entry.resolve().parent != place.resolve():
            raise ValueError(f"{entry} is a link out of its folder; copy the folder first")
        count += 1
        if count > MOST_PARAMETERS:
            raise ValueError(f"{place} has more than {MOST_PARAMETERS:,} parameters")
        for file in sorted(entry.glob("*.pt")):
            if file.stem != STEP:
                kinds.setdefault(file.stem, {})[entry.name] = _locate(entry, file.name)
    weights = kinds.pop(FP32, {})
    if not weights:
        raise ValueError(f"{place} has no file NAME/{FP32}.pt of a parameter")
    step, samples = _read_progress(folder)
    return weights, UniversalState(kinds, step, samples)


def _locate(folder: Path, name: str) -> StoredTensor:
    """Returns the tensor in one file, under the name of its parameter.

    Raises:
        ValueError: The file holds something else.
    """
    from .torch_file import load_without_storage, locate_tensors

    path = checked_file(folder, name)
    file_state = read_file_state(path)
    content = load_without_storage(path)
    if not isinstance(content, dict) or "param" not in content:
        raise ValueError(f"{path} holds no tensor 'param', as a universal checkpoint does")
    param = cast(dict[Any, Any], content)["param"]
    return locate_tensors(path, {folder.name: param}, file_state)[folder.name]


def _read_progress(folder: Path) -> tuple[int, int]:
    """Returns the completed steps, and the samples, that the engine recorded.

    Raises:
        ValueError: The engine's file is missing, or has no number of steps.
    """
    from .megatron import read_state

    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    name = next((name for name in names if (folder / name).exists()), names[0])
    state = read_state(checked_file(folder, name))
    counts: list[int] = []
    for key in ("global_steps", "global_samples"):
        count = state.get(key, 0)
        if type(count) is not int or not 0 <= count < 1 << 53:
            raise ValueError(f"{folder / name} has {key}={describe(count)}, which is no count")
        counts.append(count)
    return counts[0], counts[1]
