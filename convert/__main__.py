"""Command `glm5next-convert`: a released checkpoint to JAX arrays."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

_DESCRIPTION = """\
Converts a released GLM-5.3-Flash checkpoint (config.json and safetensors files, BF16 or block
FP8) to arrays that glm5next_jax.load reads directly. DST appears complete or not at all."""

_EXAMPLES = """\
examples:
  glm5next-convert GLM-5.3-Flash converted --dry-run
      what goes where, from the file headers alone: writes nothing, needs no memory
  glm5next-convert GLM-5.3-Flash converted
      every weight in the dtype it is stored in; FP8 becomes bfloat16
  glm5next-convert GLM-5.3-Flash converted --dtype float32
      the exact product of FP8 weights and their factors
  glm5next-convert GLM-5.3-Flash converted --overwrite
      replaces an earlier conversion, once the new one is complete

then, in Python:
  model = glm5next_jax.load("converted")

A checkpoint on the Hugging Face Hub is downloaded first:
  hf download zai-org/GLM-5.3-Flash --local-dir GLM-5.3-Flash

Every tensor must be used, or set aside for a stated reason, and every weight filled exactly once:
otherwise one report names all tensors that do not fit. The tensors of the vision tower and of the
multi-token prediction layer are not used yet and are carried along byte for byte in DST/unused.

exit status: 0 done, 2 the input is at fault (stderr says why), 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    args = _parser().parse_args(argv)
    # Converting needs no accelerator, and must not take one that is in use.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    start = time.monotonic()
    try:
        from convert.converter import convert  # late, so that --help answers at once

        summary = convert(
            args.source,
            args.destination,
            dtype=args.dtype,
            dry_run=args.dry_run,
            overwrite=args.overwrite,
            quiet=args.quiet,
        )
    except KeyboardInterrupt:
        print("glm5next-convert: interrupted; nothing was written", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError) as error:
        print(f"glm5next-convert: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        try:
            print(summary.table, flush=True)
        except BrokenPipeError:  # a reader such as `head` has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if not args.quiet:
        print(f"{args.destination}: {summary}; {time.monotonic() - start:.1f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glm5next-convert",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", help="directory of the released checkpoint")
    parser.add_argument("destination", metavar="DST", help="directory to make")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "keep"),
        default="keep",
        help="dtype of the weights in DST (default: keep)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the mapping table and write nothing"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace DST if it is a converted checkpoint"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no final line")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from glm5next_jax import __version__

        print(f"{parser.prog} {__version__}")  # exit() would print to stderr
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
