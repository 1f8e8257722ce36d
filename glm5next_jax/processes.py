"""Commands under several processes: flags, start and end of JAX's own distributed runtime.

Every process runs the same program on the same input and holds its shards of it; process 0 writes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback

import jax

from glm5next_jax.sharding import DATA, MODEL

_HEARTBEAT = 100
LOST = (
    "an exchange between the processes failed: one of them was lost, or stopped with an error of "
    "its own (see its output). Start all of them again with --overwrite."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which devices and processes a command runs on."""
    group = parser.add_argument_group(
        "many devices",
        "A mesh spreads one model over devices; see docs/deploying.md. Under several processes,\n"
        "start the same command in each. TPU slices, Slurm, MPI and Kubernetes jobs need only\n"
        "--distributed; elsewhere name the coordinator, the number of processes and this one.",
    )
    add = group.add_argument
    add("--mesh", type=parse_mesh, metavar="data=N,model=M", help="devices to use (one)")
    add("--distributed", action="store_true", help="one process of several, found out from where")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 can be reached")
    add("--num-processes", type=int, metavar="N", help="processes in all")
    add("--process-id", type=int, metavar="I", help="which of them this is, 0 to N-1")
    add(
        "--heartbeat",
        type=int,
        default=_HEARTBEAT,
        metavar="SECONDS",
        help=f"a process unheard of for so long is lost, and the others stop ({_HEARTBEAT})",
    )


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes in "data=4,model=8", for `sharding.make_mesh`; an axis left out is 1."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(rf"({DATA}|{MODEL})=([1-9][0-9]*)", part.strip())
        if match is None or match[1] in sizes:
            raise argparse.ArgumentTypeError(
                f"expected {DATA}=N,{MODEL}=M with N and M of at least 1, got {text!r}"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def check_flags(args: argparse.Namespace) -> None:
    """Refuses flags that do not go together.

    Raises:
      ValueError: only some of the three that name a process, or a process out of range.
    """
    given = [args.coordinator, args.num_processes, args.process_id]
    if any(value is not None for value in given) and None in given:
        raise ValueError("--coordinator, --num-processes and --process-id go together")
    if args.num_processes is not None and not 0 <= args.process_id < args.num_processes:
        raise ValueError(
            f"--process-id {args.process_id} is not in 0..{args.num_processes - 1} "
            f"(--num-processes {args.num_processes})"
        )
    if args.heartbeat < 1:
        raise ValueError(f"--heartbeat must be at least 1 second, got {args.heartbeat}")


def start(args: argparse.Namespace) -> None:
    """Joins the other processes, where there are any; before JAX looks at its devices.

    Raises:
      ValueError: they cannot be joined.
    """
    if not args.distributed and args.coordinator is None:
        return
    try:
        jax.distributed.initialize(
            coordinator_address=args.coordinator,
            num_processes=args.num_processes,
            process_id=args.process_id,
            heartbeat_timeout_seconds=args.heartbeat,
        )
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"cannot join the other processes: {first}") from error


def are_several() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that writes: the only one, or number 0."""
    return not are_several() or jax.process_index() == 0


def leave(status: int) -> None:
    """Ends a process of several that failed; returns where there is only one.

    The others may be waiting for it inside an exchange. An orderly exit would wait for them in
    turn; once this process is gone, the runtime stops them.
    """
    if are_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class leaving_on_errors:
    """A context in which an error that nobody expected ends a process of several; see `leave`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and are_several():
            traceback.print_exception(error)
            leave(1)
