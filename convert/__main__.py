"""Command `glm5next-convert`: checkpoints in, out, looked at and compared."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_CONVERT = """\
Converts a released GLM-5.3-Flash checkpoint (config.json and safetensors files) to arrays that
glm5next_jax.load reads directly, each host only its part. Reads BF16, FP8 blocks and NVFP4 (as
ModelOpt or compressed-tensors store it), released names, the fused names of serving engines, and
those that transformers has in memory.

  glm5next-convert SRC DST           convert (this page)
  glm5next-convert inspect PATH      what a checkpoint is, from its headers alone
  glm5next-convert verify SRC DST    compare what was made with what it was made of
  glm5next-convert export SRC DST    back to the released format
each with --help of its own."""

_CONVERT_MORE = """\
examples:
  glm5next-convert GLM-5.3-Flash converted --dry-run
      what goes where, from the file headers alone: writes nothing, needs no memory
  glm5next-convert GLM-5.3-Flash converted
      every weight in the dtype it is stored in; FP8 blocks stay as they are
  glm5next-convert GLM-5.3-Flash converted --dtype bfloat16
      FP8 multiplied by its factors and rounded once
  glm5next-convert GLM-5.3-Flash gs://bucket/converted
      to a bucket; needs `pip install gcsfs`

then, in Python:
  model = glm5next_jax.load("converted")

A checkpoint on the Hugging Face Hub is downloaded first:
  hf download zai-org/GLM-5.3-Flash --local-dir GLM-5.3-Flash

However large the checkpoint is, it takes less than 1 GB of memory and DST's size of disk. If it is
killed, or the disk fills up, the same command continues: what was written is checked and kept.
Until it is complete, DST holds a folder UNFINISHED and load refuses it.

Every tensor must be used, or set aside for a stated reason, and every weight filled exactly once:
otherwise one report names all tensors that do not fit. The tensors of the vision tower and of the
multi-token prediction layer are not used yet and are carried along byte for byte in DST/unused.

exit status: 0 done, 2 the input or the disk is at fault (stderr says why), 130 interrupted."""

_INSPECT = """\
Says what a checkpoint is: format, layers, dtypes, bytes by component, what would be set aside and
why, and whether it is complete. Reads headers alone, so it takes seconds. Also for converted
directories, and for unfinished ones."""
_INSPECT_MORE = "exit status: 0 complete, 1 incomplete or damaged, 2 not such a checkpoint"

_VERIFY = """\
Compares a checkpoint with what was made of it, whatever the two formats: reads both once and holds
every weight against its origin, in the dtype that DST has. Values must be the same bit for bit,
or, where DST alone is in FP8, within half a step of it. Vision and MTP tensors are compared as
bytes."""
_VERIFY_MORE = """\
examples:
  glm5next-convert verify GLM-5.3-Flash converted
  glm5next-convert verify converted exported

exit status: 0 the same, 1 differences (listed), 2 one of them cannot be read."""

_EXPORT = """\
Writes a checkpoint, converted or released, in the released format, for PyTorch users: safetensors
files with the released names, an index, config and tokenizer. Vision and MTP tensors come out as
they went in. A killed export continues like a conversion."""
_EXPORT_MORE = """\
examples:
  glm5next-convert export converted exported
      every weight in the dtype that it has
  glm5next-convert export converted exported --dtype bfloat16
      as the released BF16 checkpoint
  glm5next-convert export converted exported --dtype fp8
      as the released FP8 one: blocks of 128 x 128, a factor of amax / 448 each, rounded to nearest

exit status: 0 done, 2 the input or the disk is at fault (stderr says why), 130 interrupted."""

_M_ARENA_MAX = -8  # of glibc's mallopt
_COMMANDS = ("inspect", "verify", "export")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv.pop(0) if argv and argv[0] in _COMMANDS else "convert"
    args = _parser(command).parse_args(argv)
    # Converting needs no accelerator, and must not take one that is in use.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    _share_freed_memory()
    name = "glm5next-convert" if command == "convert" else f"glm5next-convert {command}"
    try:
        return _RUN[command](args)
    except KeyboardInterrupt:
        kept = "; what was written is kept: the same command continues"
        print(
            f"{name}: interrupted{kept if command in ('convert', 'export') else ''}",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:  # a reader such as `head` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        if getattr(args, "json", False):
            print(json.dumps({"event": "error", "message": str(error)}), flush=True)
        return 2


def _share_freed_memory() -> None:
    """Makes threads share what glibc keeps of freed memory.

    Otherwise every thread keeps its own, which would be as much again as conversion needs. (To give
    it all back to the system costs a third of the speed.)
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)


