"""Federated fine-tuning: what leaves a client, what the server makes of it, and who may fail."""

import json
import warnings
from importlib.util import find_spec

import jax
import numpy as np
import pytest

if find_spec("flwr") is None:
    pytest.skip("needs Flower", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Of Flower's own dependencies.
    from models import federated  # Before Flower: it switches its statistics off.
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.supercore import telemetry

import jax_xdna
from models import checkpoint, generate, train
from models.gpt2 import GPT2
from models.options import parse_policy
from models.prepare import prepare
from models.trainer import Trainer

STEPS, ROUNDS, NORM = 4, 2, 0.5
VOCABULARY = 257  # bytes, and the end of text
SETTINGS = {"model": "tiny", "block-size": "16", "batch-size": "4", "lr": "3e-3"}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]


class Recorder(federated.LocalGrid):
    """The network, with a listener on the line."""

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        self.heard += zip(messages, replies, strict=True)
        return replies


@pytest.fixture(scope="module")
def simulation(compile_once, text_folder, tmp_path_factory):
    """The message pairs of a simulation on texts of three sizes, its folder and its texts."""
    root = tmp_path_factory.mktemp("federated")
    texts = [path.read_text() for path in sorted(text_folder.iterdir())]
    folders = []
    for name, part in (("alice", texts[:16]), ("bob", texts[16:24]), ("carol", texts[24:])):
        folders.append(root / f"{name}-private")
        folders[-1].mkdir()
        for i, text in enumerate(part):
            (folders[-1] / f"{name}-diary-{i}.txt").write_text(text)
    Recorder.heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(federated, "LocalGrid", Recorder)
        argv = ["simulate", "--data", *map(str, folders), "--out", str(root / "out"), *FLAGS]
        argv += ["--rounds", str(ROUNDS), "--local-steps", str(STEPS), "--delta-norm", str(NORM)]
        assert federated.main(argv) == 0
    return Recorder.heard, root / "out", folders


def trained(pairs):
    return [pair for pair in pairs if pair[0].metadata.message_type == "train"]


def arrays(record):
    return {name: value.numpy() for name, value in record.items()}


def test_nothing_but_the_allowlist_leaves_a_client(simulation):
    pairs, _, folders = simulation
    assert len(pairs) == 2 * 3 * ROUNDS
    words = {word for folder in folders for f in folder.iterdir() for word in f.read_text().split()}
    names = {f.name for folder in folders for f in folder.iterdir()} | {f.name for f in folders}
    secrets = [word.encode() for word in words | names if len(word) > 4]
    assert b"river" in secrets and b"alice-diary-0.txt" in secrets
    for message, reply in pairs:
        content = reply.content
        if message.metadata.message_type == "train":
            assert set(content) == {"delta", "numbers"}
            sent, delta = arrays(message.content["arrays"]), arrays(content["delta"])
            assert {n: a.shape for n, a in delta.items()} == {n: a.shape for n, a in sent.items()}
            assert all(a.dtype == np.float32 for a in delta.values())
            # The bytes of each tensor are those that NumPy writes of its numbers: no room beside.
            assert all(v.data == Array(v.numpy()).data for v in content["delta"].values())
            assert 0 < federated.norm(delta) <= NORM * (1 + 1e-5)
        else:
            assert set(content) == {"numbers"}
        numbers = dict(content["numbers"])
        assert {n: type(v) for n, v in numbers.items()} == {"tokens": int, "loss": float}
        wire = message_to_proto(reply).SerializeToString()
        assert not [word for word in secrets if word in wire]


