"""Federated fine-tuning on Flower: several people's text, one model, no text leaves its machine.

    python -m models.federated simulate --data DIR_A DIR_B DIR_C [flags of models.finetune]

runs a server and one client per folder of --data on this machine. In a round the server sends the
model, each client trains it on its own text and answers with the difference, and the server adds
the mean of the differences, weighted by the clients' tokens (McMahan et al.,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017).

What a client may send is `RELEASED` and nothing else; `gate` is the only way out.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Flower sends usage statistics home unless it is told not to before it is imported.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax.traverse_util import flatten_dict, unflatten_dict  # noqa: E402

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.run import Run as FlowerRun
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise ImportError('models.federated needs Flower: pip install ".[federated]"') from error

import jax_xdna  # noqa: E402

from . import checkpoint, train  # noqa: E402
from .errors import UserError  # noqa: E402
from .finetune import begin_folder  # noqa: E402
from .gpt2 import GPT2  # noqa: E402
from .options import flag, parse_policy  # noqa: E402
from .prepare import Run, prepare  # noqa: E402
from .trainer import Trainer  # noqa: E402

# All that may leave a client, by the type of the server's message: records by name, and whether
# they hold differences of parameters or the two numbers of `NUMBERS`.
RELEASED = {"train": ("delta", "numbers"), "evaluate": ("numbers",)}
# tokens: of the client's training (or validation) text; loss: its mean, in nats per token.
NUMBERS = {"tokens": int, "loss": float}
# What the server hears of a client's failure. The reason may name files: it stays in the client.
FAILED = Error(code=1000, reason="the client failed; its own log says why")
# Flags of models.finetune that one client cannot have for itself, or that rounds decide.
_OURS = (
    *("data", "steps", "resume", "compare", "schedule", "warmup", "min_lr"),
    *("coordinator", "num_processes", "process_id", "peer_timeout"),
)

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]

log = logging.getLogger("models.federated")


def norm(arrays: Arrays) -> float:
    """The L2 norm of all elements together, in fp64."""
    return math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for a in arrays.values()))


def clip(delta: Arrays, limit: float) -> Arrays:
    """The difference, shortened to the norm `limit` where it is longer."""
    length = norm(delta)
    # Rounding to fp32 may leave a shortened one longer by a hair; it is not shortened again.
    if length <= limit * (1 + 1e-6):
        return delta
    return {name: (value * (limit / length)).astype(np.float32) for name, value in delta.items()}


def released(delta: Arrays, tokens: int, loss: float) -> RecordDict:
    """A reply's content; an evaluation's has no difference."""
    content = RecordDict({"numbers": MetricRecord({"tokens": tokens, "loss": loss})})
    if delta:
        content["delta"] = to_record(delta)
    return content


def read_released(content: RecordDict, kind: str, shapes: Shapes) -> tuple[Arrays, int, float]:
    """Difference, tokens and loss of a reply, when there is nothing else in it.

    Args:
      kind: a key of `RELEASED`.
      shapes: of the parameters, by name; the difference has exactly these, in fp32.

    Raises:
      ValueError: a record, a name, a type or a shape that is not in the list, or a value that is
        not finite.
    """
    wanted = RELEASED[kind]
    if sorted(content) != sorted(wanted):
        raise ValueError(f"records {sorted(content)}; a reply to {kind!r} has {sorted(wanted)}")
    numbers = content["numbers"]
    if (
        not isinstance(numbers, MetricRecord)
        or dict((name, type(value)) for name, value in numbers.items()) != NUMBERS
    ):
        raise ValueError(f"numbers {dict(numbers)!r}; they are {', '.join(NUMBERS)}")
    tokens, loss = numbers["tokens"], numbers["loss"]
    if tokens < 1 or not math.isfinite(loss):
        raise ValueError(f"{tokens} tokens with a loss of {loss}")
    if "delta" not in wanted:
        return {}, tokens, loss
    record = content["delta"]
    if not isinstance(record, ArrayRecord):
        raise ValueError(f"delta is a {type(record).__name__}; it must be an ArrayRecord")
    if record.keys() != shapes.keys():
        differ = sorted(record.keys() ^ shapes.keys())
        raise ValueError(f"delta differs from the model in the tensors {', '.join(differ[:4])}")
    delta = {}
    for name, shape in shapes.items():
        value = record[name].numpy()
        if value.dtype != np.float32 or value.shape != shape:
            raise ValueError(
                f"tensor {name} of delta is {value.dtype} {value.shape}; the model's is "
                f"float32 {shape}"
            )
        if not np.isfinite(value).all():
            raise ValueError(f"tensor {name} of delta has values that are not finite")
        delta[name] = value
    return delta, tokens, loss


def gate(limit: float) -> Callable[[Message, Context, Callable[..., Message]], Message]:
    """The one way out of a client, as a Flower mod.

    The reply is made anew of what `RELEASED` lists, its difference clipped to the L2 norm `limit`.
    A reply with anything else in it is not sent, nor is what an exception says: the server gets
    `FAILED`.
    """

    def mod(message: Message, context: Context, inner: Callable[..., Message]) -> Message:
        kind = message.metadata.message_type
        try:
            shapes = {name: a.numpy().shape for name, a in message.content["arrays"].items()}
            reply = inner(message, context)
            delta, tokens, loss = read_released(reply.content, kind, shapes)
            return Message(released(clip(delta, limit), tokens, loss), reply_to=message)
        except Exception as error:
            log.warning("this client sends nothing to %r: %s", kind, error)
            return Message(FAILED, reply_to=message)

    return mod


class Client:
    """One person's text, and the training on it."""

    def __init__(self, trainer: Trainer, tokens: int, local_steps: int) -> None:
        """`tokens` are those of the training text."""
        self.trainer, self.tokens, self.local_steps = trainer, tokens, local_steps

    def train(self, arrays: Arrays, server_round: int) -> tuple[Arrays, int, float]:
        """What a round changes, the tokens it stands for, and the mean loss of its steps.

        The optimizer starts afresh, the data goes on where the round before stopped.
        """
        params = jax.tree.map(jax.numpy.array, unflatten_dict(arrays, sep="/"))
        first = (server_round - 1) * self.local_steps
        state = train.init_state(params, self.trainer.optimizer)
        state = state._replace(step=jax.numpy.asarray(first, jax.numpy.int32))
        losses = []
        for step in range(first, first + self.local_steps):
            state, metrics = self.trainer.step(state, step)
            losses.append(float(metrics["loss"]))
        trained = to_arrays(state.params)
        delta = {name: trained[name] - value for name, value in arrays.items()}
        return delta, self.tokens, float(np.mean(losses))

    def evaluate(self, arrays: Arrays) -> tuple[Arrays, int, float]:
        """No difference, the tokens evaluated on, and the loss of the validation text."""
        loss = self.trainer.evaluate(unflatten_dict(arrays, sep="/"))
        return {}, self.trainer.validation_tokens, loss


