"""Batch jobs: what is read, what is asked of the engine, what is written.

The engine is a fake one, but for one test of the whole command.
"""

import dataclasses
import json
import re
import types

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import glm5next_jax
from glm5next_jax.batch import jobs
from glm5next_jax.batch.__main__ import main
from glm5next_jax.sampling import SamplingParams
from glm5next_jax.tokenizer import Tokenizer
from tests.source_tree import ROOT

EXAMPLE = ROOT / "examples" / "tiny-glm53-flash"
VOCAB = 320
_CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@dataclasses.dataclass
class Call:
    prompts: list
    max_new_tokens: list
    sampling: list
    options: dict


@dataclasses.dataclass(frozen=True)
class Completion:
    token_ids: tuple
    text: str | None
    logprobs: tuple | None
    finish_reason: str
    num_prompt_tokens: int


class FakeEngine:
    """Answers each prompt with its tokens reversed, and remembers what it was asked."""

    def __init__(self, fail_at: int | None = None, error: BaseException | None = None):
        self.calls = []
        self.loaded = []
        self._fail_at, self._error = fail_at, error

    def load(self, path, *, mesh=None, dtype=None, weights=None):
        self.loaded.append((path, dtype, weights))
        return types.SimpleNamespace(
            config=types.SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=4096),
            tokenizer=Tokenizer.from_directory(path),
        )

    def generate(self, model, prompts, *, max_new_tokens, sampling, **options):
        if len(self.calls) == self._fail_at:
            assert self._error is not None
            raise self._error
        self.calls.append(Call(prompts, max_new_tokens, sampling, options))
        completions = []
        for prompt, limit, params in zip(prompts, max_new_tokens, sampling, strict=True):
            ids = tuple(prompt[::-1][:limit])
            completions.append(
                Completion(
                    token_ids=ids,
                    text=model.tokenizer.decode(ids) if model.tokenizer else None,
                    logprobs=(-0.5, float("-inf"))[: len(ids)] if params.logprobs else None,
                    finish_reason="length" if len(ids) == limit else "stop",
                    num_prompt_tokens=len(prompt),
                )
            )
        return completions

    def sampling(self, i=0):
        return [params for call in self.calls for params in call.sampling][i]


class Run:
    """A finished command: its status, its answers, and what it asked of the engine."""

    def __init__(self, tmp_path, lines, *flags, engine=None, model=EXAMPLE, overwrite=False):
        source = tmp_path / "in.jsonl"
        rows = [row if isinstance(row, bytes) else row.encode() for row in map(_row, lines)]
        source.write_bytes(b"\n".join(rows) + b"\n")
        self.output = tmp_path / "out.jsonl"
        self.partial = tmp_path / "out.jsonl.partial"
        self.engine = engine or FakeEngine()
        argv = ["--model", str(model), "--input", str(source), "--output", str(self.output)]
        argv += ["--overwrite"] * overwrite + list(flags)
        self.status = main(argv, load=self.engine.load, generate=self.engine.generate)

    @property
    def answers(self):
        return read(self.output)


def _row(line):
    return line if isinstance(line, str | bytes) else json.dumps(line)


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ids_of(text):
    return list(text.encode())


