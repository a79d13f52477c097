"""How a process finds the others of its run, and what it says when it loses them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from .errors import UserError
from .options import Options
from .processes import LOST, Processes

# Set by srun, mpirun of Open MPI, and launchers that speak PMI: number of processes, own number.
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)
# Starting takes longer than answering: programs are started by hand, one after the other.
_START = 3
_SHUTDOWN_SECONDS = 3600


def join(given: Mapping[str, Any]) -> Processes:
    """Meets the other processes that the flags or the launcher's environment tell of.

    Without either this is a process of its own. Call it before JAX computes anything.

    Raises:
      UserError: flags are missing or out of range, or the leader's address is not known.
    """
    address, count, index = _job(given)
    if count == 1:
        return Processes()
    seconds = given.get("peer_timeout", Options.peer_timeout)
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
    message.value = _line(LOST)
    processes = Processes(index, count)
    if len(set(Counter(device.process_index for device in jax.devices()).values())) > 1:
        raise UserError("the processes have different numbers of devices")
    # The first collectives connect the devices and wait for 30 s only, later ones for long.
    processes.gather(None)
    processes.any(False)
    return processes


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
