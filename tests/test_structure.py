"""The structure that docs/architecture.md describes, read from the package's own imports.

Imports inside functions and those for type checking alone count like any other.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A room imports rooms of lower floors, and beside it only those that BESIDE names.
FLOORS = {
    "cli": 7, "pretrain": 7, "finetune": 7, "pretraining": 6, "finetuning": 6, "plan": 6, "evaluation": 6, "trainer": 5,
    "convert": 4, "generation": 4, "models": 3, "checkpoint": 2, "mpu": 2, "ops": 1, "data": 1, "csrc": 0,
}  # fmt: skip
BESIDE = {("checkpoint", "mpu"), ("pretrain", "cli"), ("finetune", "cli")}
# trainer/ stands above convert/, of which it may use the merge for an export, and knows nothing of decoding.
APART = {("trainer", "generation"), ("pretraining", "finetuning"), ("finetuning", "pretraining")}
MOST_FILES_OF_A_ROOM = 15
MOST_SINGLE_IMPORTERS = 30
MOST_LINES = 52_520
LONGEST_USUAL_FUNCTION, LONGEST_FUNCTION, MOST_LONG_FUNCTIONS = 27, 60, 2
MOST_LINES_OF_A_MODEL = 200
MOST_TYPE_IGNORES = 19
MOST_REPEATED_LINES = 20
FACE = "__init__.py"


@cache
def sources() -> dict[Path, ast.Module]:
    """The package's files, relative to its root."""
    paths = [*(path for room in FLOORS for path in (ROOT / room).rglob("*.py")), *ROOT.glob("*.py")]
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for path in sorted(paths)
        if path.name not in ("setup.py",) and path.relative_to(ROOT).as_posix() != "csrc/build.py"
    }


@cache
def modules() -> dict[tuple[str, ...], Path]:
    return {path.parent.parts if path.name == FACE else path.with_suffix("").parts: path for path in sources()}


def imported(path: Path) -> Iterator[Path]:
    """The package's files that one file imports, itself left out."""
    for node in ast.walk(sources()[path]):
        if isinstance(node, ast.ImportFrom):
            name = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                base = (*path.parent.parts[: len(path.parent.parts) - node.level + 1], *name)
            elif name[:1] == ("shardzoo",):
                base = name[1:]
            else:
                continue
            for alias in node.names:
                found = modules().get((*base, alias.name)) or modules().get(base)
                if found is not None and found != path:
                    yield found


def importers() -> dict[Path, set[Path]]:
    """Who imports each module; what a room's face exports is not an importer's use."""
    found = defaultdict(set)
    for path in sources():
        for target in imported(path) if path.name != FACE else ():
            found[target].add(path)
    return found


def room(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else path.stem


def test_imports_run_downwards():
    wrong = []
    for path in sources():
        if path == Path(FACE):  # the package's own face shows what lies on several floors
            continue
        for target in imported(path):
            mine, theirs = room(path), room(target)
            if mine == theirs or target == Path(FACE):
                continue
            is_below = FLOORS[theirs] < FLOORS[mine] or (mine, theirs) in BESIDE
            if not is_below or (mine, theirs) in APART:
                wrong.append(f"{path} imports {target}")
    assert not wrong


def test_no_files_import_one_another_in_a_circle():
    graph = {path: {t for t in imported(path) if t.name != FACE} for path in sources() if path.name != FACE}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(map(str, error.args[1])))


def test_rooms_stay_small():
    files = defaultdict(list)
    for path in sources():
        if path.name != FACE:
            files[path.parent].append(path.name)
    large = {str(folder): len(names) for folder, names in files.items() if len(names) > MOST_FILES_OF_A_ROOM}
    assert not large, "give these rooms inner rooms"


def test_a_module_stands_alone_for_a_reason():
    """Most modules have several importers; too many with one are pieces of that one."""
    single = sorted(
        str(path) for path, users in importers().items()
        if len(users) == 1 and path.name != FACE and path.parts[0] != "models"
    )  # fmt: skip
    assert len(single) <= MOST_SINGLE_IMPORTERS, single


def test_families_are_named_in_models_alone():
    """A file of an objective or a vocabulary may have the name of the family that it was published with."""
    families = {path.name for path in (ROOT / "models").iterdir() if (path / FACE).exists()} - {"common"}
    assert {"gpt2", "bert", "t5"} <= families
    published = {Path("data/objectives"), Path("data/tokenizers")}
    named = []
    for path, tree in sources().items():
        own = families & set(path.stem.split("_"))
        if path.parts[0] == "models" or (own and path.parent in published):
            continue
        named += [f"{path}: its own name" for _ in own]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() in families:
                named.append(f"{path}:{node.lineno}: {node.value!r}")
            if isinstance(node, ast.ImportFrom) and "models" in (parts := (node.module or "").split(".")):
                named += [f"{path}:{node.lineno}: imports from {node.module}" for _ in families & set(parts)]
    assert not named


def test_a_familys_model_is_read_on_one_sitting():
    lengths = {
        path: len((ROOT / path).read_text().splitlines()) for path in sources() if path.match("models/*/model.py")
    }
    assert len(lengths) > 5
    assert not [path for path, length in lengths.items() if length > MOST_LINES_OF_A_MODEL]


def test_functions_stay_short():
    lengths = sorted(
        (node.end_lineno - node.lineno + 1, f"{path}:{node.name}")
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None
    )
    long = [entry for entry in lengths if entry[0] > LONGEST_FUNCTION]
    assert len(long) <= MOST_LONG_FUNCTIONS, long
    assert lengths[int(0.95 * len(lengths))][0] <= LONGEST_USUAL_FUNCTION


def test_the_package_stays_small():
    assert sum(len((ROOT / path).read_text().splitlines()) for path in sources()) <= MOST_LINES


def test_few_errors_of_the_type_checker_are_silenced():
    silenced = [
        f"{path}:{token.start[0]}"
        for path in sources()
        for token in tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline)
        if token.type == tokenize.COMMENT and ("type: ignore" in token.string or "pyright: ignore" in token.string)
    ]
    assert len(silenced) <= MOST_TYPE_IGNORES, silenced


def code_lines(path: Path) -> list[tuple[int, str]]:
    """Lines that say something: no imports, comments, docstrings or lone brackets."""
    silent = set()
    for node in ast.walk(sources()[path]):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_text:
            silent |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate((ROOT / path).read_text().splitlines(), 1)
    return [
        (n, t.strip()) for n, t in lines if n not in silent and len(t.strip()) > 3 and not t.strip().startswith("#")
    ]


def test_no_two_places_repeat_one_another():
    seen: dict[tuple[str, ...], str] = {}
    repeated = []
    for path in sources():
        lines = code_lines(path)
        for start in range(len(lines) - MOST_REPEATED_LINES):
            window = tuple(text for _, text in lines[start : start + MOST_REPEATED_LINES + 1])
            where = f"{path}:{lines[start][0]}"
            if window in seen:
                repeated.append(f"{where} repeats {seen[window]}")
            seen.setdefault(window, where)
    assert not repeated
