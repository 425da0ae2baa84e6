"""Build script. The checkout is the package:

`mpu/` here is `shardzoo.mpu`. Metadata lives in pyproject.toml.
"""

import importlib.util
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PARTS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))
SUBPACKAGES = find_packages(
    ".", include=[pattern for part in PARTS for pattern in (part, f"{part}.*")]
)
DATA = ("recipes", "recipes.tasks", "cli.board.page")  # folders without a module


class BuildPackage(build_py):
    """Keeps this script, which lies in the root package's folder, out of the wheel."""

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] != ("shardzoo", "setup")]


def load_build():
    """Loads csrc/build.py, which is no part of the package."""
    path = Path(__file__).parent / "csrc" / "build.py"
    spec = importlib.util.spec_from_file_location("shardzoo_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()

setup(
    package_dir={"shardzoo": "."},
    packages=["shardzoo", *(f"shardzoo.{name}" for name in (*SUBPACKAGES, *DATA))],
    package_data={
        **{f"shardzoo.{name}": ["*"] for name in DATA},
        "shardzoo.data": ["_index.pyi"],
        "shardzoo.mpu": ["_shared_memory.pyi"],
    },
    cmdclass={"build_py": BuildPackage, "build_ext": build.BuildCompiled},
    ext_modules=build.extensions(),
)
