"""The build backend: setuptools, which gets torch where there is something to compile against it.

Without this, an isolated build would have no torch, or one that only packs the sources would
download it. Which torch it is does not matter: the kernel library works with each one from 2.11 on.
"""

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

import build

TORCH = "torch>=2.11"


def get_requires_for_build_wheel(config_settings=None):
    return [*build_meta.get_requires_for_build_wheel(config_settings), *require_torch()]


def get_requires_for_build_editable(config_settings=None):
    return [*build_meta.get_requires_for_build_editable(config_settings), *require_torch()]


def require_torch() -> list[str]:
    """Returns torch if the kernels will be compiled."""
    if not build.extensions():
        return []
    try:
        build.find_compiler()
    except build.CannotBuild:
        return []
    return [TORCH]