class TestAnswers:
    def test_the_three_kinds(self, tmp_path):
        lines = [
            {"id": "a", "prompt": "wxyz"},
            {"id": 7, "messages": [{"role": "user", "content": "q"}], "max_new_tokens": 2},
            {"token_ids": [120, 121], "logprobs": True},
        ]
        run = Run(tmp_path, lines, "--temperature", "0")
        assert run.status == 0
        assert run.answers == [
            {
                "id": "a",
                "text": "zyxw",
                "token_ids": ids_of("zyxw"),
                "finish_reason": "stop",
                "num_prompt_tokens": 4,
                "num_new_tokens": 4,
            },
            {
                "id": 7,
                "text": "<think>",
                "token_ids": [304, 288],
                "finish_reason": "length",
                "num_prompt_tokens": 6,
                "num_new_tokens": 2,
            },
            {
                "id": 3,
                "text": "yx",
                "token_ids": [121, 120],
                "finish_reason": "stop",
                "num_prompt_tokens": 2,
                "num_new_tokens": 2,
                "logprobs": [-0.5, None],
            },
        ]

    def test_chat_text_is_not_given_special_tokens_twice(self, tmp_path):
        run = Run(tmp_path, [{"messages": [{"role": "user", "content": "q"}]}])
        assert run.engine.calls[0].prompts == [[282, 284, 287, ord("q"), 288, 304]]

    def test_blank_lines_count_and_give_no_answer(self, tmp_path):
        run = Run(tmp_path, ["", {"prompt": "ab"}, "   \r", {"prompt": "cd"}])
        assert [answer["id"] for answer in run.answers] == [2, 4]

    def test_windows_line_ends_and_a_byte_order_mark(self, tmp_path):
        run = Run(tmp_path, [b'\xef\xbb\xbf{"prompt": "ab"}\r', b'{"prompt": "cd"}\r'])
        assert run.status == 0 and len(run.answers) == 2

    def test_text_is_written_as_it_is(self, tmp_path):
        run = Run(tmp_path, [{"id": "é\u2028", "prompt": "x"}])
        text = run.output.read_text(encoding="utf-8")
        assert run.answers[0]["id"] == "é\u2028" and "é" in text
        assert len(text.splitlines()) == 1


class TestBatches:
    def test_similar_lengths_share_a_batch_and_answers_keep_the_order(self, tmp_path):
        lengths = [3, 9, 1, 7, 5]
        lines = [{"token_ids": [65 + i] * n} for i, n in enumerate(lengths)]
        run = Run(tmp_path, lines, "--batch-size", "2")
        assert [list(map(len, call.prompts)) for call in run.engine.calls] == [
            [9, 7],
            [5, 3],
            [1, 1],
        ]
        assert [answer["num_new_tokens"] for answer in run.answers] == lengths
        assert [answer["id"] for answer in run.answers] == [1, 2, 3, 4, 5]

    def test_a_short_last_batch_is_filled_up_for_one_token(self, tmp_path):
        run = Run(tmp_path, [{"token_ids": [1, 2]}] * 3, "--batch-size", "2")
        assert run.engine.calls[1].prompts == [[1, 2], [1]]
        assert run.engine.calls[1].max_new_tokens == [256, 1]
        assert len(run.answers) == 3

    def test_a_single_batch_has_no_filler(self, tmp_path):
        run = Run(tmp_path, [{"token_ids": [1, 2]}], "--batch-size", "8")
        assert run.engine.calls[0].prompts == [[1, 2]]

    def test_the_engine_decides_what_ends_an_answer(self, tmp_path):
        run = Run(tmp_path, [{"prompt": "ab"}], "--chunk-size", "64", "--weights", "fp8")
        assert run.engine.calls[0].options == {"eos_token_ids": None, "chunk_size": 64}
        assert run.engine.loaded == [(str(EXAMPLE), None, "fp8")]
        run = Run(tmp_path, [{"prompt": "ab"}], overwrite=True)
        assert run.engine.calls[0].options == {"eos_token_ids": None, "chunk_size": None}


