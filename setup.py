"""Build script. The checkout is the package: `mpu/` here is `shardzoo.mpu`. Metadata lives in pyproject.toml."""

from setuptools import find_packages, setup

PARTS = ("mpu", "models", "ops", "csrc", "data", "trainer", "convert", "generation", "cli")
SUBPACKAGES = find_packages(".", include=[pattern for part in PARTS for pattern in (part, f"{part}.*")])

setup(
    package_dir={"shardzoo": "."},
    packages=["shardzoo", *(f"shardzoo.{name}" for name in SUBPACKAGES)],
)