def test_the_mean_of_the_differences_by_tokens_is_the_next_model(simulation):
    pairs, folder, folders = simulation
    rounds = trained(pairs)
    for number in range(ROUNDS):
        replies = rounds[3 * number : 3 * number + 3]
        model = arrays(replies[0][0].content["arrays"])
        weights = np.asarray([reply.content["numbers"]["tokens"] for _, reply in replies], float)
        assert len(set(weights)) == 3
        deltas = [arrays(reply.content["delta"]) for _, reply in replies]
        wanted = {
            name: value + np.average([delta[name] for delta in deltas], axis=0, weights=weights)
            for name, value in model.items()
        }
        if number + 1 < ROUNDS:
            got = arrays(rounds[3 * number + 3][0].content["arrays"])
        else:
            config = checkpoint.load_config(folder)
            got = federated.to_arrays(checkpoint.load_params(folder, config))
        for name, value in wanted.items():
            if name == "wte/embedding":  # Rows of the vocabulary's padding are not saved.
                got[name], value = got[name][:VOCABULARY], value[:VOCABULARY]
            np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_difference_is_that_of_the_fine_tuners_own_loop(simulation):
    pairs, _, folders = simulation
    message, reply = trained(pairs)[1]
    node = message.metadata.dst_node_id
    argv = [*FLAGS, "--data", str(folders[node - 1]), "--schedule", "constant", "--warmup", "0"]
    run = prepare([*argv, "--steps", str(STEPS)])
    policy = parse_policy(run.options.policy)
    trainer = Trainer(
        run.options, GPT2(run.config), run.corpus, lambda fn: jax_xdna.offload(fn, policy=policy)
    )
    start = run.initial_params()
    before = federated.to_arrays(start)
    state = train.init_state(jax.tree.map(jax.numpy.copy, start), trainer.optimizer)
    after = federated.to_arrays(
        trainer.run(state, lambda row: None, lambda state: None, lambda: False).state.params
    )
    assert reply.content["numbers"]["tokens"] == len(run.corpus.train)
    whole = {name: after[name] - value for name, value in before.items()}
    length = federated.norm(whole)
    assert length > NORM  # so it was clipped
    for name, value in arrays(reply.content["delta"]).items():
        np.testing.assert_allclose(value, whole[name] * (NORM / length), rtol=1e-5, atol=1e-7)


def test_loss_falls_and_the_model_speaks(simulation, capsys):
    _, folder, _ = simulation
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2] and all(row["clients"] == 3 for row in rows)
    assert rows[1]["loss"] < rows[0]["loss"] - 0.02
    assert rows[1]["val_loss"] < rows[0]["val_loss"] - 0.02
    assert generate.main([str(folder), "--prompt", "the", "--max-tokens", "4"]) == 0


SENT = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
GOOD = {"w": np.full((2, 3), 0.1, np.float32), "b": np.full(3, -0.1, np.float32)}


def content(delta=None, **numbers):
    return federated.released(
        GOOD if delta is None else delta, **({"tokens": 8, "loss": 1.5} | numbers)
    )


def with_record(name, record):
    mixed = content()
    mixed[name] = record
    return mixed


def answer(reply, mods):
    """What a client with this reply, or exception, sends."""
    app = ClientApp(mods=mods)

    @app.train()
    def _train(message, context):
        if isinstance(reply, Exception):
            raise reply
        return Message(reply, reply_to=message)

    grid = federated.LocalGrid(app, 1)
    sent = RecordDict({"arrays": federated.to_record(SENT), "config": ConfigRecord({})})
    (message,) = grid.send_and_receive([Message(sent, 1, "train")])
    return message


