"""One process or several that train together, and the devices the batch is spread over.

Several processes meet through JAX's distributed runtime. All run the same program in step, the
first one alone reads and writes the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import UserError, WriteError

T = TypeVar("T")

LOST = (
    "another process of this run ended or cannot be reached. What was saved last is complete: "
    "start all processes again with --resume"
)


class Processes:
    """The processes of a run and their devices.

    Attributes:
      index: number of this process; 0 leads.
      count: number of processes.
      mesh: all devices in one axis "data", those of a process side by side; None for one device.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count
        devices = visible_devices()
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
        except WriteError as error:
            print(f"models.finetune: error: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        except KeyboardInterrupt:
            os._exit(130)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            print(f"models.finetune: error: {LOST} ({reason})", file=sys.stderr, flush=True)
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def visible_devices() -> list[jax.Device]:
    return jax.devices()
