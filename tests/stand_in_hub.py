"""A local hub with the few endpoints that huggingface_hub uses, and configurable failures."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = 1 << 20  # bytes; from this size on, files are identified by SHA-256, as in LFS


@dataclass
class Hub:
    """Content of the hub, and the requests it received.

    Attributes:
        repos: content of files by repository, revision and name.
        gated: repositories that only ``members`` may read.
        members: tokens with access.
        tokens: valid tokens.
        sent: files whose content was requested.
        is_listed: whether the tree of a commit can be listed; otherwise the answer is HTTP 400.
        mishap: may act instead of sending the content of a file: takes the handler and the content, and
            returns whether it did.
    """

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)
    is_listed: bool = True
    mishap: Callable[[Any, bytes], bool] = lambda handler, content: False
    url: str = ""


def commit_of(files: dict[str, bytes]) -> str:
    """Hash of a commit, computed from its files."""
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name])
    return digest.hexdigest()


def sibling(name: str, content: bytes) -> dict[str, Any]:
    """A file's entry in the listing of a repository."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    facts: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
    if len(content) >= LARGE:
        sha256 = hashlib.sha256(content).hexdigest()
        facts["blobId"] = hashlib.sha1(sha256.encode()).hexdigest()  # of the pointer
        facts["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
    return facts


def etag(name: str, content: bytes) -> str:
    """Header of a file: SHA-256 of a large one, git's hash of others."""
    facts = sibling(name, content)
    return f'"{facts["lfs"]["sha256"] if "lfs" in facts else facts["blobId"]}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        path = self.path.split("?")[0]
        if token and token not in self.hub.tokens | self.hub.members:
            self.refuse(401, None, "Invalid credentials in Authorization header")
        elif "/tree/" in path:
            repo, _, revision = path.removeprefix("/api/models/").partition("/tree/")
            self.list_tree(repo, revision, token)
        elif path.startswith("/api/models/"):
            repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self.list_files(repo, revision or "main", token)
        else:
            repo, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            self.send_file(repo, revision, name, token)

    do_HEAD = do_GET

    def find(self, repo: str, revision: str, token: str) -> dict[str, bytes] | None:
        known = self.hub.repos.get(repo)
        if known is None:
            # Without access, the hub does not reveal whether a repository exists.
            self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        by_commit = {commit_of(files): files for files in known.values()}
        files = known.get(revision) or by_commit.get(revision)
        if files is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return files

    def list_files(self, repo: str, revision: str, token: str) -> None:
        files = self.find(repo, revision, token)
        if files is None:
            return
        siblings = [sibling(name, content) for name, content in files.items()]
        found = {"_id": "1", "id": repo, "modelId": repo, "sha": commit_of(files), "siblings": siblings}
        found |= {"private": False, "gated": "manual" if repo in self.hub.gated else False}
        found |= {"downloads": 0, "likes": 0, "tags": []}
        self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def list_tree(self, repo: str, revision: str, token: str) -> None:
        if not self.hub.is_listed:
            self.refuse(400, None, "Bad request")
            return
        files = self.find(repo, revision, token)
        if files is None:
            return
        found = []
        for name, content in files.items():
            facts = sibling(name, content)
            entry = {"type": "file", "path": name, "size": facts["size"], "oid": facts["blobId"]}
            if "lfs" in facts:
                entry["lfs"] = {"oid": facts["lfs"]["sha256"], "size": facts["size"], "pointerSize": 134}
            found.append(entry)
        self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def send_file(self, repo: str, revision: str, name: str, token: str) -> None:
        files = self.find(repo, revision, token)
        if files is None:
            return
        if repo in self.hub.gated and token not in self.hub.members:
            message = f"Access to model {repo} is restricted"
            self.refuse(403 if token else 401, "GatedRepo", message)
            return
        if name not in files:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        content = files[name]
        if self.command == "GET":
            self.hub.sent.append(name)
        headers = {"X-Repo-Commit": commit_of(files), "ETag": etag(name, content)}
        self.answer(200, content, headers, mishaps=True)

    def refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, json.dumps({"error": message}).encode(), headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str], mishaps: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and not (mishaps and self.hub.mishap(self, body)):
            self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub on a free port."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
