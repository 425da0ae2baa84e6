"""Reads strict YAML: of bounded size, from regular files, without aliases or repeated keys."""

# (PyYAML leaves the types of its methods open)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import yaml

from .working_copies import find_source

LARGEST_YAML = 1 << 18  # bytes; reading so many takes seconds


class StrictLoader(yaml.SafeLoader):
    """Reads floating-point numbers as in YAML 1.2: 1e-4 is a number. In YAML 1.1, PyYAML's version,
    it is a string.

    A few lines of aliases of aliases would stand for billions of values, and settings need none:
    they are refused. So is what PyYAML itself lets pass with an error of another type, such as the
    date 2020-13-45.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("arguments have no aliases (*name); write the value again")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            raise yaml.YAMLError("a name appears twice in one place; keep one of its values")
        return found

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise yaml.YAMLError(
                f"{node.value!r:.100} is not a value of {node.tag!r:.100}: {error}"
            ) from None


StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def read_strict_yaml(path: Path, option: str) -> Any:
    """Returns what a YAML file holds; None for an empty one.

    Args:
        path: The file, or its URL.
        option: The option that names the file, for messages.

    Raises:
        ValueError: The file cannot be read, is too large or no regular file, or is no such YAML.
    """
    if "\0" in str(path):
        raise ValueError(f"{option}: {str(path)!r} is not the name of a file")
    try:
        local = find_source(path) or path
        found = local.stat()
        # A pipe would wait for a writer, and a device may have no end.
        if not stat.S_ISREG(found.st_mode):
            kind = "Is a directory" if stat.S_ISDIR(found.st_mode) else "it is not a regular file"
            raise ValueError(f"{option}: {path} cannot be read ({kind}); name a YAML file")
        if found.st_size > LARGEST_YAML:
            raise ValueError(
                f"{option}: {path} has more than {LARGEST_YAML:,} bytes; name a file of arguments"
            )
        return yaml.load(local.read_bytes(), StrictLoader)  # a SafeLoader
    except FileNotFoundError:
        raise ValueError(f"{option}: there is no file {path}") from None
    except OSError as error:
        raise ValueError(
            f"{option}: {path} cannot be read ({error.strerror}); name a YAML file"
        ) from None
    except RecursionError:
        raise ValueError(
            f"{option}: {path} is not YAML that can be read: it is nested too deeply"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: {path} is not YAML: {error}") from None