class TestSettings:
    def test_the_checkpoint_decides_first(self, tmp_path):
        run = Run(tmp_path, [{"prompt": "ab"}])
        assert run.engine.sampling() == SamplingParams(temperature=1.0, top_p=0.95)
        assert run.engine.calls[0].max_new_tokens == [256]

    def test_without_a_generation_config_answers_are_greedy(self, tmp_path):
        (tmp_path / "model").mkdir()
        run = Run(tmp_path, [{"token_ids": [1]}], model=tmp_path / "model")
        assert run.engine.sampling() == SamplingParams()

    def test_flags_come_before_it(self, tmp_path):
        flags = "--temperature 0.5 --top-k 9 --min-p 0.1 --seed 3 --logprobs --max-new-tokens 5"
        run = Run(tmp_path, [{"prompt": "ab"}], *flags.split())
        assert run.engine.sampling() == SamplingParams(0.5, 9, 0.95, 0.1, 3, True)
        assert run.engine.calls[0].max_new_tokens == [5]

    def test_the_line_comes_before_the_flags(self, tmp_path):
        own = {
            "temperature": 2, "top_k": 1, "top_p": 0.25, "min_p": 0.5, "seed": 11,
            "logprobs": False, "max_new_tokens": 1,
        }  # fmt: skip
        flags = "--temperature 0.5 --top-k 9 --top-p 0.9 --min-p 0.1 --seed 3 --logprobs"
        run = Run(tmp_path, [{"prompt": "ab", **own}], *flags.split(), "--max-new-tokens", "5")
        assert run.engine.sampling() == SamplingParams(2.0, 1, 0.25, 0.5, 11, False)
        assert run.engine.calls[0].max_new_tokens == [1]
        assert "logprobs" not in run.answers[0]

    def test_lines_without_a_seed_get_different_ones(self, tmp_path):
        lines = [{"prompt": "ab"}, {"prompt": "ab", "seed": 3}, {"prompt": "ab"}]
        run = Run(tmp_path, lines, "--seed", "4294967295")
        assert [p.seed for p in run.engine.calls[0].sampling] == [4294967295, 3, 1]


