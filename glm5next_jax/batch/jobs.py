"""The requests of a batch job: read, checked, batched, answered and written.

Nothing here knows how tokens are made. `run` takes the engine as a function with the signature of
`glm5next_jax.generate`; reading and writing need no model at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from glm5next_jax.sampling import SamplingParams
from glm5next_jax.tokenizer import Tokenizer

KINDS = ("prompt", "messages", "token_ids")
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "logprobs")
_FIELDS = (*KINDS, "id", "max_new_tokens", *SAMPLING_FIELDS)
_SEEDS = 2**32
# Legal inside a JSON string, and a line end to readers that follow Unicode (`str.splitlines`).
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


@dataclasses.dataclass(frozen=True)
class Request:
    """One well-formed line, not yet seen by a tokenizer.

    Attributes:
      line: its number in the input file, from 1.
      id: the line's own id, or its number.
      kind: which of `prompt`, `messages` and `token_ids` it holds, and `content` what it holds.
      overrides: the sampling fields that the line states, and `max_new_tokens`.
    """

    line: int
    id: str | int
    kind: str
    content: Any
    overrides: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that cannot be answered, and why."""

    line: int
    id: str | int
    error: str


@dataclasses.dataclass(frozen=True)
class Job:
    """A request ready for the engine."""

    line: int
    id: str | int
    token_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams


@dataclasses.dataclass
class Totals:
    """What a run did; `seconds` is time inside the engine, compilations included."""

    answers: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0


def parse(data: bytes) -> list[Request | BadLine]:
    """Reads JSONL; a bad line becomes a `BadLine` and the others are still read.

    Args:
      data: the file. Lines end with a newline; blank lines are skipped, and still counted.

    Returns:
      One entry per line that is not blank, in the file's order.
    """
    entries: list[Request | BadLine] = []
    used: dict[tuple[type, str | int], int] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        name: str | int = number
        try:
            fields = _parse_object(raw)
            name = _read_id(fields, number)
            first = used.setdefault((type(name), name), number)
            if first != number:
                raise ValueError(f"id {json.dumps(name)} is already used on line {first}")
            entries.append(_read_request(fields, number, name))
        except ValueError as error:
            entries.append(BadLine(number, name, str(error)))
    return entries


def prepare(
    request: Request,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_length: int,
    defaults: Mapping[str, Any],
) -> Job | BadLine:
    """Turns a request into token ids and sampling settings, or into the reason why not.

    Args:
      request: a line that `parse` accepted.
      tokenizer: the checkpoint's; None where only token ids can be answered.
      vocab_size: token ids must be below it.
      max_length: most tokens of a prompt and its answer together.
      defaults: `max_new_tokens`, and any fields of `SamplingParams`, for what the line leaves open.
        A line that states no seed gets the default seed plus its line number less one: lines
        with one prompt differ, and a rerun gives the same answers.
    """
    settings = {"seed": 0, **defaults, **request.overrides}
    if "seed" not in request.overrides:
        settings["seed"] = (settings["seed"] + request.line - 1) % _SEEDS
    max_new_tokens = settings.pop("max_new_tokens")
    try:
        token_ids = _token_ids(request, tokenizer, vocab_size)
        total = len(token_ids) + max_new_tokens
        if total > max_length:
            raise ValueError(
                f"{len(token_ids)} prompt tokens and {max_new_tokens} new ones make {total}; the "
                f"model takes at most {max_length}"
            )
        return Job(request.line, request.id, token_ids, max_new_tokens, SamplingParams(**settings))
    except ValueError as error:
        return BadLine(request.line, request.id, str(error))


def plan(jobs: Iterable[Job], batch_size: int) -> list[list[Job]]:
    """Batches of similar prompt lengths, so that they share buckets and little is padding.

    The longest come first: a batch that does not fit into memory fails at once.
    """
    by_length = sorted(jobs, key=lambda job: (-len(job.token_ids), -job.max_new_tokens, job.line))
    return [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]


def run(
    batches: Sequence[Sequence[Job]],
    generate: Callable[..., Sequence[Any]],
    model: Any,
    *,
    chunk_size: int | None,
    on_answers: Callable[[dict[int, dict[str, Any]]], None],
) -> Totals:
    """Answers batch after batch.

    A short last batch is filled up with requests for one token, which are dropped: another number
    of rows would be another compilation of the whole model.

    Args:
      batches: from `plan`.
      generate: `glm5next_jax.generate`, or anything with its signature.
      model: handed to `generate`, which knows its end-of-sequence tokens.
      chunk_size: prompt tokens per prefill step; None leaves it to the engine.
      on_answers: called after each batch with its answers, line number to answer.

    Returns:
      Counts and the time inside the engine.
    """
    totals = Totals()
    for batch in batches:
        filler = Job(0, "", batch[0].token_ids[:1], 1, SamplingParams())
        rows = [*batch, *[filler] * (len(batches[0]) - len(batch))]
        start = time.perf_counter()
        completions = generate(
            model,
            [job.token_ids for job in rows],
            max_new_tokens=[job.max_new_tokens for job in rows],
            sampling=[job.sampling for job in rows],
            eos_token_ids=None,
            chunk_size=chunk_size,
        )
        totals.seconds += time.perf_counter() - start
        pairs = list(zip(batch, completions[: len(batch)], strict=True))
        for job, completion in pairs:
            totals.answers += 1
            totals.prompt_tokens += len(job.token_ids)
            totals.new_tokens += len(completion.token_ids)
        on_answers({job.line: answer(job, completion) for job, completion in pairs})
    return totals


