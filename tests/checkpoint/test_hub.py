"""Names on the Hugging Face Hub, against a server on this machine that speaks its protocol."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import user_environment, warm_environment
from local_server import AnsweringHandler
from tiny_models import save_model

from shardzoo.models import from_pretrained
from shardzoo.models.lora import add_lora, lora_config

MAIN, OLD = "1" * 40, "2" * 40
REVISIONS = {"main": MAIN, "v1": OLD, MAIN: MAIN, OLD: OLD}


class Hub(ThreadingHTTPServer):
    """Serves the files of one repository, me/tiny, in two revisions.

    Attributes:
        files: Commit -> name -> contents.
        cut: Names of files whose next answer stops in the middle.
        flipped: Names of files that are sent with another last byte than their sha256 says.
        ranges: The Range headers of requests for weights.
        sent: Names of the files that were sent.
        uploads: sha256 -> contents of large files that were uploaded.
        token: The one that may write; others are refused.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.ranges, self.sent = files, [], []
        self.cut, self.flipped = set(), set()
        self.uploads, self.token, self.made = {}, "hf_writer", []


class Handler(AnsweringHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        match = re.fullmatch(
            r"/(api/models/)?me/tiny/(revision|tree|resolve)/([^/]+)(?:/(.*))?", path
        )
        if match is None:
            return self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        if match[3] not in REVISIONS:
            return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        commit = REVISIONS[match[3]]
        files = self.server.files[commit]
        if match[2] == "resolve":
            return self.send_file(match[4], commit, files[match[4]])
        if match[2] == "revision":
            found = {
                "id": "me/tiny",
                "sha": commit,
                "siblings": [{"rfilename": name} for name in files],
            }
        else:
            found = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in files.items()
            ]
        return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """Receives a large file under its sha256."""
        data = self.rfile.read(int(self.headers["Content-Length"]))
        digest = hashlib.sha256(data).hexdigest()
        if not self.path.endswith(f"/upload/{digest}"):
            return self.answer(400)
        self.server.uploads[digest] = data
        return self.answer(200)

    def do_POST(self) -> None:
        """Makes repositories and branches, and commits files: small ones in the request, large ones as uploaded."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.answer(
                401, b'{"error": "Invalid credentials"}', Content_Type="application/json"
            )
        path, values = self.path.partition("?")[0], {}
        host = f"http://{self.headers['Host']}"
        if path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            values = {"url": f"{host}/me/tiny", "name": "me/tiny"}
        elif path.startswith("/api/models/me/tiny/preupload/"):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            values = {
                "files": [
                    {"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()
                ]
            }
        elif path == "/me/tiny.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{host}/upload/{entry['oid']}"}}
            values = {"transfer": "basic", "objects": objects}
        elif path.startswith("/api/models/me/tiny/commit/"):
            self.commit(
                REVISIONS[path.rpartition("/")[2]], [json.loads(line) for line in body.splitlines()]
            )
            values = {"commitUrl": f"{host}/me/tiny/commit/{MAIN}", "commitOid": MAIN}
        return self.answer(200, json.dumps(values).encode(), Content_Type="application/json")

    def commit(self, commit: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.server.files.get(commit, {}))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.server.files[commit] = files

    def send_file(self, name: str, commit: str, data: bytes) -> None:
        digest = (
            hashlib.sha256(data) if name.endswith((".safetensors", ".bin")) else hashlib.sha1(data)
        )
        size = len(data)
        if name in self.server.flipped:
            data = data[:-1] + bytes([data[-1] ^ 1])
        first, headers = (
            0,
            {"ETag": f'"{digest.hexdigest()}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"},
        )
        if self.command == "GET":
            self.server.sent.append(name)
            if asked := self.headers.get("Range"):
                self.server.ranges.append(asked)
                first = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content_Range"] = f"bytes {first}-{size - 1}/{size}"
            if name in self.server.cut:
                self.server.cut.remove(name)
                self.answer(
                    206 if first else 200,
                    data[first : size // 2],
                    Content_Length=str(size - first),
                    **headers,
                )
                self.close_connection = True
                return
        self.answer(206 if first else 200, data[first:], **headers)


@pytest.fixture
def hub(tmp_path):
    files = {}
    for commit, seed in ((MAIN, 1), (OLD, 2)):
        folder = save_model(tmp_path / f"source-{seed}", "GPT2LMHeadModel", "gpt2", seed=seed)
        files[commit] = {
            path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
        }
        files[commit] |= dict.fromkeys(
            ("pytorch_model.bin", "onnx/model.safetensors"), b"not wanted"
        )
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address(hub: Hub | None) -> str:
    """Of the server, or one that nothing listens at."""
    return f"http://127.0.0.1:{9 if hub is None else hub.server_address[1]}"


COMMAND = """
import sys
from shardzoo.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
# The client reads these variables when it is imported, which a warm process has done.
IMPORTED_AGAIN = """
import json, os, sys
for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE"))]:
    del os.environ[name]
os.environ |= json.loads(sys.argv.pop(1))
for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
    del sys.modules[name]
"""