MALFORMED = {
    "not JSON": ("{'prompt': 'x'}", "not valid JSON: Expecting property name"),
    "cut off": ('{"prompt": "x"', "not valid JSON: Expecting ',' delimiter at column 15"),
    "NaN": ('{"prompt": "x", "temperature": NaN}', "not valid JSON: NaN is not a JSON number"),
    "nested": ("[" * 100_000, "not valid JSON: nested too deeply"),
    "long number": ('{"seed": ' + "1" * 5000 + "}", "Exceeds the limit"),
    "bytes": (b'{"prompt": "\xff"}', "not valid UTF-8: invalid start byte at byte 12"),
    "surrogate": ('{"prompt": "\\ud800"}', "a string holds a lone surrogate"),
    "list": ("[1]", "expected a JSON object, found a list"),
    "string": ('"x"', "expected a JSON object, found a string"),
    "null": ("null", "expected a JSON object, found null"),
    "no kind": ({"seed": 1}, "expected exactly one of prompt, messages and token_ids, found none"),
    "two kinds": ({"prompt": "x", "token_ids": [1]}, "found prompt and token_ids"),
    "unknown": ({"prompt": "x", "temprature": 1}, 'unknown field "temprature"; a line may hold'),
    "empty prompt": ({"prompt": ""}, "prompt is empty"),
    "empty messages": ({"messages": []}, "messages is empty"),
    "empty ids": ({"token_ids": []}, "token_ids is empty"),
    "prompt type": ({"prompt": 3}, "prompt must be a string, found an integer"),
    "prompt null": ({"prompt": None}, "prompt must be a string, found null"),
    "messages type": ({"messages": "x"}, "messages must be a list, found a string"),
    "ids type": ({"token_ids": "x"}, "token_ids must be a list, found a string"),
    "id in ids": ({"token_ids": [1, "2"]}, "token_ids[1] must be an integer, found a string"),
    "bool in ids": ({"token_ids": [True]}, "token_ids[0] must be an integer, found a boolean"),
    "float in ids": ({"token_ids": [1.0]}, "token_ids[0] must be an integer, found a number"),
    "id too large": ({"token_ids": [0, VOCAB]}, "token_ids[1] is 320; the model has token ids 0 t"),
    "id negative": ({"token_ids": [-1]}, "token_ids[0] is -1; the model has token ids 0 to 319"),
    "role": ({"messages": [{"role": "x", "content": ""}]}, "messages[0]: role must be one of"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0]: images are not supported yet",
    ),
    "id type": ({"id": 1.5, "prompt": "x"}, "id must be a string or an integer, found a number"),
    "id null": ({"id": None, "prompt": "x"}, "id must be a string or an integer, found null"),
    "temperature": ({"prompt": "x", "temperature": -1}, "temperature must be finite, >= 0, got -1"),
    "temperature type": ({"prompt": "x", "temperature": "1"}, "temperature must be a number, fou"),
    "infinite": (
        '{"prompt": "x", "temperature": 1e999}',
        "temperature must be a number, found Inf",
    ),
    "top_k": ({"prompt": "x", "top_k": -1}, "top_k must be an integer in 0..2**31-1, got -1"),
    "top_k too large": ({"prompt": "x", "top_k": 3_000_000_000}, "in 0..2**31-1, got 3000000000"),
    "top_k type": ({"prompt": "x", "top_k": 2.0}, "top_k must be an integer, found 2.0"),
    "top_p": ({"prompt": "x", "top_p": 0}, "top_p must be in (0, 1], got 0"),
    "min_p": ({"prompt": "x", "min_p": 2}, "min_p must be in [0, 1), got 2"),
    "seed": ({"prompt": "x", "seed": -1}, "seed must be an integer in 0..2**32-1, got -1"),
    "seed type": ({"prompt": "x", "seed": True}, "seed must be an integer, found true"),
    "logprobs": ({"prompt": "x", "logprobs": 1}, "logprobs must be true or false, found 1"),
    "max_new_tokens": ({"prompt": "x", "max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    "max_new_tokens type": ({"prompt": "x", "max_new_tokens": "9"}, "max_new_tokens must be an in"),
    "too long": (
        {"prompt": "x", "max_new_tokens": 4096},
        "1 prompt tokens and 4096 new ones make 4097; the model takes at most 4096",
    ),
}


class TestMalformedLines:
    @pytest.mark.parametrize("kind", MALFORMED)
    def test_a_bad_line_says_what_is_wrong_and_the_others_are_answered(
        self, tmp_path, capsys, kind
    ):
        line, message = MALFORMED[kind]
        run = Run(tmp_path, [{"prompt": "ab"}, line, {"prompt": "cd"}], "--quiet")
        assert run.status == 1
        first, bad, last = run.answers
        assert (first["id"], first["text"], last["id"], last["text"]) == (1, "ba", 3, "dc")
        assert bad.keys() == {"id", "line", "error"}
        assert bad["id"] == bad["line"] == 2
        assert message in bad["error"]
        summary = capsys.readouterr().err
        assert "1 of 3 lines could not be answered:\n  line 2: " in summary
        assert message in summary

    def test_a_duplicate_id(self, tmp_path):
        lines = [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": 1, "prompt": "z"}]
        run = Run(tmp_path, [*lines, {"id": 5, "prompt": "v"}, {"prompt": "w"}])
        assert run.status == 1
        assert [answer.get("error") for answer in run.answers] == [
            None, 'id "a" is already used on line 1', None, None, "id 5 is already used on line 4",
        ]  # fmt: skip
        assert (run.answers[1]["id"], run.answers[1]["line"]) == ("a", 2)

    def test_a_bad_line_keeps_its_id(self, tmp_path):
        run = Run(tmp_path, [{"id": "q", "prompt": ""}, {"id": "q", "prompt": "x"}])
        assert run.answers[0] == {"id": "q", "line": 1, "error": "prompt is empty"}
        assert run.answers[1]["error"] == 'id "q" is already used on line 1'

    def test_only_bad_lines_need_no_model(self, tmp_path):
        run = Run(tmp_path, ["x", "[]"], model=tmp_path / "nowhere")
        assert run.status == 1 and run.engine.loaded == [] and len(run.answers) == 2
        assert not run.partial.exists()

    def test_a_long_list_is_cut(self, tmp_path, capsys):
        run = Run(tmp_path, ["x"] * 25)
        printed = capsys.readouterr().err
        assert "line 20:" in printed and "line 21:" not in printed
        assert f"and 5 more, all in {run.output}" in printed

    def test_text_without_a_tokenizer(self, tmp_path):
        (tmp_path / "model").mkdir()
        lines = [{"prompt": "x"}, {"messages": [{}]}, {"token_ids": [1, 2]}]
        run = Run(tmp_path, lines, model=tmp_path / "model")
        assert run.status == 1
        assert "no tokenizer.json; give token_ids instead of prompt" in run.answers[0]["error"]
        assert "no tokenizer.json; give token_ids instead of messages" in run.answers[1]["error"]
        assert (run.answers[2]["text"], run.answers[2]["token_ids"]) == (None, [2, 1])


class TestUserErrors:
    """Mistakes of the whole run: status 2, a short message, nothing written."""

    def failed(self, tmp_path, capsys, lines, *flags, **options):
        run = Run(tmp_path, lines, *flags, **options)
        printed = capsys.readouterr().err
        assert run.status == 2
        assert "Traceback" not in printed
        return run, printed

    def test_no_such_input(self, tmp_path, capsys):
        argv = ["--model", "m", "--input", str(tmp_path / "no"), "--output", str(tmp_path / "o")]
        assert main(argv) == 2
        assert capsys.readouterr().err.endswith("no: no such file\n")
        argv[3] = str(tmp_path)
        assert main(argv) == 2
        assert "is a directory" in capsys.readouterr().err

    def test_an_empty_input(self, tmp_path, capsys):
        _, printed = self.failed(tmp_path, capsys, ["", " "])
        assert "in.jsonl holds no requests" in printed

    def test_a_bad_model_directory(self, tmp_path, capsys):
        source, output = tmp_path / "in", tmp_path / "out"
        source.write_text('{"prompt": "x"}\n')
        argv = ["--model", str(tmp_path / "no"), "--input", str(source), "--output", str(output)]
        assert main(argv) == 2  # the real `load`
        printed = capsys.readouterr().err
        assert "glm5next-generate: error: " in printed and str(tmp_path / "no") in printed
        assert sorted(tmp_path.iterdir()) == [source]

    def test_too_little_memory_for_the_model(self, tmp_path, capsys):
        engine = FakeEngine()
        engine.load = raising(MemoryError("needs 5 GB, 2 GB are free"))
        _, printed = self.failed(tmp_path, capsys, [{"prompt": "x"}], engine=engine)
        assert printed.endswith("error: needs 5 GB, 2 GB are free\n")

    def test_the_output_exists(self, tmp_path, capsys):
        (tmp_path / "out.jsonl").write_text("old")
        run, printed = self.failed(tmp_path, capsys, [{"prompt": "x"}])
        assert "out.jsonl exists; move it away, or pass --overwrite" in printed
        assert run.output.read_text() == "old" and run.engine.loaded == []
        assert Run(tmp_path, [{"prompt": "x"}], overwrite=True).status == 0

    def test_an_unfinished_run_is_not_lost(self, tmp_path, capsys):
        (tmp_path / "out.jsonl.partial").write_text("old")
        run, printed = self.failed(tmp_path, capsys, [{"prompt": "x"}])
        assert "holds answers of a run that broke off" in printed
        assert run.partial.read_text() == "old"
        assert Run(tmp_path, [{"prompt": "x"}], overwrite=True).status == 0
        assert not run.partial.exists()

    def test_places_that_cannot_be_written(self, tmp_path, capsys):
        source = tmp_path / "in.jsonl"
        source.write_text('{"prompt": "x"}\n')
        for output, message in (
            (tmp_path / "no" / "out", "is not a directory"),
            (tmp_path, "is a directory"),
            (source, "is the input file"),
            ("gs://bucket/out", "local paths only"),
        ):
            argv = ["--model", "m", "--input", str(source), "--output", str(output), "--overwrite"]
            assert main(argv) == 2
            assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--top-p", "1.5"), "top_p must be in (0, 1]"),
            (("--temperature", "nan"), "temperature must be finite"),
            (("--seed", "-1"), "seed must be an integer in"),
        ],
    )
    def test_a_flag_out_of_range(self, tmp_path, capsys, flags, message):
        run, printed = self.failed(tmp_path, capsys, [{"prompt": "x"}], *flags)
        assert message in printed and run.engine.loaded == []

    @pytest.mark.parametrize("flags", [("--batch-size", "0"), ("--top-k", "x"), ("--nope",)])
    def test_a_flag_that_is_none(self, tmp_path, capsys, flags):
        with pytest.raises(SystemExit) as exit_info:
            Run(tmp_path, [{"prompt": "x"}], *flags)
        assert exit_info.value.code == 2
        assert "usage: glm5next-generate" in capsys.readouterr().err


