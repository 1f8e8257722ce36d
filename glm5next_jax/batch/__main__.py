"""Command `glm5next-generate`: answers a file of requests with a checkpoint."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from etils import epath
from tqdm import tqdm

import glm5next_jax
from glm5next_jax import processes
from glm5next_jax.batch import jobs
from glm5next_jax.compilation import compilations
from glm5next_jax.sampling import SamplingParams
from glm5next_jax.sharding import make_mesh
from glm5next_jax.tokenizer import GenerationConfig

_PROGRAM = "glm5next-generate"
_MAX_NEW_TOKENS = 256
_ERRORS_SHOWN = 20
_EPILOG = """\
each line of IN.jsonl is a JSON object with exactly one of prompt, messages and token_ids:
  {"prompt": "Once upon a time"}
  {"messages": [{"role": "user", "content": "Say hello."}]}
  {"token_ids": [464, 2068, 7586]}
and, if wanted, an id (otherwise the line number) and the line's own sampling fields:
  {"id": "q7", "prompt": "Pick a number:", "temperature": 0.8, "top_p": 0.9, "top_k": 40,
   "min_p": 0.05, "seed": 7, "max_new_tokens": 16, "logprobs": true}      (on one line)
A prompt is taken as it is; messages go through the checkpoint's chat template. Blank lines are
skipped.

each line of OUT.jsonl answers one line, in the same order:
  {"id": "q7", "text": "42", "token_ids": [19, 17], "finish_reason": "stop",
   "num_prompt_tokens": 5, "num_new_tokens": 2, "logprobs": [-0.1, -0.4]}
  {"id": 3, "line": 3, "error": "prompt is empty"}                        (could not be answered)
finish_reason is "stop" (a token that ends the answer) or "length" (max_new_tokens).

a line's settings come from the line, else from the options above, else from the checkpoint's
generation_config.json, else they are greedy. A line without a seed gets SEED plus its line number
less one, so that equal prompts are sampled differently and a rerun gives the same answers.

answers are kept in OUT.jsonl.partial, in the order in which they are finished, until all are
there; then OUT.jsonl appears at once. A run that breaks off leaves OUT.jsonl.partial.

exit status: 0 every line answered; 1 some lines could not be, and say so; 2 nothing done, or
broken off; 130 interrupted.

example:
  glm5next-generate --model examples/tiny-glm53-flash --input examples/prompts.jsonl \\
      --output answers.jsonl --max-new-tokens 32