def shardzoo(
    hub: Hub | None, folder: Path, *arguments: str, code: str = COMMAND, warm: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs a command, or code, with the server, or without a network. The cache is in `folder`."""
    theirs = [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE"))]
    own = {
        "HF_ENDPOINT": address(hub), "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    if warm:
        environment, words = (
            warm_environment(),
            ["python", "-c", IMPORTED_AGAIN + code, json.dumps(own)],
        )
    else:
        environment, words = (
            user_environment(**{**dict.fromkeys(theirs), **own}),
            ["python", "-c", code],
        )
    return subprocess.run(
        [*words, *arguments],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return lines[-1]


def test_a_model_is_downloaded_and_then_read_from_the_cache(hub, tmp_path):
    for name, seed in (("me/tiny", 1), ("me/tiny@v1", 2), (f"me/tiny@{MAIN}", 1)):
        compared = shardzoo(hub, tmp_path, "convert", "diff", name, f"source-{seed}")
        assert compared.returncode == 0, compared.stderr
        other = shardzoo(hub, tmp_path, "convert", "diff", name, f"source-{3 - seed}")
        assert other.returncode == 1
    assert set(hub.sent).isdisjoint({"pytorch_model.bin", "onnx/model.safetensors"})
    assert hub.sent.count("model.safetensors") == 2  # once for each revision
    without_network = shardzoo(None, tmp_path, "convert", "diff", "me/tiny", "source-1")
    assert without_network.returncode == 0, without_network.stderr


def test_a_cut_download_is_continued(hub, tmp_path):
    hub.files[MAIN]["extra.safetensors"] = bytes(24 << 20)  # the client writes 10 MiB at a time
    hub.cut.add("extra.safetensors")
    assert shardzoo(hub, tmp_path, "convert", "diff", "me/tiny", "source-1").returncode == 0
    assert not hub.cut
    assert hub.ranges == [f"bytes={10 << 20}-"]
    (stored,) = (tmp_path / "hub").glob("*/snapshots/*/extra.safetensors")
    assert stored.read_bytes() == bytes(24 << 20)


def test_a_damaged_file_is_removed(hub, tmp_path):
    hub.flipped.add("model.safetensors")
    message = refusal(shardzoo(hub, tmp_path, "convert", "split", "me/tiny", "shards"))
    good = hashlib.sha256(hub.files[MAIN]["model.safetensors"]).hexdigest()
    assert "damaged model.safetensors" in message
    assert good in message
    assert not (tmp_path / "shards").exists()
    hub.flipped.clear()
    assert shardzoo(hub, tmp_path, "convert", "split", "me/tiny", "shards").returncode == 0
    assert shardzoo(hub, tmp_path, "convert", "diff", "shards", "source-1").returncode == 0


FIND = """
import sys
from shardzoo.checkpoint.hub import find_folder
try:
    find_folder("me/tiny", "model")
except ValueError as error:
    sys.exit(str(error))
"""


@pytest.mark.before_release
def test_a_damaged_file_is_found_after_an_interrupted_call(hub, tmp_path):
    """The first call ends after the download of a damaged file, before it compares anything."""
    hub.flipped.add("model.safetensors")
    code = (
        f"import shardzoo.checkpoint.hub as h; h._check_downloads = lambda *_: sys.exit(9)\n{FIND}"
    )
    assert shardzoo(hub, tmp_path, code="import sys\n" + code).returncode == 9
    hub.flipped.clear()
    assert "damaged model.safetensors" in shardzoo(hub, tmp_path, code=FIND).stderr
    assert shardzoo(hub, tmp_path, code=FIND).returncode == 0
    # What was verified is not read again, until it changes.
    count = f"""
import shardzoo.checkpoint.hub as h
original = h.hash_file
h.hash_file = lambda path: print("hashed", path.name) or original(path)
{FIND}"""
    assert "hashed" not in shardzoo(hub, tmp_path, code=count).stdout
    (stored,) = (tmp_path / "hub").glob("*/snapshots/*/model.safetensors")
    os.utime(stored)
    assert shardzoo(hub, tmp_path, code=count).stdout.count("hashed") == 1


@pytest.mark.before_release
def test_blobs_that_repositories_share(hub, tmp_path):
    """The Hub's client may keep a blob as a link to a file that is named by another digest."""
    assert shardzoo(hub, tmp_path, code=FIND).returncode == 0
    (link,) = (tmp_path / "hub").glob("*/snapshots/*/model.safetensors")
    blob = link.parent / os.readlink(link)
    shared = tmp_path / "hub" / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    os.utime(shared)
    compared = shardzoo(hub, tmp_path, "convert", "diff", "me/tiny", "source-1")
    assert compared.returncode == 0, compared.stderr
    shared.write_bytes(shared.read_bytes()[:-1] + b"\1")
    assert "damaged" in refusal(shardzoo(hub, tmp_path, "convert", "inspect", "me/tiny"))
    assert not shared.exists()
    assert shardzoo(hub, tmp_path, "convert", "diff", "me/tiny", "source-1").returncode == 0


MISTAKES = [
    ("me/tiny@v2", "me/tiny has no revision 'v2'"),
    ("me/other", "there is no me/other, or it is private"),
]


@pytest.mark.parametrize(("name", "message"), MISTAKES)
def test_names_that_do_not_exist(hub, tmp_path, name, message):
    assert message in refusal(shardzoo(hub, tmp_path, "convert", "inspect", name))


def test_without_a_network(tmp_path):
    message = refusal(shardzoo(None, tmp_path, "convert", "inspect", "me/tiny"))
    assert "cannot reach http://127.0.0.1:9" in message


def test_weights_that_are_pickles_alone(hub, tmp_path):
    del hub.files[MAIN]["model.safetensors"]
    message = refusal(shardzoo(hub, tmp_path, "convert", "inspect", "me/tiny"))
    assert "no safetensors files" in message
    assert "hf download me/tiny" in message
    assert "pytorch_model.bin" not in hub.sent


@pytest.mark.before_release
def test_sizes_need_the_configuration_alone(hub, tmp_path):
    result = shardzoo(hub, tmp_path, "models", "me/tiny@v1", warm=False)
    assert result.returncode == 0, result.stderr
    assert "me/tiny@v1" in result.stdout
    assert hub.sent == ["config.json"]


def test_a_folder_goes_before_the_hub(hub, tmp_path):
    (tmp_path / "me").mkdir()
    assert "does not exist" in refusal(shardzoo(hub, tmp_path, "convert", "inspect", "me/tiny"))
    assert not hub.sent


GENERATE = """
import sys
from shardzoo.cli.main import main
sys.exit(any([main(["generate", "--max-new-tokens", "3", "--prompt", "the cat", "--model", name])
              for name in ("me/tiny@v1", "source-2", "source-1")]))
"""


def test_text_is_generated_with_a_name(hub, tmp_path):
    result = shardzoo(hub, tmp_path, code=GENERATE)
    assert result.returncode == 0, result.stderr
    by_name, by_folder, other = result.stdout.splitlines()
    assert by_name == by_folder != other


def push(mesh: Any, source: Path, endpoint: str, **options: Any) -> list[Any]:
    """Runs in new processes, whose client has been imported for another address."""
    from huggingface_hub import constants

    from shardzoo.models import from_pretrained

    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = endpoint, True
    try:
        return [from_pretrained(source, mesh).push_to_hub("me/tiny", **options), ""]
    except ValueError as error:
        return [None, str(error)]


def test_a_split_model_is_pushed_and_found_again(hub, tmp_path, run_mesh):
    hub.files[MAIN] |= {
        "model-00001-of-00002.safetensors": b"stale",
        "model.safetensors.index.json": b"{}",
        "model_ema.safetensors": b"not ours",
    }
    options = {"token": "hf_writer", "private": True, "working_directory": tmp_path}
    (url, _), (other, _) = run_mesh(
        2, push, tmp_path / "source-2", address(hub), isolated=True, **options
    )
    assert url.endswith(f"/me/tiny/commit/{MAIN}")
    assert other is None
    assert hub.made[0]["name"] == "tiny"
    assert hub.made[0]["visibility"] == "private" or hub.made[0]["private"]
    assert not list(tmp_path.glob("push-*"))
    stored = hub.files[MAIN]
    assert not {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} & stored.keys()
    assert stored["README.md"].startswith(b"---\nlibrary_name: transformers")
    assert stored["onnx/model.safetensors"] == b"not wanted"  # other programs' files stay
    assert stored.pop("model_ema.safetensors") == b"not ours"
    found = shardzoo(hub, tmp_path, "convert", "diff", "me/tiny", "source-2")
    assert found.returncode == 0, found.stderr


def test_a_push_that_is_refused(hub, tmp_path, run_mesh):
    before = dict(hub.files[MAIN])
    ((_, message),) = run_mesh(
        1, push, tmp_path / "source-2", address(hub), isolated=True, token="hf_reader"
    )
    assert message == (
        "pushing to me/tiny on the Hugging Face Hub failed: the Hub refused the token, or there is none; run "
        "`hf auth login` with a token that can write"
    )
    assert hub.files[MAIN] == before


@pytest.mark.before_release
def test_an_adapter_and_a_tokenizer_by_name(hub, tmp_path):
    model: Any = from_pretrained(tmp_path / "source-1")
    add_lora(model, lora_config(r=2, target_modules=["c_attn"]))
    model.get_parameter("blocks.0.attention.qkv.adapter.c_attn.lora_B").data.fill_(0.5)
    model.save_pretrained(tmp_path / "lora")
    hub.files[OLD] = {path.name: path.read_bytes() for path in (tmp_path / "lora").iterdir()}
    for name, folder in (("lora", "merged"), ("me/tiny@v1", "merged-by-name")):
        done = shardzoo(hub, tmp_path, "convert", "merge", "source-1", folder, "--adapter", name)
        assert done.returncode == 0, done.stderr
    stored = [
        (tmp_path / folder / "model.safetensors").read_bytes()
        for folder in ("merged", "merged-by-name")
    ]
    assert stored[0] == stored[1] != (tmp_path / "source-1" / "model.safetensors").read_bytes()
    words = [
        "generate",
        "--model",
        "source-1",
        "--prompt",
        "one two",
        "--max-new-tokens",
        "5",
        "--tokenizer",
    ]
    mine, theirs = (
        shardzoo(hub, tmp_path, *words, *more)
        for more in (("source-1", "--adapter", "lora"), ("me/tiny", "--adapter", "me/tiny@v1"))
    )
    assert mine.returncode == theirs.returncode == 0, theirs.stderr
    assert mine.stdout == theirs.stdout