class TestBrokenOff:
    """A run that dies keeps every answer that was finished."""

    LINES = [{"token_ids": [65] * n} for n in (1, 2, 3, 4)]

    def test_finished_answers_are_kept(self, tmp_path, capsys):
        engine = FakeEngine(fail_at=1, error=ValueError("no such chunk"))
        run = Run(tmp_path, [*self.LINES, "x"], "--batch-size", "2", engine=engine)
        printed = capsys.readouterr().err
        assert run.status == 2 and "error: no such chunk" in printed
        assert f"finished answers are kept in {run.partial}" in printed
        assert [answer["id"] for answer in read(run.partial)] == [5, 4, 3]
        assert not run.output.exists()

    def test_the_old_output_stays(self, tmp_path):
        (tmp_path / "out.jsonl").write_text("old")
        engine = FakeEngine(fail_at=1, error=ValueError("x"))
        run = Run(tmp_path, self.LINES, "--batch-size", "2", engine=engine, overwrite=True)
        assert run.output.read_text() == "old" and len(read(run.partial)) == 2

    def test_errors_alone_are_not_worth_keeping(self, tmp_path):
        engine = FakeEngine(fail_at=0, error=ValueError("x"))
        run = Run(tmp_path, [*self.LINES, "x"], engine=engine)
        assert run.status == 2 and not run.partial.exists() and not run.output.exists()

    def test_out_of_memory_says_what_to_change(self, tmp_path, capsys):
        error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 GB\nmore")
        run = Run(tmp_path, self.LINES, engine=FakeEngine(fail_at=0, error=error))
        printed = capsys.readouterr().err
        assert run.status == 2 and "out of memory with --batch-size 8; try a smaller" in printed
        assert "RESOURCE_EXHAUSTED: 5 GB\n" in printed and "more\n" not in printed

    def test_a_fault_of_ours_keeps_its_traceback(self, tmp_path):
        for error in (jax.errors.JaxRuntimeError("INTERNAL: x"), AssertionError("x")):
            engine = FakeEngine(fail_at=1, error=error)
            with pytest.raises(type(error)):
                Run(tmp_path, self.LINES, "--batch-size", "2", engine=engine, overwrite=True)
            assert len(read(tmp_path / "out.jsonl.partial")) == 2

    def test_an_interrupt(self, tmp_path, capsys):
        engine = FakeEngine(fail_at=1, error=KeyboardInterrupt())
        run = Run(tmp_path, self.LINES, "--batch-size", "2", engine=engine)
        printed = capsys.readouterr().err
        assert run.status == 130 and printed.endswith("interrupted\n")
        assert len(read(run.partial)) == 2

    def test_answers_are_there_after_each_batch(self, tmp_path):
        seen = []
        engine = FakeEngine()
        generate = engine.generate

        def watching(*args, **kwargs):
            seen.append(len(read(tmp_path / "out.jsonl.partial")))
            return generate(*args, **kwargs)

        engine.generate = watching
        Run(tmp_path, self.LINES, "--batch-size", "1", engine=engine)
        assert seen == [0, 1, 2, 3]