# The commands import what they need late, so that --help answers at once.


def _convert(args: argparse.Namespace) -> int:
    from convert.converter import convert

    start = time.monotonic()
    summary = convert(
        args.source,
        args.destination,
        dtype=args.dtype,
        dry_run=args.dry_run,
        overwrite=args.overwrite,
        check_finite=not args.allow_non_finite,
        mode=_mode(args),
    )
    if args.dry_run and not args.json:
        print(summary.table, flush=True)
    else:
        _conclude(args, summary, start)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from convert.inspector import inspect

    report = inspect(args.path)
    print(json.dumps(report.as_json()) if args.json else report.text(), flush=True)
    return 0 if report.is_complete else 1


def _verify(args: argparse.Namespace) -> int:
    from convert.verifier import verify

    verdict = verify(args.source, args.destination, mode=_mode(args))
    if args.json:
        print(json.dumps({"event": "done", **dataclasses.asdict(verdict)}), flush=True)
    else:
        for difference in verdict.differences[:_MAX_LISTED]:
            print(f"  {difference}")
        if len(verdict.differences) > _MAX_LISTED:
            print(f"  … and {len(verdict.differences) - _MAX_LISTED} more")
        if verdict.differences or not args.quiet:
            print(verdict, flush=True)
    return 1 if verdict.differences else 0


def _export(args: argparse.Namespace) -> int:
    from convert.exporter import export

    start = time.monotonic()
    summary = export(
        args.source,
        args.destination,
        dtype=args.dtype,
        overwrite=args.overwrite,
        mode=_mode(args),
    )
    _conclude(args, summary, start)
    return 0


_MAX_LISTED = 40
_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "convert": _convert,
    "inspect": _inspect,
    "verify": _verify,
    "export": _export,
}


def _mode(args: argparse.Namespace) -> Any:
    return "json" if args.json else "quiet" if args.quiet else "auto"


def _conclude(args: argparse.Namespace, summary: Any, start: float) -> None:
    """The last line of a command that wrote, or would write, a directory."""
    seconds = time.monotonic() - start
    if args.json:
        fields = dataclasses.asdict(summary)
        fields.pop("table", None)
        event = {"event": "done", **fields, "seconds": round(seconds, 3)}
        print(json.dumps(event), flush=True)
    elif not args.quiet:
        print(f"{args.destination}: {summary}; {seconds:.1f} s", flush=True)


def _parser(command: str) -> argparse.ArgumentParser:
    description, epilog = {
        "convert": (_CONVERT, _CONVERT_MORE),
        "inspect": (_INSPECT, _INSPECT_MORE),
        "verify": (_VERIFY, _VERIFY_MORE),
        "export": (_EXPORT, _EXPORT_MORE),
    }[command]
    parser = argparse.ArgumentParser(
        prog="glm5next-convert" if command == "convert" else f"glm5next-convert {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command == "inspect":
        parser.add_argument("path", metavar="PATH", help="directory of the checkpoint, or a URL")
    else:
        parser.add_argument("source", metavar="SRC", help="directory to read, or a URL")
        what = "compare" if command == "verify" else "make"
        parser.add_argument("destination", metavar="DST", help=f"directory to {what}, or a URL")
    if command in ("convert", "export"):
        choices = {
            "convert": ("keep", "bfloat16", "float32"),
            "export": ("keep", "bfloat16", "fp8"),
        }[command]
        parser.add_argument(
            "--dtype",
            choices=choices,
            default="keep",
            help="dtype of the weights in DST (default: keep, that of SRC)",
        )
        parser.add_argument(
            "--overwrite",
            action="store_true",
            help="start over where DST is an earlier one of ours, which is deleted first",
        )
    if command == "convert":
        parser.add_argument(
            "--dry-run", action="store_true", help="print the mapping table and write nothing"
        )
        parser.add_argument(
            "--allow-non-finite",
            action="store_true",
            help="do not refuse NaN and infinite weights",
        )
    if command != "inspect":
        parser.add_argument("--quiet", action="store_true", help="no progress, no final line")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the result as JSON on stdout"
        + ("" if command == "inspect" else ", with a line of progress every few seconds"),
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from glm5next_jax import __version__

        print(f"{parser.prog} {__version__}")  # exit() would print to stderr
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