"""


class UserError(Exception):
    """A mistake of the whole run, told in a few lines and without a traceback."""


def main(
    argv: Sequence[str] | None = None,
    *,
    load: Callable[..., Any] | None = None,
    generate: Callable[..., Any] | None = None,
) -> int:
    """Runs the command.

    Args:
      argv: arguments without the program's name; None takes those of the process.
      load, generate: stand-ins for `glm5next_jax.load` and `glm5next_jax.generate`.

    Returns:
      The exit status: 0, 1 (lines that could not be answered), 2 or 130 (see `--help`).
    """
    args = _parser().parse_args(argv)
    try:
        with processes.leaving_on_errors():
            return _run(args, load or glm5next_jax.load, generate or glm5next_jax.generate)
    except UserError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        status = 130
    processes.leave(status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Answer a file of requests with a GLM-5.3-Flash checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="released or converted checkpoint directory")
    add("--input", required=True, metavar="IN.jsonl", help="requests, one JSON object per line")
    add("--output", required=True, metavar="OUT.jsonl", help="answers; must not exist yet")
    add("--overwrite", action="store_true", help="replace OUT.jsonl, and OUT.jsonl.partial")
    add("--batch-size", type=_positive, default=8, metavar="N", help="requests at once (8)")
    add("--max-new-tokens", type=_positive, metavar="N", help=f"per answer ({_MAX_NEW_TOKENS})")
    add("--temperature", type=float, metavar="T", help="0 is greedy")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; 0 is off")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest tokens up to mass P")
    add("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest")
    add("--seed", type=int, metavar="SEED", help="seed of the first line (0)")
    add("--logprobs", action="store_true", default=None, help="log probability of each token")
    add("--chunk-size", type=_positive, metavar="N", help="prompt tokens per prefill step")
    add("--dtype", choices=("bfloat16", "float32"), help="compute dtype (the checkpoint's)")
    add(
        "--weights",
        choices=("fp8", "bf16", "float32"),
        help="weights at rest: fp8 keeps the FP8 blocks of a released checkpoint (compute dtype)",
    )
    add("--compilation-cache", metavar="DIR", help="keep compiled programs there for later runs")
    add("--quiet", action="store_true", help="no progress and no totals on stderr")
    processes.add_flags(parser)
    version = f"{_PROGRAM} {glm5next_jax.__version__}"
    add("--version", action="version", version=version)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _run(args: argparse.Namespace, load: Callable, generate: Callable) -> int:
    flags = {
        name: value for name in jobs.SAMPLING_FIELDS if (value := getattr(args, name)) is not None
    }
    try:
        SamplingParams(**flags)
        processes.check_flags(args)
        processes.start(args)
    except ValueError as error:
        raise UserError(error) from None
    # Only the process that writes looks: another's machine may hold an old file of that name.
    output = _output_path(args) if processes.is_first() else pathlib.Path(args.output)
    entries = jobs.parse(_read_input(args.input))
    if not entries:
        raise UserError(f"{args.input} holds no requests")
    if args.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", args.compilation_cache)
        # A cache that was asked for by name holds every program, however quick to compile.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    try:
        mesh = None if args.mesh is None else make_mesh(**args.mesh)
        if mesh is None and processes.are_several():
            raise ValueError(f"{jax.process_count()} processes need a --mesh over their devices")
    except ValueError as error:
        raise UserError(error) from error
    note = _silent if args.quiet or not processes.is_first() else _note
    if processes.are_several():
        note(
            f"{jax.process_count()} processes, {jax.device_count()} devices; if one is lost the "
            f"others stop within {args.heartbeat + 30} s: then start all of them again with "
            "--overwrite"
        )
    model, defaults = None, {}
    if any(isinstance(entry, jobs.Request) for entry in entries):
        note(f"loading {args.model}")
        start = time.perf_counter()
        try:
            model = load(args.model, mesh=mesh, dtype=args.dtype, weights=args.weights)
            stated = GenerationConfig.from_directory(args.model)
            sampling: dict[str, Any] = {"temperature": 0.0, **stated.sampling, **flags}
            SamplingParams(**sampling)
        except (ValueError, OSError, MemoryError) as error:
            raise UserError(error) from None
        note(f"loaded in {time.perf_counter() - start:.1f} s")
        defaults = {"max_new_tokens": args.max_new_tokens or _MAX_NEW_TOKENS} | sampling

    ready, bad = [], []
    for entry in entries:
        if isinstance(entry, jobs.Request):
            assert model is not None
            entry = jobs.prepare(
                entry,
                tokenizer=model.tokenizer,
                vocab_size=model.config.vocab_size,
                max_length=model.config.max_position_embeddings,
                defaults=defaults,
            )
        (bad if isinstance(entry, jobs.BadLine) else ready).append(entry)

    compiled = len(compilations())
    try:
        with _answer_file(output) as answers:
            answers.add({entry.line: jobs.bad_answer(entry) for entry in bad})
            totals = _generate(args, ready, generate, model, answers)
            answers.finish()
    finally:
        partial = jobs.AnswerFile.partial_path(output)
        if partial.exists() and processes.is_first():
            print(f"{_PROGRAM}: finished answers are kept in {partial}", file=sys.stderr)
    if totals.answers:
        note(_throughput(totals, len(compilations()) - compiled))
    if bad and processes.is_first():
        print(_summary(bad, len(entries), output), file=sys.stderr)
    return 1 if bad else 0


def _generate(
    args: argparse.Namespace,
    ready: list[jobs.Job],
    generate: Callable,
    model: Any,
    answers: jobs.AnswerFile | jobs.NoAnswerFile,
) -> jobs.Totals:
    """Answers every job, with a progress bar; what the user can mend becomes a UserError."""
    show = sys.stderr.isatty() and not args.quiet and processes.is_first()
    with tqdm(total=len(ready), unit="request", file=sys.stderr, disable=not show) as bar:

        def on_answers(batch: dict[int, dict[str, Any]]) -> None:
            answers.add(batch)
            bar.update(len(batch))

        try:
            return jobs.run(
                jobs.plan(ready, args.batch_size),
                generate,
                model,
                chunk_size=args.chunk_size,
                on_answers=on_answers,
            )
        except ValueError as error:
            raise UserError(error) from error
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                if not processes.are_several():
                    raise
                raise UserError(f"{processes.LOST}\n{str(error).splitlines()[0]}") from error
            raise UserError(
                f"out of memory with --batch-size {args.batch_size}; try a smaller one, or a "
                f"smaller --chunk-size\n{str(error).splitlines()[0]}"
            ) from error


def _output_path(args: argparse.Namespace) -> pathlib.Path:
    """OUT.jsonl as a path that may be written; refuses to replace anything unasked."""
    if "://" in args.output:
        raise UserError(f"--output {args.output}: answers can be written to local paths only")
    path = pathlib.Path(args.output)
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: {path.parent} is not a directory")
    if path.is_dir():
        raise UserError(f"--output {path}: is a directory")
    if "://" not in args.input and path.resolve() == pathlib.Path(args.input).resolve():
        raise UserError(f"--output {path}: is the input file")
    partial = jobs.AnswerFile.partial_path(path)
    for taken, what in ((path, "exists"), (partial, "holds answers of a run that broke off")):
        if taken.exists() and not args.overwrite:
            raise UserError(f"{taken} {what}; move it away, or pass --overwrite")
    return path


def _read_input(name: str) -> bytes:
    path = epath.Path(name)
    if not path.exists():
        raise UserError(f"--input {name}: no such file")
    if path.is_dir():
        raise UserError(f"--input {name}: is a directory")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--input {name}: {error.strerror or error}") from None


def _answer_file(path: pathlib.Path) -> jobs.AnswerFile | jobs.NoAnswerFile:
    if not processes.is_first():
        return jobs.NoAnswerFile()
    try:
        return jobs.AnswerFile(path)
    except OSError as error:
        raise UserError(f"--output {path}: {error.strerror or error}") from None


def _throughput(totals: jobs.Totals, compiled: int) -> str:
    seconds = max(totals.seconds, 1e-9)
    return (
        f"{totals.answers} answers in {totals.seconds:.1f} s: "
        f"{totals.prompt_tokens} prompt tokens ({totals.prompt_tokens / seconds:.1f}/s), "
        f"{totals.new_tokens} new tokens ({totals.new_tokens / seconds:.1f}/s), "
        f"{compiled} compilations"
    )


def _summary(bad: Sequence[jobs.BadLine], total: int, output: pathlib.Path) -> str:
    ordered = sorted(bad, key=lambda entry: entry.line)
    rows = [f"{_PROGRAM}: {len(bad)} of {total} lines could not be answered:"]
    rows += [f"  line {entry.line}: {entry.error}" for entry in ordered[:_ERRORS_SHOWN]]
    if len(ordered) > _ERRORS_SHOWN:
        rows.append(f"  and {len(ordered) - _ERRORS_SHOWN} more, all in {output}")
    return "\n".join(rows)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _silent(text: str) -> None:
    del text


if __name__ == "__main__":
    sys.exit(main())
