"""Components in files beside an experiment: ``my_conf/spikes.py:Spikes`` is a class that needs no package.

Use it through the ``Registry`` of the field. A job records where the file is and a digest of its
content, ``/home/me/my_conf/spikes.py@1f2e3d4c5b6a:Spikes``: another content is another job, and
ranks and resumed runs refuse a file that has changed. A copy of the code for SLURM jobs has copies
of the files, by digest.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.util import PACKAGE
from harness.util.errors import MissingPackageError
from harness.util.files import require_regular

COPIES = "components"
"""Folder of the files' copies, beside the package in a copy of the code."""
WORKS = "FILE.py:NAME, the path of a Python file and a name in it"
_TEXT = re.compile(r"(?P<path>.+\.py)(?:@(?P<digest>[0-9a-f]{12}))?:(?P<name>[A-Za-z_]\w*)")
# The folder of a recorded file, in JSON.
_FOLDER = re.compile(r'(?<=")[^"]*/(?=[^"/]+\.py@[0-9a-f]{12}:)')
_BY_OTHERS = 0o022  # bits of a mode: written by the group, or by all


@dataclass(frozen=True)
class Component:
    """A name in a Python file, as the value of a field.

    Attributes:
        field: the field.
        text: its value.
        path: the file.
        digest: the recorded one of its content; empty before.
        name: a name in the file.
    """

    field: str
    text: str
    path: Path
    digest: str
    name: str

    @classmethod
    def of(cls, field: str, value: object) -> Component | None:
        """Return the component that a value names; None if it names no file."""
        match = _TEXT.fullmatch(str(value))
        if match is None:
            return None
        path = Path(match["path"]).expanduser().absolute()
        return cls(field, match[0], path, match["digest"] or "", match["name"])

    def recorded(self) -> str:
        """Return the value that a job records.

        Raises:
            MissingPackageError: the file cannot be used.
        """
        return f"{self.path}@{self.digest or digest_of(self.read())}:{self.name}"

    def read(self) -> bytes:
        """Return the content of the file or of its copy; refuse what somebody else can have written."""
        copy = PACKAGE.parent / COPIES / f"{self.digest}.py"
        path = copy if copy.is_file() else self.path
        try:
            require_regular(path)
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                content = file.read()
        except OSError as error:
            raise self.refusal(f"{path} cannot be read: {error.strerror}", WORKS) from None
        if facts.st_uid not in (0, os.getuid()):
            raise self.refusal("is another user's, and would run as you", "a copy of your own")
        if facts.st_mode & _BY_OTHERS:
            raise self.refusal("others can write it, and it would run as you", f"chmod go-w {path}")
        if self.digest not in ("", digest_of(content)):
            raise self.refusal(
                f"the file has changed since the job was made, to @{digest_of(content)}",
                f"the file as it was, or {self.path}:{self.name}, which makes another job",
            )
        return content

    def load(self) -> Any:
        """Import the file, once in a process, and return what it has under the name."""
        content = self.read()
        name = f"harness_component_{digest_of(content)}"
        if name not in sys.modules:
            self._import(content, name)
        names = vars(sys.modules[name])
        if self.name not in names:
            close = difflib.get_close_matches(self.name, names)
            raise self.refusal(f"the file has no {self.name}", close)
        return names[self.name]

    def _import(self, content: bytes, name: str) -> None:
        """Make a module of the content; refuse one that imports from the folder of its file."""
        module = ModuleType(name)
        module.__file__ = str(self.path)
        sys.modules[name] = module
        known = set(sys.modules)
        try:
            # Not by a loader: the file may have changed since it was read.
            exec(compile(content, self.path, "exec", dont_inherit=True), vars(module))
        except (Exception, SystemExit) as error:  # a file may raise anything
            del sys.modules[name]
            raise self.refusal(
                f"the file cannot be imported: {type(error).__name__}: {error}"
            ) from error
        neighbours = []
        for imported in sys.modules.keys() - known:
            file = getattr(sys.modules[imported], "__file__", None) or ""
            if Path(file).parent == self.path.parent:
                neighbours.append(imported)
        if neighbours:
            # All are forgotten, so that the next attempt meets them again.
            for imported in (name, *neighbours):
                del sys.modules[imported]
            rule = f"imports {neighbours[0]} from its folder, not covered by the digest"
            raise self.refusal(rule, "one file, or an installed package")

    def refusal(self, rule: str, works: str | list[str] = "") -> MissingPackageError:
        return MissingPackageError(self.field, self.text, rule, works)


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def without_folders(value: Any) -> str:
    """Return a value as JSON, for ids and comparisons: a file is the same in every folder."""
    return _FOLDER.sub("", json.dumps(value, sort_keys=True))
