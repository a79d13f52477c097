"""One process or several that train together, and the devices the batch is spread over.

Several processes meet through JAX's distributed runtime. All run the same program in step, the
first one alone reads and writes the run's folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import UserError

T = TypeVar("T")

# Set by srun, mpirun of Open MPI, and launchers that speak PMI: number of processes, own number.
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)
# Starting takes longer than answering: programs are started by hand, one after the other.
_START = 3
_SHUTDOWN_SECONDS = 3600


class Processes:
    """The processes of a run and their devices.

    Attributes:
      index: number of this process; 0 leads.
      count: number of processes.
      mesh: all devices in one axis "data", those of a process side by side; None for one device.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count
        devices = _devices()
        self.mesh = Mesh(np.asarray(devices), ("data",)) if len(devices) > 1 else None
        self._any = self.jit(jnp.any)

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    # What all must agree on.

    def any(self, flag: bool) -> bool:
        """Whether any process says so. All have to ask, and get the same answer."""
        if self.count == 1:
            return flag
        mine = np.full(self.devices // self.count, flag)
        return bool(self._any(self.shard(mine)))

    def gather(self, value: Any) -> list[Any]:
        """What each process says, in their order; anything that JSON can hold."""
        if self.count == 1:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.int32(text.size))
        padded = np.pad(text, (0, int(sizes.max()) - text.size))
        rows = np.asarray(multihost_utils.process_allgather(padded))
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def together(self, work: Callable[[], T]) -> T:
        """Does the work. Where it fails with a UserError, every process raises one."""
        result, error = None, None
        try:
            result = work()
        except UserError as raised:
            error = str(raised)
        errors = self.gather(error)
        if error is None:
            other = next((i for i, e in enumerate(errors) if e is not None), None)
            if other is None:
                return result  # type: ignore[return-value]
            error = f"process {other}: {errors[other]}"
        raise UserError(error)

    # Data parallelism: batches are split over the devices, the state is the same on all.

    def rows(self, size: int) -> slice:
        """The part of a batch of `size` that this process reads.

        Raises:
          UserError: it does not divide evenly.
        """
        if size % self.devices:
            of = f"{self.count} processes × {self.devices // self.count}"
            raise UserError(
                f"--batch-size is {size}; it must be a multiple of the number of devices, "
                f"{self.devices}" + (f" ({of})" if self.count > 1 else "")
            )
        part = size // self.count
        return slice(self.index * part, (self.index + 1) * part)

    def shard(self, part: np.ndarray, axis: int = 0) -> Any:
        """This process's part of a batch, spread over its devices, as part of the whole batch."""
        if self.mesh is None:
            return part
        return jax.make_array_from_process_local_data(self._sharding(axis), part)

    def described(self, part: np.ndarray, axis: int = 0) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of what `shard` makes of it."""
        shape = list(part.shape)
        shape[axis] *= self.count
        sharding = None if self.mesh is None else self._sharding(axis)
        return jax.ShapeDtypeStruct(tuple(shape), part.dtype, sharding=sharding)

    def replicate(self, tree: Any) -> Any:
        """The leader's arrays on every device, bit for bit. Others may give shapes."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, P())
        if self.count == 1:
            return jax.device_put(tree, everywhere)

        def broadcast(x: Any) -> jax.Array:
            # As bytes: the sum that a broadcast is would make +0 of −0, and drop payloads of NaN.
            whole = np.asarray(x) if self.leads else np.zeros(x.shape, x.dtype)
            sent = multihost_utils.broadcast_one_to_all(whole.reshape(-1).view(np.uint8))
            mine = np.asarray(sent).view(whole.dtype).reshape(whole.shape)
            return jax.make_array_from_process_local_data(everywhere, mine)

        return jax.tree.map(broadcast, tree)

    def local(self, tree: Any) -> Any:
        """A replicated state as this process can use it alone."""
        return tree if self.mesh is None else jax.tree.map(np.asarray, tree)

    def jit(self, fn: Callable[..., Any], **settings: Any) -> Any:
        """`jax.jit` of a function of sharded and replicated arrays with replicated results."""
        if self.mesh is not None:
            settings["out_shardings"] = NamedSharding(self.mesh, P())
        return jax.jit(fn, **settings)

    def _sharding(self, axis: int) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, P(*[None] * axis, "data"))

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """Ends this process at once when it fails alone: the others then notice within bounds.

        Without it the interpreter would wait at its exit for processes that wait for this one.
        A UserError is raised by all of them and passes.
        """
        if self.count == 1:
            yield
            return
        try:
            yield
        except UserError:
            raise
        except KeyboardInterrupt:
            os._exit(130)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            print(f"models.finetune: error: {_LOST} ({reason})", file=sys.stderr, flush=True)
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


