"""A pytest plugin, `-p emulated`: the ops use the library at SHARDZOO_EMULATED in place of the installed one."""

import os
from pathlib import Path

from shardzoo.ops import library

library.COMPILED = Path(os.environ["SHARDZOO_EMULATED"])
