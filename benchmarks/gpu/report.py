"""Writes the report of a call of benchmarks/gpu.sh: every figure as JSON, and tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class Outcome:
    """How a part ended: "passed", or why not."""

    part: str
    outcome: str
    seconds: float


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Returns a table as the scripts of this folder write it to their JSON files, under `tables`."""
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}


def save(path: Path, tables: Sequence[dict[str, Any]], **figures: Any) -> None:
    """Writes the file of a part. Called after each measurement, so that a part cut short leaves the earlier ones."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"tables": list(tables), **figures}, indent=1) + "\n")
    partial.replace(path)


def write(folder: Path, call: str, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> Path:
    """Writes `<call>.json` and `<call>.md` from the files of the parts in `folder/call`; returns the latter's path."""
    figures: dict[str, Any] = {}
    for path in sorted((folder / call).glob("*.json")):
        try:
            figures[path.stem] = json.loads(path.read_text())
        except ValueError as error:  # the part was ended while it wrote
            figures[path.stem] = {"unreadable": str(error)}
    report = {
        "machine": facts,
        "parts": [asdict(outcome) for outcome in outcomes],
        "figures": figures,
    }
    (folder / f"{call}.json").write_text(json.dumps(report, indent=1) + "\n")
    page = folder / f"{call}.md"
    page.write_text("\n".join(markdown(call, facts, outcomes, figures)) + "\n")
    return page


def markdown(
    call: str, facts: dict[str, Any], outcomes: Sequence[Outcome], figures: dict[str, Any]
) -> list[str]:
    """Returns the lines of the page."""
    lines = [
        f"# benchmarks/gpu.sh {call}",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        "",
    ]
    parts = [(one.part, one.outcome, f"{one.seconds:.0f}") for one in outcomes]
    lines += rendered(table("Parts", ("part", "outcome", "seconds"), parts))
    for outcome in outcomes:
        for found in tables_of(outcome.part, figures.get(outcome.part, {})):
            lines += rendered(found)
    return lines


def rendered(found: dict[str, Any]) -> list[str]:
    """Returns a table's lines."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in found["rows"]]
    marks = ["---", *("---:" for _ in found["columns"][1:])]
    return [
        f"## {found['title']}",
        "",
        *(f"| {' | '.join(row)} |" for row in [found["columns"], marks, *rows]),
        "",
    ]


def tables_of(part: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tables of a part, of which those of `shardzoo bench` and benchmarks/generate.py are made here."""
    if "tables" in found:
        return found["tables"]
    results = found.get("results", [])
    if results and "op" in results[0]:
        return [kernel_table(part, results)]
    return [decoding_table(results)] if results else []


def kernel_table(part: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns times of forward and backward, how many times faster than others, and the share of a copy's bandwidth."""
    columns = [
        "operator",
        "shape",
        "kernels",
        "ms",
        "GB/s of a copy",
        "forward",
        "backward",
        "faster than",
    ]
    rows = []
    for result in results:
        cells = [result["op"], " × ".join(map(str, result["shape"])), result["variant"]]
        if result["error"]:
            rows.append([*cells, result["error"], *[""] * 4])
            continue
        moved = result["bandwidth"]
        shares = [
            f"{moved[name]['of copy']:.0%}" for name in ("ours forward out", "ours backward out")
        ]
        ratios = {
            name: ratio
            for name, ratio in result["ours_is_faster"].items()
            if ratio and name != "ours"
        }
        others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        absent = ", ".join(f"{name} did not run" for name in result["missing"])
        speed = [f"{result['timings']['ours']['median']:.3f}", f"{moved['copy']['GB/s']:,.0f}"]
        rows.append([*cells, *speed, *shares, ", ".join(filter(None, (others, absent)))])
    return table(f"{part}: {results[0]['dtype']}", columns, rows)


def decoding_table(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns tokens per second of each side."""
    columns = ("model", "type", "batch", "side", "tokens/s", "ms a step", "ms of the first token")
    rows = []
    for result in results:
        cells = [result["model"], result["dtype"], result["batch"]]
        if "error" in result:
            rows.append([*cells, result["error"], *[""] * 3])
            continue
        for side, rate in result["tokens_per_second"].items():
            step, first = result["step_ms"][side], result["first_token_ms"][side]
            rows.append([*cells, side, f"{rate:,.0f}", f"{step:.2f}", f"{first:.1f}"])
    return table("Decoding", columns, rows)
