"""`--config`: the same as flags, which come first; mistakes name key and file."""

import json

import pytest

from models.errors import UserError
from models.finetune import main
from models.options import Options, parse

TOML = """
data = ["notes", "more.txt"]
batch-size = 4
block_size = 32
lr = 1
betas = [0.8, 0.9]
policy = "always"
tensorboard = true
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def test_the_same_as_flags(file):
    flags = ["--data", "notes", "more.txt", "--batch-size", "4", "--block-size", "32", "--lr", "1"]
    flags += ["--betas", "0.8", "0.9", "--policy", "always", "--tensorboard"]
    got = parse(["--config", str(file)])
    assert got == parse(flags)
    assert type(got["lr"]) is float and type(got["data"]) is tuple


def test_flags_come_first(file):
    got = parse(["--batch-size", "2", "--config", str(file), "--data", "other"])
    assert got["batch_size"] == 2 and got["data"] == ("other",) and got["block_size"] == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize = 4", "unknown key batchsize; did you mean batch_size?"),
        ("zzzz = 4", "unknown key zzzz; keys are the flags"),
        ("config = 'a'", "unknown key config"),
        ("batch-size = 4\nbatch_size = 4", "batch_size is there twice"),
        ("steps = 'many'", 'steps is "many"; it must be a whole number'),
        ("steps = 1.0", "steps is 1.0; it must be a whole number"),
        ("steps = true", "steps is true; it must be a whole number"),
        ("lr = '1'", 'lr is "1"; it must be a number'),
        ("lr = 1979-05-27", 'lr is "1979-05-27"; it must be a number'),
        ("compare = 1", "compare is 1; it must be true or false"),
        ("model = 3", "model is 3; it must be a string"),
        ("model = ['tiny']", 'model is ["tiny"]; it must be a string'),
        ("data = 'notes'", 'data is "notes"; it must be a list of one or more, each a string'),
        ("betas = [0.9]", "betas is [0.9]; it must be a list of 2, each a number"),
        ("steps = ", "is not TOML: "),
    ],
)
def test_mistakes(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        parse(["--config", str(path)])
    assert str(raised.value).startswith(f"--config {path}") and message in str(raised.value)


def test_values_are_checked_as_flags_are(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("steps = 0")
    with pytest.raises(UserError, match="--steps is 0; it must be at least 1"):
        parse(["--config", str(path)])
    with pytest.raises(UserError, match="--config nowhere.toml: No such file"):
        parse(["--config", "nowhere.toml"])


def test_a_runs_own_options_are_a_config(file, text_folder, tmp_path):
    """The options of a run that a file and flags described make the same run again."""
    flags = ["--config", str(file), "--data", str(text_folder), "--model", "tiny", "--steps", "2"]
    file.write_text(TOML.replace("tensorboard = true", "") + "sample-tokens = 0\n")
    folders = [tmp_path / "a", tmp_path / "b"]
    assert main([*flags, "--out", str(folders[0])]) == 0
    saved = folders[0] / "options.json"
    assert main(["--config", str(saved), "--out", str(folders[1])]) == 0
    stored = [json.loads((folder / "options.json").read_text()) for folder in folders]
    assert stored[0] == stored[1]
    assert stored[0].keys() < vars(Options()).keys() and stored[0]["batch_size"] == 4
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
