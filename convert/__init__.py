"""Converts checkpoint folders between formats and numbers of ranks, and verifies them.

The way of a tensor of a Hugging Face file to rank 1's file, in `split(source, destination, 2)`:

1. `operations.split` chooses the target's format and calls `_convert`, which takes all steps below.
2. `checkpoint/checkpoint.py: open_checkpoint` finds the tensor in the header of its file, as a
   `StoredTensor` (name, file, type, shape, offset). No tensor's bytes are read.
3. `models/mapping.py: map_checkpoint` builds the model on the meta device and tells, by the
   family's names, which ranges of which native parameter the tensor holds: a `ParameterPlacement`
   in the source's `CheckpointLayout` (`checkpoint/layout.py`).
4. `target.build_shards_target` does the same for the destination: the parameter's `Shard` gives the
   ranges of each rank, and `checkpoint/planned_file.py` the offsets in `rank_01.safetensors`.
5. `plan.plan_conversion`, which has called 2 to 4, checks both layouts and pairs them: a
   `TensorCopy` for each parameter.
6. `destination.Destination.begin` creates the files at full size, under names that nothing loads.
7. `workers.run_copies` runs `copying.run_copy` for each copy in threads: read a block
   (`HashingReader`), divide it among the ranks (`_scatter_block`, or `_copy_tiles` for a weight
   that is stored transposed, as GPT-2's are), write and hash it (`HashingWriter`). A hash that the
   source records is compared after its last block; a Hugging Face folder records none.
   `journal.Journal` records finished copies.
8. `Destination.finish` renames the files and writes `manifest.json` last.

Names are imported when they are first used, so that inspecting a folder does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .inspection import diff, inspect_folder
    from .logits import compare_logits
    from .operations import Options, Outcome, merge, split
    from .plan import dry_run
    from .upcycling import upcycle
    from .verification import VerificationReport, verify_equal, verify_folder, verify_round_trip

_MODULES = {
    "Options": "operations",
    "Outcome": "operations",
    "VerificationReport": "verification",
    "compare_logits": "logits",
    "diff": "inspection",
    "dry_run": "plan",
    "inspect_folder": "inspection",
    "merge": "operations",
    "split": "operations",
    "upcycle": "upcycling",
    "verify_equal": "verification",
    "verify_folder": "verification",
    "verify_round_trip": "verification",
}

__all__ = [
    "Options",
    "Outcome",
    "VerificationReport",
    "compare_logits",
    "diff",
    "dry_run",
    "inspect_folder",
    "merge",
    "split",
    "upcycle",
    "verify_equal",
    "verify_folder",
    "verify_round_trip",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
