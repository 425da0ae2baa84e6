"""Writes the table of docs/recipes.md from the files of recipes/, as `pretrain.py` reads them.

python docs/scripts/recipes.py
"""

from __future__ import annotations

import re
from pathlib import Path

from shardzoo.cli.pretrain import RECIPES, read_arguments
from shardzoo.models import family, find_config
from shardzoo.models.sizes import parameter_sizes

PAGE = Path(__file__).parents[1] / "recipes.md"
BEGIN, END = "<!-- begin: python docs/scripts/recipes.py -->\n", "<!-- end -->"
COLUMNS = (
    "recipe",
    "parameters",
    "objective",
    "tokens",
    "global batch",
    "steps",
    "optimizer",
    "rate",
    "split",
    "runs on",
)


def row(file: Path) -> list[str]:
    arguments = read_arguments(["--config", str(file)], quiet=True)
    hardware = re.search(r"# Hardware: (\d+) GPUs? of (\d+) GB", file.read_text())
    length, target = arguments.sequence_length, arguments.target_length
    config = find_config(arguments.model)
    objective = (
        arguments.objective.name if arguments.objective else family(config.model_type).objective
    )
    batch = arguments.global_batch_size or f"{arguments.micro_batch_size} a rank"
    return [
        f"[{file.stem}](../recipes/{file.name})",
        readable(sum(size.full for size in parameter_sizes(config))),
        objective,
        f"{length} → {target}" if target else str(length),
        f"{batch:,}" if isinstance(batch, int) else batch,
        f"{arguments.train_steps:,}",
        arguments.optimizer,
        f"{arguments.lr:g}",
        describe_split(arguments.model_parallel_size, arguments.context_parallel_size),
        f"{hardware[1]} × {hardware[2]} GB" if hardware else "2 CPU cores",
    ]


def describe_split(tensor: int, context: int) -> str:
    if context > 1:
        return f"sequences {context} ways"
    return f"{tensor} ways" if tensor > 1 else "no"


def readable(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def table() -> str:
    rows = [
        COLUMNS,
        ["---"] * len(COLUMNS),
        *(row(file) for file in sorted(RECIPES.glob("*.yaml"))),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def page() -> str:
    """The page with today's table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