BAD = {
    "text beside": lambda: with_record("text", ConfigRecord({"x": "secret"})),
    "a third number": lambda: with_record(
        "numbers", MetricRecord({"tokens": 8, "loss": 1.5, "x": 1})
    ),
    "a list of numbers": lambda: with_record("numbers", MetricRecord({"tokens": 8, "loss": [1.5]})),
    "text for numbers": lambda: with_record("numbers", ConfigRecord({"tokens": 8, "loss": 1.5})),
    "a metric for delta": lambda: with_record("delta", MetricRecord({"w": 1.0})),
    "another name": lambda: content({**GOOD, "secret": GOOD["b"]}),
    "a name missing": lambda: content({"w": GOOD["w"]}),
    "another shape": lambda: content({**GOOD, "b": np.zeros(4, np.float32)}),
    "another type": lambda: content({**GOOD, "b": np.zeros(3)}),
    "NaN": lambda: content({**GOOD, "b": np.full(3, np.nan, np.float32)}),
    "infinity": lambda: content({**GOOD, "b": np.full(3, np.inf, np.float32)}),
    "no tokens": lambda: content(tokens=0),
    "loss NaN": lambda: content(loss=float("nan")),
    "not an array": lambda: with_record(
        "delta",
        ArrayRecord(
            {"w": Array("float32", (2, 3), "numpy.ndarray", b"secret"), "b": Array(GOOD["b"])}
        ),
    ),
    "an exception": lambda: OSError("secret/diary.txt is gone"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_gate_lets_nothing_else_out(case, caplog):
    sent = answer(BAD[case](), [federated.gate(1.0)])
    assert sent.has_error() and sent.error == federated.FAILED
    assert b"secret" not in message_to_proto(sent).SerializeToString()
    assert "sends nothing" in caplog.text


def test_the_gate_clips_and_lets_pass():
    sent = answer(content(), [federated.gate(1.0)])
    for name, value in arrays(sent.content["delta"]).items():
        np.testing.assert_array_equal(value, GOOD[name])
    large = {name: value * 1000 for name, value in GOOD.items()}
    sent = answer(content(large), [federated.gate(0.25)])
    clipped = arrays(sent.content["delta"])
    assert federated.norm(clipped) == pytest.approx(0.25, rel=1e-6)
    for name, value in clipped.items():
        np.testing.assert_allclose(value * (0.3 / 0.25), GOOD[name], rtol=1e-5)


def average(replies):
    """The server's next model, and its row of the log, when nodes send these, past any gate."""
    app = ClientApp()

    @app.train()
    def _train(message, context):
        reply = replies[context.node_id - 1]
        if isinstance(reply, Exception):
            raise reply
        return Message(reply, reply_to=message)

    @app.evaluate()
    def _evaluate(message, context):
        return Message(federated.released({}, 2, 1.0), reply_to=message)

    rows = []
    strategy = federated.DeltaAverage(len(replies), 1.0, rows.append)
    result = strategy.start(
        federated.LocalGrid(app, len(replies)), federated.to_record(SENT), num_rounds=1
    )
    return arrays(result.arrays), rows[0]


def test_bad_clients_do_not_end_a_round(caplog):
    bad = [make() for make in BAD.values()]
    third = {name: 3 * value for name, value in GOOD.items()}
    got, row = average([content(tokens=30), *bad, content(third, tokens=10)])
    assert row["clients"] == 2 and row["tokens"] == 40
    for name, value in got.items():
        np.testing.assert_allclose(value, 1.5 * GOOD[name], rtol=1e-6)
    for node in range(2, len(bad) + 2):
        assert f"the reply of client {node} to 'train' does not count" in caplog.text
    assert "client 1 " not in caplog.text


def test_the_server_clips_as_well():
    large = {name: value * 1000 for name, value in GOOD.items()}
    got, _ = average([content(large), content()])
    mean = {name: (value / 0.3 + value) / 2 for name, value in GOOD.items()}
    for name, value in got.items():
        np.testing.assert_allclose(value, mean[name], rtol=1e-5)


def test_with_no_usable_reply_the_model_stays(simulation, tmp_path, monkeypatch, capsys, caplog):
    _, _, folders = simulation

    def broken(self, arrays, server_round):
        raise MemoryError(str(folders[0]))

    monkeypatch.setattr(federated.Client, "train", broken)
    monkeypatch.setattr(federated.Client, "evaluate", broken)
    out = tmp_path / "out"
    argv = ["simulate", "--data", *map(str, folders[:2]), "--out", str(out), "--rounds", "1"]
    assert federated.main([*argv, *FLAGS]) == 2
    assert "no client's update could be used" in capsys.readouterr().err
    assert "the model stays" in caplog.text
    run = prepare([*FLAGS, "--data", str(folders[0])])
    kept = federated.to_arrays(checkpoint.load_params(out, checkpoint.load_config(out)))
    for name, value in federated.to_arrays(run.initial_params()).items():
        rows = VOCABULARY if name == "wte/embedding" else None
        np.testing.assert_array_equal(kept[name][:rows], value[:rows])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; it must be positive"),
        (["--delta-norm", "nan"], "--delta-norm is nan; it must be positive"),
        (["--schedule=linear"], "--schedule is a flag of models.finetune alone"),
        (["--resume"], "--resume is a flag of models.finetune alone"),
    ],
)
def test_flags(flags, message, tmp_path, capsys):
    assert federated.main(["simulate", "--data", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_flower_sends_no_statistics_home():
    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"


def test_adapters_alone_are_sent(simulation, tmp_path, monkeypatch):
    """With --lora the base stays where it is; the saved model has the adapters merged."""
    out, sent = tmp_path / "out", []
    accept = federated.read_released

    def spy(content, kind, shapes):
        sent.append((kind, {n: a.numpy() for n, a in content.get("delta", {}).items()}))
        return accept(content, kind, shapes)

    monkeypatch.setattr(federated, "read_released", spy)
    _, base, folders = simulation
    argv = ["simulate", "--data", *map(str, folders[:2]), "--out", str(out), "--rounds", "2"]
    argv += ["--local-steps", "2", "--init", str(base), "--lora", "2"]
    assert federated.main(argv) == 0
    deltas = [delta for kind, delta in sent if kind == "train"]
    assert deltas and all(delta.keys() == deltas[0].keys() for delta in deltas)
    config = checkpoint.load_config(out)
    # c_attn of both blocks: 2 · (width + 3 · width) each.
    assert sum(a.size for a in deltas[0].values()) == config.n_layer * 2 * 4 * config.n_embd
    before, after = (
        federated.to_arrays(checkpoint.load_params(folder, config)) for folder in (base, out)
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"h/{i}/attn/c_attn/kernel" for i in range(config.n_layer)}