def answer(job: Job, completion: Any) -> dict[str, Any]:
    """The output line of an answered request."""
    fields = {
        "id": job.id,
        "text": completion.text,
        "token_ids": [int(token) for token in completion.token_ids],
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": int(completion.num_prompt_tokens),
        "num_new_tokens": len(completion.token_ids),
    }
    if job.sampling.logprobs:
        # JSON has no infinity: a token that could not have been drawn gets null.
        values = [float(value) for value in completion.logprobs]
        fields["logprobs"] = [value if math.isfinite(value) else None for value in values]
    return fields


def bad_answer(bad: BadLine) -> dict[str, Any]:
    """The output line in place of an answer."""
    return {"id": bad.id, "line": bad.line, "error": bad.error}


class AnswerFile:
    """Answers on their way to a file: none is lost when a run dies, none is seen half written.

    Each answer is appended to PATH.partial, as a whole line, and flushed with its batch, in the
    order in which answers are finished. `finish` writes PATH in the order of the requests, in one
    step (a rename), and removes PATH.partial. A run that ends otherwise leaves PATH as it was, and
    PATH.partial if it holds an answer (errors alone are found again at once).
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.partial = self.partial_path(path)
        self._answers: dict[int, str] = {}
        self._holds_answers = False
        self._file = open(self.partial, "w", encoding="utf-8", newline="\n")

    @staticmethod
    def partial_path(path: pathlib.Path) -> pathlib.Path:
        return path.with_name(path.name + ".partial")

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if not self._holds_answers:
            self.partial.unlink(missing_ok=True)

    def add(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Appends answers, line number to answer, and flushes them."""
        for line, fields in answers.items():
            text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
            text = text.translate(_LINE_ENDS)
            self._answers[line] = text
            self._holds_answers |= "error" not in fields
            self._file.write(text + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Puts the finished file in its place, in the order of the line numbers."""
        sorted_path = self.path.with_name(self.path.name + ".sorted")
        with open(sorted_path, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(self._answers[line] + "\n" for line in sorted(self._answers))
            file.flush()
            os.fsync(file.fileno())
        os.replace(sorted_path, self.path)
        self._file.close()
        self.partial.unlink()


class NoAnswerFile:
    """In the place of an `AnswerFile` where another process writes."""

    def __enter__(self) -> NoAnswerFile:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def add(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        pass

    def finish(self) -> None:
        pass


def _parse_object(raw: bytes) -> dict[str, Any]:
    """One line as a JSON object; ValueError says what else it is."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        # A lone surrogate is valid JSON and not valid text: it could be neither encoded nor echoed.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8: {error.reason} at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ValueError("a string holds a lone surrogate, which is not valid Unicode") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {_type_name(value)}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"not valid JSON: {name} is not a JSON number")


def _read_id(fields: Mapping[str, Any], number: int) -> str | int:
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id must be a string or an integer, found {_type_name(name)}")
    return name


def _read_request(fields: Mapping[str, Any], number: int, name: str | int) -> Request:
    unknown = sorted(fields.keys() - set(_FIELDS))
    if unknown:
        listed = ", ".join(json.dumps(field) for field in unknown)
        raise ValueError(f"unknown field {listed}; a line may hold {', '.join(_FIELDS)}")
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        found = " and ".join(kinds) if kinds else "none"
        raise ValueError(f"expected exactly one of prompt, messages and token_ids, found {found}")
    overrides = {
        field: _checked(field, fields[field])
        for field in (*SAMPLING_FIELDS, "max_new_tokens")
        if field in fields
    }
    # Ranges are SamplingParams's own business, and known before a model is loaded.
    SamplingParams(**{k: v for k, v in overrides.items() if k != "max_new_tokens"})
    content = fields[kinds[0]]
    if kinds[0] == "prompt":
        if not isinstance(content, str):
            raise ValueError(f"prompt must be a string, found {_type_name(content)}")
    elif not isinstance(content, list):
        raise ValueError(f"{kinds[0]} must be a list, found {_type_name(content)}")
    if kinds[0] == "token_ids":
        for i, token in enumerate(content):
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError(f"token_ids[{i}] must be an integer, found {_type_name(token)}")
    if not content:
        raise ValueError(f"{kinds[0]} is empty")
    return Request(number, name, kinds[0], content, overrides)


def _checked(field: str, value: Any) -> Any:
    """The value of a sampling field, of the type that it must have."""
    if field == "logprobs":
        good, wanted = isinstance(value, bool), "true or false"
    elif field in ("temperature", "top_p", "min_p"):
        good, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
        # A literal such as 1e999 reads as infinity, and 10**400 does not fit into a float at all.
        good = good and abs(value) <= 1e30
    else:
        good, wanted = isinstance(value, int) and not isinstance(value, bool), "an integer"
    if not good:
        raise ValueError(f"{field} must be {wanted}, found {_shown(value)}")
    if field == "max_new_tokens" and value < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {value}")
    return float(value) if field in ("temperature", "top_p", "min_p") else value


def _token_ids(request: Request, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    if request.kind == "token_ids":
        token_ids = request.content
    elif tokenizer is None:
        raise ValueError(
            f"the model's directory has no tokenizer.json; give token_ids instead of {request.kind}"
        )
    elif request.kind == "prompt":
        token_ids = tokenizer.encode(request.content)
    else:
        text = tokenizer.apply_chat_template(request.content)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        raise ValueError(f"{request.kind} gives no tokens")
    for i, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            where = f"token_ids[{i}]" if request.kind == "token_ids" else f"token {i} of the prompt"
            raise ValueError(f"{where} is {token}; the model has token ids 0 to {vocab_size - 1}")
    return list(token_ids)


def _type_name(value: Any) -> str:
    """JSON's name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "a list", str: "a string", int: "an integer"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    """A scalar as it was written, anything larger by its type."""
    plain = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**12)
    return json.dumps(value) if plain else _type_name(value)