def client_app(client: Callable[[Context], Client], limit: float) -> ClientApp:
    """The Flower client: `client` of a node's context trains, `gate(limit)` lets out."""
    app = ClientApp(mods=[gate(limit)])

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        arrays, config = from_record(message.content["arrays"]), message.content["config"]
        reply = client(context).train(arrays, config["server-round"])
        return Message(released(*reply), reply_to=message)

    @app.evaluate()
    def _evaluate(message: Message, context: Context) -> Message:
        reply = client(context).evaluate(from_record(message.content["arrays"]))
        return Message(released(*reply), reply_to=message)

    return app


class DeltaAverage(FedAvg):
    """The server's part of a round: adds the mean of the differences, weighted by tokens.

    A client whose reply is an error, or not what `read_released` takes, does not count in that
    round, with a warning. With none left the model stays.
    """

    def __init__(self, clients: int, limit: float, report: Callable[[dict[str, Any]], None]):
        """Waits for `clients`. `report` gets round, clients, tokens, loss and val_loss of each."""
        super().__init__(
            min_train_nodes=clients,
            min_evaluate_nodes=clients,
            min_available_nodes=clients,
            weighted_by_key="tokens",
        )
        self._limit, self._report = limit, report
        self._global: Arrays = {}
        self._row: dict[str, Any] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._global = from_record(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        accepted = list(self._accepted(server_round, "train", replies))
        self._row = {"round": server_round, "clients": len(accepted)}
        if not accepted:
            log.warning("round %d: no client's update can be used; the model stays", server_round)
            return None, None
        total = sum(tokens for _, tokens, _ in accepted)
        mean = {name: np.zeros(a.shape, np.float64) for name, a in self._global.items()}
        for delta, tokens, _ in accepted:
            for name, value in clip(delta, self._limit).items():
                mean[name] += value * (tokens / total)
        arrays = {n: (a + mean[n]).astype(np.float32) for n, a in self._global.items()}
        loss = sum(loss * tokens for _, tokens, loss in accepted) / total
        self._row |= {"tokens": total, "loss": loss}
        return to_record(arrays), MetricRecord({"loss": loss, "tokens": total})

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        accepted = list(self._accepted(server_round, "evaluate", replies))
        if not accepted:
            self._report(self._row)
            return None
        total = sum(tokens for _, tokens, _ in accepted)
        loss = sum(loss * tokens for _, tokens, loss in accepted) / total
        self._report(self._row | {"val_loss": loss})
        return MetricRecord({"loss": loss, "tokens": total})

    def _accepted(
        self, server_round: int, kind: str, replies: Iterable[Message]
    ) -> Iterator[tuple[Arrays, int, float]]:
        """What may be averaged, always in the same order of clients."""
        shapes = {name: a.shape for name, a in self._global.items()}
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason)
                yield read_released(reply.content, kind, shapes)
            except Exception as error:  # Whatever a client sends, the others go on.
                log.warning(
                    "round %d: the reply of client %d to %r does not count: %s",
                    *(server_round, reply.metadata.src_node_id, kind, error),
                )


