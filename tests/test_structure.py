"""The structure that docs/architecture.md describes, read from the package's own files.

Two things are guarded, because a reader relies on them: imports run downwards, and they make no circle. Every kind of
import counts: those inside functions, those for type checking alone, those that an `__init__.py` makes on behalf of its
package, and those that are made at run time from a string. Nothing here limits how long a file or a function is.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACE = "__init__.py"
# A room imports rooms of lower floors, and beside it only those that BESIDE names.
FLOORS = {
    "cli": 7, "pretrain": 7, "finetune": 7,
    "compat": 6, "pretraining": 6, "finetuning": 6, "plan": 6, "evaluation": 6,
    "trainer": 5,
    "convert": 4, "generation": 4,
    "models": 3,
    "checkpoint": 2, "mpu": 2,
    "ops": 1, "data": 1,
    "files": 0, "csrc": 0,
}  # fmt: skip
BESIDE = {("checkpoint", "mpu"), ("pretrain", "cli"), ("finetune", "cli"), ("compat", "finetuning")}
# The trainer stands above convert/, whose merge it uses for an export, and knows nothing of decoding.
APART = {("trainer", "generation")}
# Attributes that make a module's or a model's behavior: assigning one to a live object hides code from a reader.
METHODS = {
    "forward", "embed", "encode", "decode", "generate", "run_encoder", "backward", "save_pretrained", "push_to_hub",
}  # fmt: skip


class Package:
    """The modules of a package, and what each of them imports.

    Args:
        sources: The text of each file, by its path relative to the package's root.
    """

    def __init__(self, sources: dict[Path, str]) -> None:
        self.trees = {path: ast.parse(text) for path, text in sorted(sources.items())}
        self.nodes = {path: list(ast.walk(tree)) for path, tree in self.trees.items()}
        self.modules = {
            path.parent.parts if path.name == FACE else path.with_suffix("").parts: path
            for path in self.trees
        }
        self.imports = {path: list(self._imported(path)) for path in self.trees}

    @classmethod
    def from_checkout(cls) -> Package:
        """Reads shardzoo's own files."""
        paths = [path for room in FLOORS for path in (ROOT / room).rglob("*.py")]
        paths += ROOT.glob("*.py")
        build_scripts = {Path("setup.py"), Path("csrc/build.py"), Path("csrc/backend.py")}
        relative = {path.relative_to(ROOT): path for path in paths}
        return cls(
            {name: path.read_text() for name, path in relative.items() if name not in build_scripts}
        )

    def _imported(self, path: Path) -> Iterator[tuple[Path, int]]:
        """Yields each file of the package that one file names in an import, with the line of the import."""
        for node in self.nodes[path]:
            if isinstance(node, ast.ImportFrom):
                base = self._base(path, node)
                if base is None:
                    continue
                for alias in node.names:
                    target = self.modules.get((*base, alias.name)) or self.modules.get(base)
                    if target is not None and target != path:
                        yield target, node.lineno
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    parts = tuple(alias.name.split("."))
                    if parts[0] == "shardzoo" and parts[1:] in self.modules:
                        yield self.modules[parts[1:]], node.lineno

    def _base(self, path: Path, node: ast.ImportFrom) -> tuple[str, ...] | None:
        """Returns the module that `from … import` names, as its path in the package; None for another package's."""
        name = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            depth = len(path.parent.parts) - node.level + 1
            return (*path.parent.parts[:depth], *name)
        if name[:1] == ("shardzoo",):
            return name[1:]
        return None

    def executed(self, path: Path) -> set[Path]:
        """Returns the files that importing one file runs first: those it names, and the faces above each of them.

        The faces of its own packages are already running when a module is imported, so only naming one counts.
        """
        found: set[Path] = set()
        for target, _ in self.imports[path]:
            found.add(target)
            for folder in target.parents:
                face = folder / FACE
                if face in self.trees and folder not in path.parents:
                    found.add(face)
        return found - {path, Path(FACE)}

    def circle(self) -> list[Path] | None:
        """Returns files that import one another in a circle, or None."""
        return find_circle({path: self.executed(path) for path in self.trees if path != Path(FACE)})

    def circle_of_rooms(self, folder: Path) -> list[str] | None:
        """Returns the parts of a folder, inner rooms and single files, that import one another in a circle."""
        graph: dict[str, set[str]] = defaultdict(set)
        for path in self.trees:
            part = self._part(path, folder)
            for target, _ in self.imports[path] if part else ():
                other = self._part(target, folder)
                if other and other != part:
                    graph[part].add(other)
        return find_circle(graph)

    def _part(self, path: Path, folder: Path) -> str:
        if folder not in path.parents or path == folder / FACE:
            return ""
        return path.relative_to(folder).parts[0]

    def folders(self) -> list[Path]:
        """Returns the packages inside the package."""
        return sorted(
            {path.parent for path in self.trees if path.name == FACE and path != Path(FACE)}
        )

    def upward_imports(self) -> list[str]:
        """Returns the imports that do not run downwards over the floors."""
        wrong = []
        for path in self.trees:
            if path == Path(FACE):  # The package's own face shows what lies on several floors.
                continue
            for target, line in self.imports[path]:
                mine, theirs = room(path), room(target)
                if mine == theirs or target == Path(FACE):
                    continue
                is_below = FLOORS[theirs] < FLOORS[mine] or (mine, theirs) in BESIDE
                if not is_below or (mine, theirs) in APART:
                    wrong.append(f"{path}:{line} imports {target}")
        return wrong

    def imports_from_strings(self) -> list[str]:
        """Returns the calls that import a module of the package, or one that cannot be read off, from a string.

        A face may import its own modules by name when they are first used (PEP 562): each string that it could import
        then names a module below that face, so no direction is hidden.
        """
        wrong = []
        for path, nodes in self.nodes.items():
            for node in nodes:
                if not isinstance(node, ast.Call):
                    continue
                if called_name(node) not in (
                    "import_module",
                    "__import__",
                    "spec_from_file_location",
                ):
                    continue
                first = node.args[0] if node.args else None
                is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
                if is_text and not first.value.startswith((".", "shardzoo")):
                    continue
                if path.name == FACE and self._names_its_own_modules(path, first):
                    continue
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
        return wrong

    def _names_its_own_modules(self, path: Path, argument: ast.expr | None) -> bool:
        """Returns whether a face's import names a module of its own, directly or by its table."""
        text = ast.unparse(argument) if argument is not None else ""
        if not text.startswith(("f'.{", "'.")) or text.startswith(("f'..", "'..")):
            return False
        tables = [
            node.value
            for node in self.trees[path].body
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) in ("_MODULES", "_NAMES")
        ]
        words = {
            node.value
            for table in tables
            for node in ast.walk(table)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        return not any(word.startswith((".", "shardzoo")) for word in words)

    def made_at_run_time(self) -> list[str]:
        """Returns where a class is made by `type()`, or a method is replaced on a live object."""
        wrong = []
        for path, nodes in self.nodes.items():
            for node in nodes:
                where = f"{path}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Call):
                    name = called_name(node)
                    if name == "type" and len(node.args) == 3:
                        wrong.append(f"{where}: a class is made by type()")
                    second = node.args[1] if name == "setattr" and len(node.args) > 1 else None
                    if isinstance(second, ast.Constant) and second.value in METHODS:
                        wrong.append(f"{where}: setattr replaces {second.value}")
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Attribute) and target.attr in METHODS:
                            wrong.append(f"{where}: {ast.unparse(target)} is replaced")
        return wrong

    def blocks_with_forward(self) -> list[str]:
        """Returns the blocks of stacks that override `forward` instead of `compute`."""
        wrong = []
        for path, nodes in self.nodes.items():
            if path.match("models/*/model.py"):
                blocks = [
                    node
                    for node in nodes
                    if isinstance(node, ast.ClassDef) and node.name.endswith("Block")
                ]
                wrong += [
                    f"{path}: {block.name}"
                    for block in blocks
                    for member in block.body
                    if isinstance(member, ast.FunctionDef) and member.name == "forward"
                ]
        return wrong

    def named_families(self, families: set[str]) -> list[str]:
        """Returns where files outside models/ name a model family.

        A file of an objective or a vocabulary may have the name of the family that it was published with.
        """
        published = {Path("data/objectives"), Path("data/tokenizers")}
        named = []
        for path, nodes in self.nodes.items():
            own = families & set(path.stem.split("_"))
            if path.parts[0] == "models" or (own and path.parent in published):
                continue
            named += [f"{path}: its own name" for _ in own]
            for node in nodes:
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and node.value.lower() in families
                ):
                    named.append(f"{path}:{node.lineno}: {node.value!r}")
                if isinstance(node, ast.ImportFrom) and "models" in (
                    parts := (node.module or "").split(".")
                ):
                    named += [
                        f"{path}:{node.lineno}: imports from {node.module}"
                        for _ in families & set(parts)
                    ]
        return named


