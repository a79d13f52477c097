"""Models by name: the real hub client against a small server, and no network in its many forms."""

import hashlib
import http.server
import socket
import sys
import threading
import time

import pytest
from huggingface_hub import constants

from models import checkpoint, generate, hub, tokenizer
from models.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory, config, params):
    folder = tmp_path_factory.mktemp("model")
    checkpoint.save_config(folder, config, end_token=100)
    checkpoint.save_params(folder, config, params)
    (folder / "tokenizer.json").write_text(tokenizer.load("bytes").to_json())
    (folder / "tf_model.h5").write_bytes(b"not wanted")
    return folder


@pytest.fixture
def client(monkeypatch, tmp_path):
    """Settings of the hub client: an empty cache, and an address to be set."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def at(endpoint):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)

    at("http://127.0.0.1:9")
    return at


@pytest.fixture
def server(client, model):
    """A hub with one model, me/tiny. Yields the files it was asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            repo, found, name = self.path.removeprefix("/").partition("/resolve/main/")
            path = model / name
            known = repo == "me/tiny" and path.is_file()
            content = path.read_bytes() if found and known else b""
            self.send_response(200 if known or not found else 404)
            if found and not known:
                missing = "Entry" if repo == "me/tiny" else "Repo"
                self.send_header("X-Error-Code", f"{missing}NotFound")
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)
            if body and found:
                asked.append(name)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        client(f"http://127.0.0.1:{httpd.server_port}")
        yield asked
        httpd.shutdown()


def test_a_name_is_downloaded_once_and_then_needs_no_network(server, client, config, monkeypatch):
    folder = hub.folder("me/tiny")
    assert checkpoint.load_config(folder) == config
    assert checkpoint.load_params(folder, config)
    assert tokenizer.load(str(folder)).vocab_size == 257
    assert sorted(server) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert hub.folder("me/tiny") == folder and len(server) == 3

    client("http://127.0.0.1:9")
    assert hub.folder("me/tiny") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.folder("me/tiny") == folder


def test_a_tokenizer_alone(server):
    assert tokenizer.load("me/tiny").encode(["ab"])[0].tolist() == [97, 98]
    assert server == ["tokenizer.json"]


def test_a_name_the_hub_does_not_know(server):
    with pytest.raises(UserError, match="no folder me/other, and no model me/other at http"):
        hub.folder("me/other")


WANTED = "config.json, model.safetensors .*pytorch_model.bin.*, tokenizer.json .*merges.txt"


def test_without_a_network_the_wanted_files_are_named_at_once(client, capsys):
    start = time.monotonic()
    with pytest.raises(UserError, match=WANTED) as error:
        hub.folder("gpt2")
    assert "no folder gpt2, and openai-community/gpt2 cannot be had from" in str(error.value)
    assert "refused" in str(error.value)
    assert time.monotonic() - start < 5
    assert generate.main(["gpt2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_silent_network_is_given_up_in_seconds(client, monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client(f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(UserError, match=WANTED):
            hub.folder("openai-community/gpt2")
    # So is a look-up of the name that does not return; its thread is left behind.
    end = threading.Event()

    def look_up(*args, **kwargs):
        end.wait(60)
        raise OSError("ended by the test")

    monkeypatch.setattr(hub.urllib.request, "urlopen", look_up)
    with pytest.raises(UserError, match="no answer"):
        hub.folder("openai-community/gpt2")
    end.set()
    assert time.monotonic() - start < 5


def test_offline_asks_nobody(client, monkeypatch):
    def urlopen(*args, **kwargs):
        raise AssertionError("asked the network")

    monkeypatch.setattr(hub.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        hub.folder("gpt2")


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=f"no huggingface_hub to download .*{WANTED}"):
        hub.folder("me/tiny")


def test_local_paths_are_not_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub.is_name("gpt2") and hub.is_name("owner/model-1.0")
    for path in ("runs", "runs/lost", "./gpt2", "/a/b", "a/b/c", "notes", "../b", "a/", ""):
        assert not hub.is_name(path), path
    (tmp_path / "gpt2").mkdir()
    assert not hub.is_name("gpt2")
