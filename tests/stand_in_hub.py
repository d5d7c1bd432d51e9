"""A local hub with the few endpoints that huggingface_hub uses."""

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789" * 4


@dataclass
class Hub:
    """Content of the hub, and the requests it received."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Content of files by repository and name."""
    gated: set[str] = field(default_factory=set)
    """Repositories whose files nobody may read."""
    sent: list[str] = field(default_factory=list)
    """Files whose content was requested."""
    silent: bool = False
    """Whether the hub no longer answers after the listing of a repository."""
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        path = self.path.split("?")[0].removeprefix("/api/models").removeprefix("/")
        repo = "/".join(path.split("/")[:2])
        rest = path.removeprefix(repo).removeprefix("/")
        files = self.hub.repos.get(repo)
        if files is None:
            self.refuse(401, "RepoNotFound", "Invalid username or password.")
        elif "v9" in rest:
            self.refuse(404, "RevisionNotFound", "Invalid rev id: v9")
        elif rest.startswith("revision/"):
            siblings = [
                {"rfilename": name, "size": len(content), "blobId": blob_of(content)}
                for name, content in files.items()
            ]
            self.answer({"_id": "1", "id": repo, "sha": COMMIT, "siblings": siblings})
        elif self.hub.silent:
            self.refuse(400, "", "Bad request")
        elif rest.startswith("tree/"):
            self.answer(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": blob_of(content)}
                    for name, content in files.items()
                ]
            )
        elif repo in self.hub.gated:
            self.refuse(403, "GatedRepo", f"Access to model {repo} is restricted")
        else:
            self.send_content(rest.split("/", 2)[2], files)

    do_HEAD = do_GET

    def send_content(self, name, files):
        if self.command == "GET":
            self.hub.sent.append(name)
        self.reply(200, files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{blob_of(files[name])}"'})

    def answer(self, content):
        self.reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def refuse(self, status, code, message):
        self.reply(status, b"{}", {"X-Error-Message": message, "X-Error-Code": code})

    def reply(self, status, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def blob_of(content):
    """Git's hash of a file (git-scm.com/book, "Git Objects")."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serving():
    """Serve a hub on a free port."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