class TestOutside:
    def test_totals_on_stderr(self, tmp_path, capsys):
        Run(tmp_path, [{"token_ids": [1, 2, 3]}, {"token_ids": [4]}])
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "2 answers in 0.0 s: 4 prompt tokens (" in captured.err
        assert "4 new tokens (" in captured.err and "0 compilations" in captured.err

    def test_quiet(self, tmp_path, capsys):
        Run(tmp_path, [{"prompt": "x"}], "--quiet")
        assert capsys.readouterr() == ("", "")

    def test_version_and_help(self, capsys):
        for flag in ("--version", "--help"):
            with pytest.raises(SystemExit) as exit_info:
                main([flag])
            assert exit_info.value.code == 0
        printed = capsys.readouterr().out
        assert printed.startswith("glm5next-generate ")
        for word in ("--compilation-cache", *jobs.KINDS, *jobs.SAMPLING_FIELDS):
            assert word in printed

    def test_the_lines_that_help_shows_are_well_formed(self, capsys):
        with pytest.raises(SystemExit):
            main(["--help"])
        text = capsys.readouterr().out.split("each line of OUT.jsonl")[0].replace(",\n   ", ", ")
        shown = [row.split("  (on")[0] for row in text.splitlines() if row.startswith('  {"')]
        requests = jobs.parse("\n".join(shown).encode())
        assert [request.kind for request in requests if isinstance(request, jobs.Request)] == [
            "prompt", "messages", "token_ids", "prompt",
        ]  # fmt: skip

    def test_a_compilation_cache(self, tmp_path, cache_settings):
        Run(tmp_path, [{"prompt": "x"}], "--compilation-cache", str(tmp_path / "cache"))
        assert getattr(jax.config, _CACHE_SETTINGS[0]) == str(tmp_path / "cache")


