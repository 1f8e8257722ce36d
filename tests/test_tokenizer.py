"""The tokenizer: text to ids and back, streams of text, chat templates, generation defaults."""

import datetime
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5next_jax.tokenizer import GenerationConfig, Tokenizer
from tests.source_tree import ROOT

EXAMPLE = ROOT / "examples" / "tiny-glm53-flash"
FIRST_SPECIAL = 280
USER, ASSISTANT, THINK = 287, 288, 304


def load(path=EXAMPLE) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load()


@pytest.fixture
def directory(tmp_path):
    """A copy of the example's text files, to be changed."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EXAMPLE / file, tmp_path / file)
    return tmp_path


def user(content):
    return {"role": "user", "content": content}


class TestText:
    def test_bytes_and_merges(self, tokenizer):
        # A byte's id is its value, and the merges of "hello" are the last two of the table.
        assert tokenizer.encode("xyz!") == list(b"xyz!")
        assert tokenizer.encode("hello") == [FIRST_SPECIAL - 1]
        assert tokenizer.encode("é") == list("é".encode())

    def test_special_tokens_in_text_are_recognised(self, tokenizer):
        assert tokenizer.encode("<|user|>x<think>") == [USER, ord("x"), THINK]

    def test_decode_skips_special_tokens_unless_asked(self, tokenizer):
        ids = [USER, ord("x"), THINK]
        assert tokenizer.decode(ids) == "x<think>"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>x<think>"

    def test_ids_without_a_token_give_no_text(self, tokenizer):
        assert tokenizer.decode([ord("x"), 319, ord("y")]) == "xy"

    def test_a_lone_surrogate_is_refused(self, tokenizer):
        with pytest.raises(ValueError, match="not valid Unicode: surrogates not allowed"):
            tokenizer.encode("\ud800")

    def test_a_post_processor_adds_tokens_unless_told_not_to(self, directory):
        edit(
            directory / "tokenizer.json",
            post_processor={
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<sop>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {"<sop>": {"id": "<sop>", "ids": [284], "tokens": ["<sop>"]}},
            },
        )
        tokenizer = load(directory)
        assert tokenizer.encode("x") == [284, ord("x")]
        assert tokenizer.encode("x", add_special_tokens=False) == [ord("x")]

    def test_a_saved_truncation_cuts_nothing(self, directory):
        edit(
            directory / "tokenizer.json",
            truncation={
                "direction": "Right",
                "max_length": 2,
                "strategy": "LongestFirst",
                "stride": 0,
            },
        )
        assert len(load(directory).encode("wxyz")) == 4

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_round_trip(self, text):
        tokenizer = load()
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_ids_that_the_library_would_shift_are_refused(self, directory):
        content = json.loads((directory / "tokenizer.json").read_text())
        del content["added_tokens"][1]
        edit(directory / "tokenizer.json", added_tokens=content["added_tokens"])
        with pytest.raises(ValueError, match=r"'\[gMASK\]' has id 282 in the file and 281 when"):
            Tokenizer.from_directory(directory)

    def test_without_a_tokenizer_file_there_is_no_tokenizer(self, directory):
        (directory / "tokenizer.json").unlink()
        assert Tokenizer.from_directory(directory) is None

    @pytest.mark.parametrize("text", ["version https://git-lfs", "[]", "{}"])
    def test_a_file_that_is_no_tokenizer_is_named(self, directory, text):
        (directory / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=r"tokenizer\.json: (not valid|expected|has no)"):
            Tokenizer.from_directory(directory)

    @pytest.mark.parametrize(
        "model",
        [
            {},
            {"type": "Nope"},
            {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]},
        ],
    )
    def test_a_tokenizer_that_the_library_refuses_is_named(self, directory, model):
        edit(directory / "tokenizer.json", model=model)
        with pytest.raises(
            ValueError, match=r"tokenizer\.json: not a tokenizer that can be read: "
        ):
            Tokenizer.from_directory(directory)
        (directory / "tokenizer.json").write_text(json.dumps({"model": model}))
        with pytest.raises(
            ValueError, match=r"tokenizer\.json: not a tokenizer that can be read: "
        ):
            Tokenizer.from_directory(directory)


class TestStream:
    def pieces(self, tokenizer, ids, **options):
        stream = tokenizer.stream(**options)
        return [*[stream.push(token) for token in ids], stream.finish()]

    def test_a_character_comes_when_it_is_complete(self, tokenizer):
        assert self.pieces(tokenizer, list("a€b".encode())) == ["a", "", "", "€", "b", ""]

    def test_an_unfinished_character_is_replaced_at_the_end(self, tokenizer):
        assert self.pieces(tokenizer, list("€".encode())[:2]) == ["", "", "\ufffd"]

    def test_an_impossible_byte_is_replaced_at_once(self, tokenizer):
        assert self.pieces(tokenizer, [0xFF, ord("a")]) == ["\ufffd", "a", ""]

    def test_special_tokens(self, tokenizer):
        assert self.pieces(tokenizer, [USER, THINK]) == ["", "<think>", ""]
        shown = self.pieces(tokenizer, [USER, THINK], skip_special_tokens=False)
        assert shown == ["<|user|>", "<think>", ""]

    @given(st.lists(st.integers(0, 319), max_size=40), st.booleans())
    def test_the_pieces_joined_are_the_decoded_text(self, ids, skip):
        tokenizer = load()
        pieces = self.pieces(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)

    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    def test_valid_text_never_shows_a_replacement(self, text):
        tokenizer = load()
        for piece in self.pieces(tokenizer, list(text.encode())):
            assert "\ufffd" not in piece.replace("\ufffd", "", text.count("\ufffd"))

    def test_an_added_token_with_a_space_reads_as_it_is(self, directory):
        content = json.loads((directory / "tokenizer.json").read_text())
        extra = {**content["added_tokens"][0], "id": 316, "content": "two words", "special": False}
        edit(directory / "tokenizer.json", added_tokens=[*content["added_tokens"], extra])
        tokenizer = load(directory)
        assert self.pieces(tokenizer, [316]) == ["two words", ""]
        assert tokenizer.decode([316]) == "two words"

    def test_another_decoder_is_refused(self, directory):
        edit(
            directory / "tokenizer.json",
            decoder={
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": "always",
                "split": True,
            },
        )
        with pytest.raises(ValueError, match="Metaspace.*ByteLevel"):
            load(directory).stream()


class TestChatTemplate:
    def test_a_conversation(self, tokenizer):
        messages = [
            {"role": "system", "content": "Be brief."},
            user("Hi."),
            {"role": "assistant", "content": "Hello.", "reasoning_content": "hm"},
            user([{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]),
        ]
        assert tokenizer.apply_chat_template(messages) == (
            "[gMASK]<sop><|system|>Be brief.<|user|>Hi.<|assistant|><think>hm</think>Hello."
            "<|user|>And now?<|assistant|><think>"
        )

    def test_the_rendered_text_is_one_token_per_marker(self, tokenizer):
        text = tokenizer.apply_chat_template([user("x")])
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [282, 284, USER, ord("x"), ASSISTANT, THINK]

    def test_options_reach_the_template(self, tokenizer):
        text = tokenizer.apply_chat_template([user("x")], enable_thinking=False)
        assert text == "[gMASK]<sop><|user|>x<|assistant|><think></think>"
        text = tokenizer.apply_chat_template([user("x")], add_generation_prompt=False)
        assert text == "[gMASK]<sop><|user|>x"

    def test_tools_and_tool_calls(self, tokenizer):
        call = {"function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
        messages = [
            user("1+2"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3"},
        ]
        text = tokenizer.apply_chat_template(messages, tools=[{"name": "add", "doc": "<é>"}])
        assert text == (
            "[gMASK]<sop><|system|>Tools that may be called, one schema a line:\n"
            '{"name": "add", "doc": "<é>"}\n'
            "<|user|>1+2<|assistant|><think></think><tool_call>add"
            "<arg_key>a</arg_key><arg_value>1</arg_value>"
            "<arg_key>b</arg_key><arg_value>é</arg_value></tool_call>"
            "<|observation|><tool_response>3</tool_response><|assistant|><think>"
        )
        assert isinstance(call["function"]["arguments"], str)  # the caller's messages stay

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "messages is empty"),
            ("hello", "messages must be a list, got str"),
            ([user("a"), "b"], r"messages\[1\] must be an object, got str"),
            ([{"content": "a"}], r"messages\[0\]: role must be one of .* got None"),
            ([{"role": "root", "content": "a"}], r"messages\[0\]: role must be .* got 'root'"),
            ([user(None)], r"messages\[0\]: content must be text or a list of parts, got nothing"),
            ([user(3)], r"messages\[0\]: content must be text or a list of parts, got int"),
            ([user([])], r"messages\[0\]: content is an empty list"),
            ([user(["a"])], r"messages\[0\]: a part must be an object, got str"),
            ([user([{"type": "poem"}])], r"messages\[0\]: part type must be 'text', got 'poem'"),
            ([user([{"type": "text"}])], r"messages\[0\]: a part of type 'text' must have"),
            ([user("a"), user([{"type": "image"}])], r"messages\[1\]: images are not supported"),
            ([user([{"type": "image_url"}])], r"messages\[0\]: images are not supported yet"),
            ([user([{"type": "video"}])], r"messages\[0\]: videos are not supported yet"),
            (
                [{"role": "assistant", "tool_calls": ["x"]}],
                r"messages\[0\]: tool_calls must be a list of objects",
            ),
            (
                [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}],
                r"messages\[0\]: a tool call must name its function",
            ),
            (
                [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
                r"messages\[0\]: tool arguments are not valid JSON",
            ),
            (
                [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "3"}]}],
                r"messages\[0\]: tool arguments must be an object, got 3",
            ),
        ],
    )
    def test_a_bad_message_is_named(self, tokenizer, messages, message):
        with pytest.raises(ValueError, match=message):
            tokenizer.apply_chat_template(messages)

    def test_a_template_can_refuse(self, directory):
        (directory / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
        with pytest.raises(ValueError, match="chat template refused the messages: no system"):
            load(directory).apply_chat_template([user("x")])

    @pytest.mark.parametrize(
        ("expression", "message"),
        [
            ("1 // 0", "by zero"),
            ("10.0 ** 400", "Numerical result out of range|too large"),
            ("'{} {}'.format(1)", "tuple index out of range"),
            ("'x'.index('y')", "substring not found"),
            ("'%d' % 'x'", "number is required"),
        ],
    )
    def test_a_template_that_fails_refuses(self, directory, expression, message):
        (directory / "chat_template.jinja").write_text("{{ " + expression + " }}")
        with pytest.raises(
            ValueError, match=f"^the chat template refused the messages: .*{message}"
        ):
            load(directory).apply_chat_template([user("x")])

    def test_a_template_cannot_reach_python(self, directory):
        (directory / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
        with pytest.raises(ValueError, match="refused the messages: .*unsafe"):
            load(directory).apply_chat_template([user("x")])

    def test_a_template_that_is_not_one(self, directory):
        (directory / "chat_template.jinja").write_text("a\n{% if %}")
        with pytest.raises(ValueError, match="not valid, line 2"):
            load(directory).apply_chat_template([user("x")])

    def test_what_templates_may_use(self, directory):
        (directory / "chat_template.jinja").write_text(
            "{% for m in messages %}\n{% if loop.index0 == 1 %}{% break %}{% endif %}\n"
            "{{ m.content }}{{ eos_token }}{{ strftime_now('%Y') }}{{ {'a': 'é<'} | tojson }}\n"
            "{% endfor %}"
        )
        before = datetime.datetime.now().year
        text = load(directory).apply_chat_template([user("x"), user("y")])
        years = {before, datetime.datetime.now().year}
        assert text in {f'x<|endoftext|>{year}{{"a": "é<"}}\n' for year in years}

    def test_the_template_may_stand_in_the_tokenizer_config(self, directory):
        (directory / "chat_template.jinja").unlink()
        edit(directory / "tokenizer_config.json", chat_template="{{ messages[0].content }}!")
        assert load(directory).apply_chat_template([user("x")]) == "x!"

    def test_named_templates(self, directory):
        (directory / "chat_template.jinja").unlink()
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "with tools"},
        ]
        edit(directory / "tokenizer_config.json", chat_template=named)
        assert load(directory).apply_chat_template([user("x")]) == "plain"
        assert load(directory).apply_chat_template([user("x")], tools=[{}]) == "with tools"
        edit(directory / "tokenizer_config.json", chat_template=named[1:])
        with pytest.raises(ValueError, match=r"\['tool_use'\], and none of them is 'default'"):
            load(directory).apply_chat_template([user("x")])
        edit(directory / "tokenizer_config.json", chat_template=[{"name": "default"}])
        with pytest.raises(ValueError, match="chat_template must be a string or a list"):
            load(directory)

    def test_a_missing_template_names_the_files(self, directory):
        (directory / "chat_template.jinja").unlink()
        with pytest.raises(ValueError, match=r"chat_template\.jinja .* tokenizer_config\.json"):
            load(directory).apply_chat_template([user("x")])
        (directory / "tokenizer_config.json").unlink()
        assert load(directory).encode("x") == [ord("x")]


class TestGenerationConfig:
    def write(self, directory, **fields):
        (directory / "generation_config.json").write_text(json.dumps(fields))
        return GenerationConfig.from_directory(directory)

    def test_the_example(self):
        stated = GenerationConfig.from_directory(EXAMPLE)
        assert stated == GenerationConfig((280, 287, 289), True, 1.0, None, 0.95)
        assert stated.sampling == {"temperature": 1.0, "top_p": 0.95}
        assert load().generation == stated

    def test_a_missing_file_states_nothing(self, tmp_path):
        assert GenerationConfig.from_directory(tmp_path) == GenerationConfig()
        assert GenerationConfig().sampling == {}

    @pytest.mark.parametrize(
        ("fields", "sampling"),
        [
            ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}),
            ({"do_sample": True}, {"temperature": 1.0}),
            ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "top_k": 5}),
            ({"top_k": -1}, {"top_k": 0}),
            ({}, {}),
        ],
    )
    def test_sampling(self, tmp_path, fields, sampling):
        assert self.write(tmp_path, **fields).sampling == sampling

    def test_one_token_may_end_a_generation(self, tmp_path):
        assert self.write(tmp_path, eos_token_id=3).eos_token_ids == (3,)
        assert self.write(tmp_path, eos_token_id=None).eos_token_ids == ()

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("eos_token_id", "x"),
            ("eos_token_id", [1, True]),
            ("do_sample", 1),
            ("temperature", "hot"),
            ("top_p", [0.9]),
            ("top_k", 1.5),
        ],
    )
    def test_a_wrong_type_is_named(self, tmp_path, field, value):
        with pytest.raises(ValueError, match=rf"generation_config\.json: expected .*{field}"):
            self.write(tmp_path, **{field: value})


def edit(file, **fields):
    """Replaces fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
