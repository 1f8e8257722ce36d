"""Text in and out of a checkpoint directory: its tokenizer, chat template and generation defaults.

Everything is read from the files that a released directory ships (`tokenizer.json`,
`tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`); nothing about tokens is
written down in this code. A directory without `tokenizer.json` has no `Tokenizer`, and can still be
given token ids.
"""

from __future__ import annotations

import codecs
import copy
import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from etils import epath
from tokenizers import decoders

from glm5next_jax import files
from glm5next_jax.checks import is_int
from glm5next_jax.errors import printable

_ROLES = ("system", "user", "assistant", "tool")
_MEDIA = {
    "image": "images", "image_url": "images", "input_image": "images",
    "video": "videos", "video_url": "videos", "input_video": "videos",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What a checkpoint's `generation_config.json` says; None where it says nothing.

    Attributes:
      eos_token_ids: tokens that end a generation; empty when the file names none.
      do_sample: False asks for greedy decoding whatever the other fields say.
      temperature, top_k, top_p: sampling settings as the file states them.
    """

    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> GenerationConfig:
        """Reads `path/generation_config.json`; a missing file states nothing.

        Raises:
          ValueError: the file is not a JSON object, or a field has the wrong type.
        """
        file = files.contained_file(files.require_driver(path), "generation_config.json")
        if not file.exists():
            return cls()
        fields = files.read_json_object(file)

        eos = fields.get("eos_token_id")
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(is_int(token) and token >= 0 for token in eos):
            raise ValueError(f"{file}: expected token ids, found eos_token_id={eos!r}")
        if not isinstance(fields.get("do_sample"), bool | None):
            raise ValueError(f"{file}: expected a boolean, found {fields['do_sample']=}")
        for name in ("temperature", "top_p"):
            value = fields.get(name)
            if value is not None and not (is_int(value) or isinstance(value, float)):
                raise ValueError(f"{file}: expected a number, found {name}={value!r}")
        top_k = fields.get("top_k")
        if top_k is not None and not is_int(top_k):
            raise ValueError(f"{file}: expected an integer, found {top_k=}")
        return cls(
            eos_token_ids=tuple(eos),
            do_sample=fields.get("do_sample"),
            temperature=fields.get("temperature"),
            # Engines write "no top-k" as 0 or as -1.
            top_k=None if top_k is None else max(top_k, 0),
            top_p=fields.get("top_p"),
        )

    @property
    def sampling(self) -> dict[str, float | int]:
        """The settings as `SamplingParams` arguments; left out where the file leaves it open.

        `do_sample: false` is greedy (temperature 0). A file that states a temperature without
        `do_sample` means to be sampled at it. `do_sample: true` alone is temperature 1.
        """
        if self.do_sample is False:
            return {"temperature": 0.0}
        temperature = self.temperature
        if temperature is None and self.do_sample:
            temperature = 1.0
        stated = {"temperature": temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {name: value for name, value in stated.items() if value is not None}


class TextStream:
    """Text of a token stream, piece by piece; made by `Tokenizer.stream`.

    A character may be spread over several tokens. Its bytes are held back until it is complete, so
    no piece ever holds half a character, and the pieces joined are exactly `Tokenizer.decode` of
    all the tokens. Bytes that can no longer become valid UTF-8 turn into U+FFFD, as they do there.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        data = self._tokenizer.token_bytes(token_id, self._skip_special_tokens)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Ends the stream: what was held back, or the empty string."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """Tokenizer and chat template of a checkpoint directory; made by `from_directory`.

    Attributes:
      path: the directory, for messages.
      generation: what the directory's `generation_config.json` says.
    """

    def __init__(
        self,
        path: str,
        backend: tokenizers.Tokenizer,
        templates: Mapping[str, str],
        named_tokens: Mapping[str, str],
        generation: GenerationConfig,
    ):
        self.path = path
        self.generation = generation
        self._backend = backend
        self._templates = dict(templates)
        self._compiled: dict[str, jinja2.Template] = {}
        self._named_tokens = dict(named_tokens)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer | None:
        """Reads the text files of a checkpoint directory, local or any URL that etils opens.

        Returns:
          None where there is no `tokenizer.json`. The other files may be missing; a method that
          needs one says so.

        Raises:
          ValueError: a file is there and cannot be read as what it should be.
        """
        root = files.require_driver(path)
        file = files.contained_file(root, "tokenizer.json")
        if not file.exists():
            return None
        data = files.read_bytes(file, files.TOKENIZER.num_bytes)
        parsed = files.parse_json_object(data, file, files.TOKENIZER)
        if "model" not in parsed:
            raise ValueError(f"{file}: has no `model`, so it is not a tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:
            # The library has no class of its own for files it refuses, and panics on some: that is
            # no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            what = printable(str(error))
            raise ValueError(f"{file}: not a tokenizer that can be read: {what}") from None
        for token in parsed.get("added_tokens") or []:
            # The library numbers added tokens itself, and would silently shift those after a gap.
            found = backend.token_to_id(token["content"])
            if found != token["id"]:
                raise ValueError(
                    f"{file}: {token['content']!r} has id {token['id']} in the file and {found} "
                    "when loaded; expected added tokens without gaps"
                )
        # A prompt is never cut or padded because the tokenizer was saved that way.
        backend.no_truncation()
        backend.no_padding()

        file = files.contained_file(root, "tokenizer_config.json")
        config = files.read_json_object(file) if file.exists() else {}
        named = {}
        for name in _NAMED_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named[name] = token

        template_file = files.contained_file(root, "chat_template.jinja")
        if template_file.exists():
            templates = {"default": files.read_text(template_file, files.TEMPLATE_BYTES)}
        else:
            templates = _named_templates(config.get("chat_template"), file)
        return cls(str(root), backend, templates, named, GenerationConfig.from_directory(root))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, in which special tokens written out (`<|user|>`) are recognised.

        Args:
          text: any string without lone surrogates.
          add_special_tokens: let the tokenizer's post-processor add its own tokens, where it has
            one. Text that a chat template rendered holds them already: pass False.

        Raises:
          ValueError: the text is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error.reason}") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know give no text."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A fresh decoder for one stream of tokens.

        Raises:
          ValueError: the tokenizer's decoder is not byte-level.
        """
        decoder = self._backend.decoder
        if not isinstance(decoder, decoders.ByteLevel):
            raise ValueError(
                f"{self.path}: tokenizer.json has the decoder {type(decoder).__name__}; streams of "
                "text need a ByteLevel decoder, which released checkpoints have"
            )
        return TextStream(self, skip_special_tokens)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one token of a byte-level vocabulary stands for; empty when unknown."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return token.encode("utf-8")  # an added token, stored as it reads

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Renders a conversation with the checkpoint's own template.

        Args:
          messages: each a mapping with `role` (system, user, assistant, tool) and `content`: a
            string, or a list of `{"type": "text", "text": ...}`. An assistant message may have
            `tool_calls` instead; their `arguments` may be JSON text, and other keys pass through.
          add_generation_prompt: end with the opening of the assistant's answer.
          tools: JSON schemas of the functions that the model may call.
          template_kwargs: variables of the template, such as `enable_thinking`.

        Returns:
          The prompt's text, special tokens written out: `encode(text, add_special_tokens=False)`.

        Raises:
          ValueError: a message is malformed or holds an image or video (the message says which
            one), there is no template, or the template refuses the conversation.
        """
        template = self._template("tool_use" if tools and "tool_use" in self._templates else None)
        conversation = _checked_messages(messages)
        try:
            return template.render(
                {"documents": None}
                | self._named_tokens
                | template_kwargs
                | {
                    "messages": conversation,
                    "tools": None if tools is None else copy.deepcopy(list(tools)),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError,
        ) as error:  # fmt: skip
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def _template(self, name: str | None) -> jinja2.Template:
        if not self._templates:
            raise ValueError(
                f"{self.path}: no chat template; looked for chat_template.jinja and for "
                "chat_template in tokenizer_config.json. Give prompt or token_ids instead"
            )
        name = name or ("default" if "default" in self._templates else None)
        if name is None:
            raise ValueError(
                f"{self.path}: tokenizer_config.json names the chat templates "
                f"{sorted(self._templates)}, and none of them is 'default'"
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._templates[name])
            except jinja2.TemplateSyntaxError as error:
                raise ValueError(
                    f"{self.path}: the chat template is not valid, line {error.lineno}: {error}"
                ) from None
            except (RecursionError, SyntaxError, MemoryError) as error:
                # Jinja compiles to Python, whose own parser has limits of depth.
                raise ValueError(f"{self.path}: the chat template is not valid: {error}") from None
        return self._compiled[name]


def _environment() -> jinja2.Environment:
    """The environment that Hugging Face chat templates are written for, sandboxed likewise."""

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own filter escapes for HTML, which would change the prompt.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages that a template can read; ValueError names the first bad one."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; expected at least one")
    checked = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} must be an object, got {type(message).__name__}")
        if message.get("role") not in _ROLES:
            raise ValueError(f"{where}: role must be one of {_ROLES}, got {message.get('role')!r}")
        message = copy.deepcopy(dict(message))
        content = message.get("content")
        calls = message.get("tool_calls")
        if calls is not None:
            message["tool_calls"] = _checked_tool_calls(calls, where)
        if isinstance(content, list):
            _check_parts(content, where)
        elif content is None and message["role"] == "assistant" and calls:
            pass  # an assistant may call a tool without a word
        elif not isinstance(content, str):
            found = "nothing" if content is None else type(content).__name__
            raise ValueError(f"{where}: content must be text or a list of parts, got {found}")
        checked.append(message)
    return checked


def _check_parts(parts: list[Any], where: str) -> None:
    if not parts:
        raise ValueError(f"{where}: content is an empty list; expected text parts")
    for part in parts:
        if not isinstance(part, Mapping):
            raise ValueError(f"{where}: a part must be an object, got {type(part).__name__}")
        kind = part.get("type")
        if isinstance(kind, str) and kind in _MEDIA:
            raise ValueError(f"{where}: {_MEDIA[kind]} are not supported yet")
        if kind != "text":
            raise ValueError(f"{where}: part type must be 'text', got {kind!r}")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: a part of type 'text' must have a string `text`")


def _checked_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: templates iterate over the argument names."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: tool_calls must be a list of objects, got {calls!r}")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a tool call must name its function, got {call!r}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: tool arguments are not valid JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}: tool arguments must be an object, got {arguments!r}")
        function["arguments"] = arguments
    return calls


def _named_templates(value: Any, file: epath.Path) -> dict[str, str]:
    """`chat_template` of a tokenizer_config.json: absent, one template, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    templates = {}
    for entry in entries:
        pair = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else ()
        if len(pair) != 2 or not all(isinstance(item, str) for item in pair):
            raise ValueError(
                f"{file}: chat_template must be a string or a list of "
                '{"name": ..., "template": ...}, found ' + type(entry).__name__
            )
        templates[pair[0]] = pair[1]
    return templates


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte, inverted.

    Bytes that print as Latin-1 characters stand for themselves; the others are numbered from
    U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