class LocalGrid(Grid):
    """Flower's network on one machine: the client of each node answers in turn, in this process.

    (Flower's own simulation needs Ray.) Nodes are 1 … n. A client that raises costs its reply.
    """

    def __init__(self, app: ClientApp, nodes: int) -> None:
        self._app, self._replies = app, dict[str, Message]()
        self._contexts = {
            node: Context(1, node, {}, RecordDict(), {}) for node in range(1, nodes + 1)
        }
        # Flower writes them into each message.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1

    def set_run(self, run: FlowerRun) -> None:
        self._run = run

    @property
    def run(self) -> FlowerRun:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            ids.append(f"{len(self._replies)}-{node}")
            try:
                reply = self._app(message, self._contexts[node])
            except Exception as error:
                reply = Message(Error(code=0, reason=repr(error)), reply_to=message)
            self._replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(list(self.push_messages(messages)))


def to_arrays(params: Any) -> Arrays:
    """Parameters as fp32 arrays by name, for example "h/0/attn/c_attn/kernel"."""
    return {n: np.asarray(a, np.float32) for n, a in flatten_dict(params, sep="/").items()}


def to_record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def from_record(record: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def simulate(
    runs: list[Run], rounds: int, local_steps: int, limit: float, say: Callable[[str], None]
) -> Path:
    """Trains one model on the text of several runs, as a server and clients that exchange messages.

    The folder of the first run gets the model after each round, and a row per round in
    metrics.jsonl. Returns that folder.

    Raises:
      UserError: in no round was there a reply that can be used.
    """
    first = runs[0]
    options, folder, model = first.options, first.folder, GPT2(first.config)
    policy = parse_policy(options.policy)

    def offload(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax_xdna.offload(fn, policy=policy, device=options.device)

    # The clients' steps are the same program: it is compiled once.
    trainer = Trainer(options, model, first.corpus, offload)
    initial = to_record(to_arrays(trainer.begin(first.initial_params()).params))
    clients = [Client(trainer.on(run.corpus), len(run.corpus.train), local_steps) for run in runs]
    begin = time.perf_counter()
    folder.lock()
    begin_folder(first, None)

    def report(row: dict[str, Any]) -> None:
        folder.append_metrics(row)
        losses = [f"{name} {row[name]:.4f}" for name in ("loss", "val_loss") if name in row]
        say(
            f"round {row['round']}/{rounds}: {row['clients']} of {len(clients)} clients, "
            f"{', '.join(losses) or 'nothing learned'} ({time.perf_counter() - begin:.1f} s)"
        )

    def save(server_round: int, arrays: ArrayRecord) -> None:
        params = trainer.whole(unflatten_dict(from_record(arrays), sep="/"))
        checkpoint.save_params(folder.path, first.config, params)

    app = client_app(lambda context: clients[context.node_id - 1], limit)
    strategy = DeltaAverage(len(clients), limit, report)
    result = strategy.start(LocalGrid(app, len(clients)), initial, rounds, evaluate_fn=save)
    if not result.train_metrics_clientapp:
        raise UserError("no client's update could be used in any round; see the warnings")
    return folder.path


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m models.federated",
        description="Fine-tunes one model on several people's text, which stays where it is.",
        epilog="Further flags are those of models.finetune: --model, --init, --lr, --out, …",
        allow_abbrev=False,
    )
    s = p.add_subparsers(dest="command", required=True).add_parser(
        "simulate", help="server and clients on this machine", allow_abbrev=False
    )
    s.add_argument(
        "--data", nargs="+", required=True, metavar="PATH", help="one client each: a file or folder"
    )
    s.add_argument("--rounds", type=int, default=5, help="default 5")
    s.add_argument(
        "--local-steps", type=int, default=20, help="a client's steps per round; default 20"
    )
    s.add_argument(
        "--delta-norm",
        type=float,
        default=10.0,
        metavar="L2",
        help="longest update that a client sends; longer ones are shortened to it; default 10",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    args, rest = parser().parse_known_args(argv)
    try:
        for name in ("rounds", "local_steps", "delta_norm"):
            if not 0 < getattr(args, name) < math.inf:
                raise UserError(f"{flag(name)} is {getattr(args, name)}; it must be positive")
        for name in _OURS:
            if any(word.split("=")[0] == flag(name) for word in rest):
                raise UserError(f"{flag(name)} is a flag of models.finetune alone; leave it out")
        steps = ["--steps", str(args.rounds * args.local_steps), "--schedule", "constant"]
        runs = [prepare([*rest, "--data", path, *steps, "--warmup", "0"]) for path in args.data]
        with contextlib.closing(runs[0].folder):
            folder = simulate(runs, args.rounds, args.local_steps, args.delta_norm, print)
        print(f"\nthe model is in {folder}; to hear it:\n  python -m models.generate {folder}")
        return 0
    except UserError as error:
        print(f"models.federated: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