_LOST = (
    "another process of this run ended or cannot be reached. What was saved last is complete: "
    "start all processes again with --resume"
)


def join(given: Mapping[str, Any]) -> Processes:
    """Meets the other processes that the flags or the launcher's environment tell of.

    Without either this is a process of its own. Call it before JAX computes anything.

    Raises:
      UserError: flags are missing or out of range, or the leader's address is not known.
    """
    address, count, index = _job(given)
    if count == 1:
        return Processes()
    seconds = given.get("peer_timeout", 100)
    # Its handler of SIGTERM would take the place of ours, which saves.
    jax.config.update("jax_enable_preemption_service", False)
    start = seconds * _START
    where = f" at --coordinator {address}" if address else ""
    message = _when_aborted(
        f"no run of {count} processes came about{where} within {start} s: is process 0 there, is "
        "its port open, were all processes started?"
    )
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            cluster_detection_method="deactivate" if address else None,
            initialization_timeout=start,
            heartbeat_timeout_seconds=seconds,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{count} processes were announced, but JAX cannot join them ({error}): name process "
            "0's address with --coordinator HOST:PORT, or --num-processes 1 to train alone"
        ) from error
    message.value = _line(_LOST)
    processes = Processes(index, count)
    if len(set(Counter(device.process_index for device in _devices()).values())) > 1:
        raise UserError("the processes have different numbers of devices")
    # The first collectives connect the devices and wait for 30 s only, later ones for long.
    processes.gather(None)
    processes.any(False)
    return processes


def _devices() -> list[jax.Device]:
    return jax.devices()


def _job(given: Mapping[str, Any]) -> tuple[str | None, int, int]:
    """(address or None, number of processes, own number): of the flags, else of the launcher."""
    names = next((names for names in _LAUNCHERS if names[0] in os.environ), None)
    found = [int(os.environ.get(name, 0)) for name in names] if names else [None, None]
    address = given.get("coordinator")
    count = given.get("num_processes", found[0])
    index = given.get("process_id", found[1])
    if count == 1 or (count is None and address is None and index is None):
        return None, 1, 0
    if count is None or index is None:
        lacking = "--num-processes" if count is None else "--process-id"
        raise UserError(
            f"{lacking} is missing: several machines need --coordinator HOST:PORT, "
            "--num-processes and --process-id"
        )
    if address is None and names is None:
        raise UserError("--coordinator is missing: HOST:PORT of process 0, the same for all")
    if address is not None and not address.rpartition(":")[2].isdecimal():
        raise UserError(f"--coordinator is {address!r}; it must be HOST:PORT of process 0")
    if not 0 <= index < count:
        raise UserError(f"--process-id is {index}; it must be 0 … {count - 1}, one for each")
    return address, count, index


def _line(text: str) -> bytes:
    return f"models.finetune: error: {text}\n".encode()


def _when_aborted(text: str) -> Any:
    """Has abort() print one line and end this process. Returns the line, to be changed.

    JAX's runtime ends a process that lost another by a fatal log entry and abort(), on a thread of
    its own; Python's handlers would never run.
    """
    line = ctypes.create_string_buffer(_line(text), 1024)

    def handler(number: int) -> None:
        os.write(2, line.value)
        os._exit(1)

    kept = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    _HANDLERS.append(kept)
    ctypes.CDLL(None).signal(signal.SIGABRT, kept)
    return line


# Kept from being collected.
_HANDLERS: list[Any] = []
