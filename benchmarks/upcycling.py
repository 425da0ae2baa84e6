"""Trains a dense quickstart, makes a mixture of it, and trains both on: which one learns more of held-out text?

    python benchmarks/upcycling.py --steps 600 --more 300

The mixture has one expert for a token, so that a token meets as many parameters as in the dense model, but for the
routers. Its first loss must be the dense model's to 1e-6. Both train on by the same schedule, on the same samples.
Losses are those of the same held-out text, without the auxiliary loss. The command exits with 1 if the first losses
differ, or if the mixture does not fall below the dense model that it was made of, and below the one that has trained on
as long.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

import shardzoo
from shardzoo.data import IndexedDataset

ROOT = Path(__file__).parents[1]
LENGTH = 256  # tokens of a row


@dataclass(frozen=True)
class Arguments:
    """What to train, and for how long."""

    model: str = "llama-quickstart"
    num_experts: int = 8
    experts_per_token: int = 1
    steps: int = 600
    """Of the dense model, before the mixture is made of it."""
    more: int = 300
    """Of the mixture, and of the dense model beside it."""
    lr: float = 1e-3
    """At the peak of these later steps."""
    balance: float = 0.01
    """What the auxiliary loss is multiplied by."""
    rows: int = 400
    """Of held-out text, of 256 tokens each."""
    seed: int = 1
    settings: tuple[str, ...] = ()
    """Further arguments of all runs, such as `micro_batch_size=4`."""
    work: Path | None = None
    """A folder for the runs; by default a temporary one. Runs that are there already are not repeated."""
    json: Path | None = None
    """Where to write the figures."""


def run(command: list[str], log: Path) -> None:
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}; see {log}")


def train(folder: Path, steps: int, *settings: str) -> Path:
    """Runs `pretrain.py`, and returns the folder with the trained model."""
    exported = folder / "hf"
    if exported.exists():
        return exported
    command = [
        sys.executable,
        str(ROOT / "pretrain.py"),
        f"--config={ROOT / 'recipes' / 'llama-quickstart.yaml'}",
        f"--output-dir={folder}",
        f"train_steps={steps}",
        f"eval_interval={steps}",
        f"save_interval={steps}",
        "final_eval_sequences=4",
        *settings,
    ]
    run(command, folder.with_suffix(".log"))
    return exported


@torch.no_grad()
def measure(folder: Path, rows: torch.Tensor) -> float:
    """Returns a model's loss of rows of tokens [N, S], in fp64 sums and without auxiliary losses."""
    model = shardzoo.from_pretrained(str(folder)).eval()
    options = {}
    if model.config.expert_count:
        options["output_router_logits"] = False
    total = 0.0
    for ids in rows.split(8):
        total += model(input_ids=ids, labels=ids, **options).loss.item() * len(ids)
    return total / len(rows)


def upcycle(dense: Path, mixture: Path, arguments: Arguments) -> None:
    """Makes a mixture, which asks for the auxiliary loss when it trains."""
    command = [
        *(sys.executable, "-m", "shardzoo.cli.main", "convert", "upcycle"),
        *(str(dense), str(mixture), "--overwrite"),
        *("--num-experts", str(arguments.num_experts)),
        *("--experts-per-token", str(arguments.experts_per_token)),
    ]
    run(command, mixture.with_suffix(".log"))
    path = mixture / "config.json"
    values = json.loads(path.read_text())
    values["output_router_logits"] = True
    values["router_aux_loss_coef"] = arguments.balance
    path.write_text(json.dumps(values, indent=1))


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    work = arguments.work or Path(tempfile.mkdtemp(prefix="upcycling-"))
    work.mkdir(parents=True, exist_ok=True)
    settings = (f"seed={arguments.seed}", *arguments.settings)
    dense = train(work / "dense", arguments.steps, f"--model={arguments.model}", *settings)
    tokens = torch.from_numpy(
        IndexedDataset(work / "dense" / "data" / "valid").tokens.astype("int64")
    )
    count = min(arguments.rows, len(tokens) // LENGTH)
    rows = tokens[: count * LENGTH].view(count, LENGTH)
    mixture = work / "mixture"
    upcycle(dense, mixture, arguments)
    losses = {"dense": measure(dense, rows), "mixture at first": measure(mixture, rows)}
    for name, loss in losses.items():
        print(f"{name}: {loss:.7f}", flush=True)
    later = (*settings, f"lr={arguments.lr}", f"warmup_steps={max(1, arguments.more // 20)}")
    for name, folder in (("mixture", mixture), ("dense", dense)):
        options = (f"--model={folder}", f"--init-from={folder}", *later)
        trained = train(work / f"{name}-on", arguments.more, *options)
        losses[f"{name}, trained on"] = measure(trained, rows)
        print(
            f"{name} after {arguments.more} steps more: {losses[f'{name}, trained on']:.4f}",
            flush=True,
        )
    if arguments.json:
        report = {"steps": [arguments.steps, arguments.more], "losses": losses}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    is_equal = abs(losses["mixture at first"] - losses["dense"]) <= 1e-6 * losses["dense"]
    bound = min(losses["dense"], losses["dense, trained on"])
    return int(not is_equal or losses["mixture, trained on"] >= bound)


if __name__ == "__main__":
    sys.exit(main())
