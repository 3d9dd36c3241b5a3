"""Pushing to the Hub, against a stand-in for its endpoint on this machine."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECRET = "hf_NobodyMayEverSeeThisToken"


@pytest.fixture
def hub():
    """A server that answers what huggingface_hub asks for, and keeps the files that it is given.

    hub.down: it refuses all.
    """

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"name": "me", "type": "user", "orgs": []})

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.seen.append((self.path, self.headers.get("Authorization")))
            if self.path.endswith("/preupload/main"):
                about = {"uploadMode": "regular", "shouldIgnore": False}
                return self.answer(
                    {"files": [{"path": f["path"], **about} for f in json.loads(body)["files"]]}
                )
            if self.path.endswith("/commit/main"):
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                commit = {"commitUrl": server.url + "/me/x/commit/0", "commitOid": "0" * 40, "hookOutput": ""}
                return self.answer(commit)
            return self.answer({"url": server.url + "/me/x", "name": "me/x", "id": "me/x"})

        def answer(self, data):
            text = json.dumps({"error": "down"} if server.down else data).encode()
            self.send_response(401 if server.down else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.seen, server.files, server.down = [], {}, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def train(hub, place: Path, **settings) -> subprocess.CompletedProcess:
    settings |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(place / "hf"), "GDRIVE_PATH": str(place / "drive")}
    environ = {**os.environ, **settings, "TEST_MODE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, ROOT / "sapo.py"]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


@pytest.mark.parametrize("down", [False, True])
def test_the_model_is_pushed_if_asked_for_and_a_refusal_stops_nothing(hub, tmp_path, down):
    hub.down = down
    run = train(hub, tmp_path, HUGGINGFACE_ACCESS_TOKEN=SECRET, NODE_ID="a", EXPERIMENT_NAME="e")
    if down:
        assert "push failed, training goes on" in run.stdout and not hub.files
    else:
        assert "pushed to me/e-a" in run.stdout, run.stdout[-2000:]
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.files)
        assert all(token == f"Bearer {SECRET}" for _, token in hub.seen)
    files = [path.read_bytes() for path in (tmp_path / "drive").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in [run.stdout.encode(), run.stderr.encode(), *files])


def test_nodes_that_share_a_repository_name_push_to_one_each(hub, tmp_path):
    settings = {"HUGGINGFACE_ACCESS_TOKEN": SECRET, "LOCAL_NODES": "2", "NODE_ID": "a", "HF_REPO": "me/mine"}
    run = train(hub, tmp_path, **settings)
    assert "pushed to me/mine-a_0" in run.stdout and "pushed to me/mine-a_1" in run.stdout


def test_nothing_is_pushed_unless_a_token_is_set(hub, tmp_path):
    train(hub, tmp_path)
    assert not hub.seen
