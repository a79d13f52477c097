"""The command that samples text."""

import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from models import checkpoint, tokenizer
from models.generate import main
from models.gpt2 import GPT2, Config

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model of bytes."""
    folder = tmp_path_factory.mktemp("model")
    config = Config(vocab_size=257, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    params = jax.jit(GPT2(config).init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    checkpoint.save_config(folder, config, end_token=256)
    checkpoint.save_params(folder, config, params)
    return folder


@pytest.fixture(scope="module")
def bytes_folder(folder):
    (folder / "tokenizer.json").write_text(tokenizer.load("bytes").to_json())
    return folder


def run(capsys, folder, *flags):
    assert main([str(folder), "--max-tokens", "12", *flags]) == 0
    return capsys.readouterr()


def test_command(bytes_folder, capsys):
    flags = ("--prompt", "žlutý ")
    out, err = run(capsys, bytes_folder, *flags)
    assert out.startswith("žlutý ") and out.endswith("\n") and len(out) > len("žlutý \n")
    assert "12 tokens in" in err and "then" in err and err.endswith(" tokens/s\n")
    assert run(capsys, bytes_folder, *flags).out == out
    assert run(capsys, bytes_folder, *flags, "--seed", "7").out != out
    # No prompt: a new document.
    assert run(capsys, bytes_folder).out == run(capsys, bytes_folder, "--prompt", "").out != "\n"


def test_a_batch_prints_what_each_prompt_prints_alone(bytes_folder, tmp_path, capsys, monkeypatch):
    texts = ["one", "twenty and one", "drei"]
    alone = [
        run(capsys, bytes_folder, "--prompt", text, "--seed", str(i)).out
        for i, text in enumerate(texts)
    ]
    wanted = "".join(f"{chr(10) * (i > 0)}--- {i + 1} of 3\n{t}" for i, t in enumerate(alone))
    out, err = run(capsys, bytes_folder, *(f for text in texts for f in ("--prompt", text)))
    assert out == wanted and "36 tokens in" in err
    # From a file as an editor on Windows leaves it, and from standard input.
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwenty and one\r\ndrei\r\n")
    assert run(capsys, bytes_folder, "--prompts", str(file)).out == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert run(capsys, bytes_folder, "--prompts", "-").out == wanted


def test_text_appears_while_it_is_made(bytes_folder, monkeypatch):
    written = []

    class Out(io.StringIO):
        def flush(self):
            written.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Out())
    assert main([str(bytes_folder), "--prompt", "a", "--max-tokens", "12", "--seed", "3"]) == 0
    assert written[0] == "a"
    assert len(set(written)) > 6 and written == sorted(written)


def test_a_spelled_special_token_is_text_unless_asked_for(bytes_folder, capsys):
    flags = ("--prompt", "a<|endoftext|>", "--temperature", "0")
    plain, special = (
        run(capsys, bytes_folder, *flags),
        run(capsys, bytes_folder, *flags, "--special"),
    )
    assert plain.out != special.out
    # The model sees 14 of its 16 bytes, and more than it can see.
    assert (
        "prompt 1 has 17 tokens: the model sees the last 16"
        in run(capsys, bytes_folder, "--prompt", "a" * 17).err
    )


def test_a_tokenizer_larger_than_the_model(bytes_folder, tmp_path, capsys):
    config = json.loads((bytes_folder / "config.json").read_text())
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((bytes_folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    assert main([str(tmp_path)]) == 2
    assert "the tokenizer has 257 ids, but the model in" in (err := capsys.readouterr().err)
    assert "only 200" in err


def test_a_closed_pipe_is_no_error(bytes_folder):
    command = [sys.executable, "-m", "models.generate", str(bytes_folder), "--max-tokens", "40"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read().decode()
    assert process.returncode == 141 and "Traceback" not in err and "Exception" not in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0; it must be at least 1"),
        (["--temperature", "-1"], "--temperature is -1.0; it must be at least 0"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--top-p", "0"], "--top-p is 0.0; it must be above 0 and at most 1"),
        (["--top-k", "x"], "argument --top-k: invalid int value: 'x'"),
        (["--tokenizer", "nowhere"], "no tokenizer in nowhere"),
        (["--policy", "some"], "--policy is 'some'; it must be threshold"),
        (["--device", "npu9"], "--device is 'npu9'; this machine has emulated"),
        (["--prompts", "nowhere"], "--prompts nowhere: No such file"),
    ],
)
def test_bad_flags(folder, flags, message, capsys):
    assert main([str(folder), *flags]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_a_folder_without_a_model(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