class TestWithTheModel:
    """No stand-ins: the example checkpoint, loaded and run."""

    # Lengths of two chunks of 5 each, so that every pair of them is one compiled shape, which no
    # other test has compiled already.
    PROMPT, CHUNK, NEW = "Once upon?", 5, 4
    LINES = [
        {"id": "short", "token_ids": [282, 284, 287, 72, 105, 288]},
        {"id": "text", "prompt": PROMPT},
        {"id": "long", "token_ids": [282, 284, 287, 120, 121, 122, 288, 304], "logprobs": True},
    ]

    @pytest.mark.slow
    def test_the_answers_are_those_of_generate(self, tmp_path, capsys, cache_settings):
        source, output, cache = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "cache"
        source.write_text("".join(json.dumps(line) + "\n" for line in self.LINES))
        argv = ["--model", str(EXAMPLE), "--input", str(source), "--output", str(output)]
        argv += ["--temperature", "0", "--dtype", "float32", "--compilation-cache", str(cache)]
        argv += ["--max-new-tokens", str(self.NEW), "--chunk-size", str(self.CHUNK)]

        assert main([*argv, "--batch-size", "2"]) == 0

        printed = capsys.readouterr().err
        totals = re.search(r"3 answers in .* (\d+) compilations\n$", printed)
        assert totals is not None and int(totals[1]) > 0, printed
        assert any(cache.iterdir())

        model = glm5next_jax.load(EXAMPLE, dtype="float32")
        assert model.tokenizer is not None
        prompts = [
            line.get("token_ids") or model.tokenizer.encode(self.PROMPT) for line in self.LINES
        ]
        assert {-(-len(prompt) // self.CHUNK) for prompt in prompts} == {2}
        # Other pairs than the command's, which go by length.
        expected = [
            completion
            for pair in (prompts[:2], [prompts[2]] * 2)
            for completion in glm5next_jax.generate(
                model,
                pair,
                max_new_tokens=self.NEW,
                sampling=SamplingParams(temperature=0.0, logprobs=True),
                chunk_size=self.CHUNK,
            )
        ]
        answers = read(output)
        assert [answer["id"] for answer in answers] == ["short", "text", "long"]
        for answer, completion, prompt in zip(answers, expected, prompts, strict=False):
            assert answer["token_ids"] == list(completion.token_ids)
            assert answer["text"] == completion.text
            assert answer["finish_reason"] == completion.finish_reason
            assert answer["num_prompt_tokens"] == len(prompt)
        assert answers[2]["logprobs"] == pytest.approx(expected[2].logprobs, abs=1e-5)


@pytest.fixture
def cache_settings():
    """Lets a test choose JAX's compilation cache, and gives the old one back."""
    before = {name: getattr(jax.config, name) for name in _CACHE_SETTINGS}
    # A process opens its cache once, on first use.
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call
