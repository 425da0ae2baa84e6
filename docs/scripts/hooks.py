"""Hooks of MkDocs: what the site has beside docs/*.md.

On the forge the pages link to files of the whole repository, such as `../recipes/gpt2.yaml`. The site gets copies of
those files, pages of the README of each folder, and the reference of the public modules, made from their docstrings.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
COPY = tempfile.TemporaryDirectory(
    prefix="shardzoo-docs-"
)  # of the package; deleted when the process ends
LINK = re.compile(r"(\]\(|src=\")([^)\"\s#:]+)(?=[)\"#])")
NAME = re.compile(r"\[([\w./-]+\.md)\]\(([^)\"\s#:]+)(?=[)#])")
TITLE = re.compile(r"^# ([^:\n]+)", re.MULTILINE)  # up to its colon
OUTSIDE = (
    "README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md",
    "tests/README.md",
)  # fmt: skip
RENAMED = {
    "README.md": "project.md"
}  # MkDocs makes a README the front page, which is docs/index.md


def named_like_their_modules(room: str) -> list[str]:
    """Functions that the modules of their own names hide in the package, so that they are named whole."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
    imports = [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.level == 1]
    return [
        f"shardzoo.{room}.{one.module}.{one.module}"
        for one in imports
        if one.module in {alias.name for alias in one.names}
    ]


API = {
    "shardzoo": ("shardzoo",),
    "mpu": ("shardzoo.mpu",),
    "trainer": ("shardzoo.trainer",),
    "models": ("shardzoo.models", "shardzoo.models.registry.family"),
    "convert": ("shardzoo.convert",),
    "generation": ("shardzoo.generation",),
    "ops": ("shardzoo.ops", *named_like_their_modules("ops")),
    "checkpoint": (
        "shardzoo.checkpoint.checkpoint",
        "shardzoo.checkpoint.manifest",
        "shardzoo.checkpoint.layout",
    ),
    "data": ("shardzoo.data",),
}


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lets mkdocstrings find the package, which has its name only where it is installed or copied."""
    package = Path(COPY.name, "shardzoo")
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    for source in [ROOT / "__init__.py", *(file for room in rooms for file in room.rglob("*.py"))]:
        copy = package / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(package.parent)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in OUTSIDE:
        files.append(File.generated(config, uri_of(path), abs_src_path=str(ROOT / path)))
    pages = [repository_path(file) for file in files.documentation_pages()]
    linked = {target for page in pages for target in targets(page, (ROOT / page).read_text())}
    for target in sorted(
        target for target in linked if not target.startswith("docs/") and target not in OUTSIDE
    ):
        inclusion = InclusionLevel.NOT_IN_NAV
        files.append(
            File.generated(config, target, abs_src_path=str(ROOT / target), inclusion=inclusion)
        )
    for name, shown in API.items():
        lines = [
            f"# `{'.'.join(dict.fromkeys(('shardzoo', name)))}`",
            *(f"::: {path}" for path in shown),
        ]
        files.append(File.generated(config, f"api/{name}.md", content="\n\n".join(lines)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links of the repository by links of the site."""
    own, folder = repository_path(page.file), posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        target = resolved(own, link[2])
        return (
            link[1] + posixpath.relpath(uri_of(target), folder)
            if (ROOT / target).is_file()
            else link[0]
        )

    def named(link: re.Match[str]) -> str:
        """Shows a page's title where the repository shows its file."""
        target = ROOT / resolved(own, link[2])
        title = TITLE.search(target.read_text(encoding="utf-8")) if target.is_file() else None
        return f"[{title[1]}]({link[2]}" if title else link[0]

    if page.file.src_uri.startswith("api/"):
        return markdown
    return LINK.sub(replaced, NAME.sub(named, markdown))


def targets(page: str, markdown: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    for link in LINK.finditer(markdown):
        if (ROOT / (target := resolved(page, link[2]))).is_file():
            yield target


def resolved(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def uri_of(path: str) -> str:
    """The site's name of a file of the repository."""
    return RENAMED.get(path, path.removeprefix("docs/"))


def repository_path(file: File) -> str:
    """The repository's name of a page of the site."""
    outside = {uri_of(path): path for path in OUTSIDE}
    return outside.get(file.src_uri, f"docs/{file.src_uri}")