def find_circle(graph: dict) -> list | None:
    """Returns the nodes of one circle of a graph, or None if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def called_name(call: ast.Call) -> str:
    """Returns the last part of the name of what is called, or an empty string."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def room(path: Path) -> str:
    """Returns the folder of the first level that a file lies in, or the file's own name."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def family_names() -> set[str]:
    """Returns the names of the folders in models/ that hold a family."""
    faces = (ROOT / "models").glob(f"*/{FACE}")
    folders = {face.parent.name for face in faces if "FAMILY = Family(" in face.read_text()}
    assert {"gpt2", "bert", "t5"} <= folders
    return folders


@pytest.fixture(scope="module")
def package() -> Package:
    return Package.from_checkout()


def test_imports_run_downwards(package):
    assert not package.upward_imports()


def test_no_files_import_one_another_in_a_circle(package):
    assert package.circle() is None


def test_inner_rooms_do_not_import_one_another_in_a_circle(package):
    circles = {str(folder): package.circle_of_rooms(folder) for folder in package.folders()}
    assert not {folder: circle for folder, circle in circles.items() if circle}


def test_no_module_of_ours_is_imported_from_a_string(package):
    assert not package.imports_from_strings()


def test_no_class_or_method_is_made_at_run_time(package):
    assert not package.made_at_run_time()


def test_blocks_can_be_compiled_without_their_hooks(package):
    assert not package.blocks_with_forward()


def test_families_are_named_in_models_alone(package):
    assert not package.named_families(family_names())


def planted(**files: str) -> Package:
    """Makes a package of the given files, whose names are written with `__` for `/`."""
    return Package({Path(name.replace("__", "/") + ".py"): text for name, text in files.items()})


def test_an_upward_import_is_found():
    inside_a_function = planted(
        models__a="def f():\n    from ..trainer.b import x", trainer__b="x = 1"
    )
    assert inside_a_function.upward_imports() == ["models/a.py:2 imports trainer/b.py"]
    absolute = planted(mpu__a="import shardzoo.cli.b", cli__b="")
    assert absolute.upward_imports() == ["mpu/a.py:1 imports cli/b.py"]


@pytest.mark.parametrize(
    "call",
    [
        'import_module("shardzoo.finetuning.recipe")',
        'importlib.import_module(".finetuning", "shardzoo")',
        'import_module(f"{PACKAGE}.{name}")',
        '__import__("shardzoo.trainer")',
    ],
)
def test_an_import_from_a_string_is_found(call):
    assert planted(trainer__a=call).imports_from_strings() == [
        f"trainer/a.py:1: {ast.unparse(ast.parse(call))}"
    ]
    assert not planted(trainer__a='import_module("wandb")').imports_from_strings()


def test_a_face_imports_only_its_own_modules_by_name():
    own = Path("trainer") / FACE
    body = '_MODULES = {"Trainer": "%s"}\ndef __getattr__(name): return import_module(f".{_MODULES[name]}", __name__)'
    assert not Package({own: body % "trainer"}).imports_from_strings()
    assert Package({own: body % "..finetuning"}).imports_from_strings()
    assert Package({own: body.replace('f".{', 'f"..{') % "trainer"}).imports_from_strings()


def test_a_circle_through_a_face_is_found():
    package = Package(
        {
            Path("ops") / FACE: "",
            Path("ops/library.py"): "def f():\n    from .kernels import table",
            Path("ops/kernels") / FACE: "from .attention import table",
            Path("ops/kernels/attention.py"): "from ..dropout import key",
            Path("ops/dropout.py"): "from .library import f",
        }
    )
    circle = package.circle()
    assert circle is not None
    assert Path("ops/kernels") / FACE in circle


def test_a_circle_of_inner_rooms_is_found():
    package = Package(
        {
            Path("trainer") / FACE: "",
            Path("trainer/arguments/a.py"): "from ..batches.b import x",
            Path("trainer/batches/b.py"): "",
            Path("trainer/batches/c.py"): "from ..arguments.d import y",
            Path("trainer/arguments/d.py"): "",
        }
    )
    assert package.circle() is None
    assert set(package.circle_of_rooms(Path("trainer"))) == {"arguments", "batches"}


def test_what_is_made_at_run_time_is_found():
    for line in (
        'type("T5Model", (Base,), {})',
        "model.forward = run",
        'setattr(model, "generate", run)',
    ):
        assert planted(models__a=line).made_at_run_time(), line
    assert not planted(models__a="type(model)\nself.forward_step = run").made_at_run_time()


def test_a_familys_name_is_found():
    for text in ('if model_type == "t5": pass', "from ..models.t5.config import T5Config"):
        assert planted(trainer__a=text).named_families({"t5"}), text
    assert planted(data__t5_reader="").named_families({"t5"})
    assert not planted(data__objectives__t5='"t5"', models__a='"t5"').named_families({"t5"})
