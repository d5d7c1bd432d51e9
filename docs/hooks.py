"""Hooks of the documentation's build: pages outside of docs/ become pages of the site.

Links in Markdown are written for the checkout. Here a link that leaves docs/ is pointed to a copy below
``repository/``: of the file if it is Markdown or a picture, of the README if it is a folder. Pages that are
reached from there are copied as well. A link to any other file becomes its name as code.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
COPIES = "repository"
SHOWN = (".md", ".png", ".svg", ".csv", ".jsonl", ".json", ".txt")
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Show version and licence below every page, and the repository if this clone has a public one."""
    version = re.search(
        r'^__version__ = "(.+)"', (ROOT / "harness/util/__init__.py").read_text(), re.MULTILINE
    )
    assert version is not None
    config.copyright = f"Harness {version[1]}, MIT licence"
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    origin = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if re.fullmatch(r"https://[\w./-]+", origin):
        config.copyright += f' · <a href="{origin.removesuffix(".git")}">repository</a>'
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of docs/ that pages link to, and those that they link to."""
    todo = [(f"docs/{file.src_uri}", text_of(file)) for file in files.documentation_pages()]
    for path in sorted(re.findall(rf"{COPIES}/([\w./]+\.md)", str(config.nav))):
        files.append(copy_of(path, config))
        todo.append((path, (ROOT / path).read_text()))
    while todo:
        source, text = todo.pop()
        for _, _, target, _ in LINK.findall(CODE.sub("", text)):
            path = repository_path(source, target)
            if path is None or files.get_file_from_path(f"{COPIES}/{path}") is not None:
                continue
            files.append(copy_of(path, config))
            if path.endswith(".md"):
                todo.append((path, (ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point the links of a page to the copies."""
    here = page.file.src_uri
    source = here.removeprefix(f"{COPIES}/") if here.startswith(f"{COPIES}/") else f"docs/{here}"

    def rewritten(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        path = repository_path(source, target)
        if path is not None:
            place = f"{COPIES}/{path}"
        elif is_local(target) and inside_docs(source, target) is not None:
            place = str(inside_docs(source, target))
        elif is_local(target) and resolved(source, target) is not None:
            return f"`{resolved(source, target)}`"
        else:
            return match[0]
        return f"{mark}[{text}]({posixpath.relpath(place, posixpath.dirname(here))}{anchor or ''})"

    parts = CODE.split(markdown)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(rewritten, part) for part in parts)


def copy_of(path: str, config: Any) -> File:
    """A file of the repository as a file of the site."""
    return File.generated(config, f"{COPIES}/{path}", abs_src_path=str(ROOT / path))


def text_of(file: Any) -> str:
    return Path(file.abs_src_path).read_text()


def is_local(target: str) -> bool:
    return bool(target) and "://" not in target and not target.startswith(("mailto:", "/"))


def resolved(source: str, target: str) -> str | None:
    """The path in the repository that a link of a file means; None if there is nothing."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return None if path.startswith("..") or not (ROOT / path).exists() else path


def inside_docs(source: str, target: str) -> str | None:
    """The path below docs/ that a link means; None if it means something else."""
    path = resolved(source, target)
    return path.removeprefix("docs/") if path is not None and path.startswith("docs/") else None


def repository_path(source: str, target: str) -> str | None:
    """The file outside of docs/ that a link means and that the site shows; None if there is none."""
    path = resolved(source, target) if is_local(target) else None
    if path is None or path.startswith("docs/"):
        return None
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return path if path.endswith(SHOWN) and (ROOT / path).is_file() else None


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Refuse a page that fetches something when it is read."""
    fetched = re.search(
        r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="?https?://[^"> ]*', output
    )
    if fetched is not None:
        raise PluginError(f"{page.file.src_uri} needs the network: {fetched[0]}")
    return output
