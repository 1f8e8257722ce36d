"""Hostile headers, indexes and configs: only clean errors, and in bounded memory and time.

What is accepted is compared with a second parser, written here from the format's description, and
with the safetensors package. Inputs that found a fault are kept in tests/data/fuzz.
"""

import copy
import json
import math
import pathlib
import struct
import time
import tracemalloc

import pytest
import safetensors
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from glm5next_jax.checkpoint import CheckpointError
from glm5next_jax.checkpoint.safetensors_header import read_header
from glm5next_jax.checkpoint.safetensors_reader import INDEX_NAME, SafetensorsDirectory
from glm5next_jax.config import Glm5NextConfig
from tests.checkpoint import released

CORPUS = pathlib.Path(__file__).parents[1] / "data" / "fuzz"
BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
MIB = 1 << 20


# The format, a second time


class Object(list):
    """Pairs of a JSON object."""


def refuse(*_):
    raise ValueError


def parse(text: str):
    return json.loads(text, object_pairs_hook=Object, parse_constant=refuse)


def unique(value) -> dict:
    if not isinstance(value, Object) or len({key for key, _ in value}) < len(value):
        raise ValueError
    return dict(value)


def is_size(n) -> bool:
    return type(n) is int and 0 <= n < 2**63


def tensors_of(data: bytes) -> dict | None:
    """{name: (dtype, shape, first byte, end)} of a file; None where it is damaged."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        if data[8:9] != b"{" or length > len(data) - 8:
            return None
        entries = unique(parse(data[8 : 8 + length].decode()))
        metadata = entries.pop("__metadata__", None)
        if metadata is not None:
            if not isinstance(metadata, Object):
                return None
            for words in metadata:
                "".join(words).encode()
        found = {}
        for name, entry in entries.items():
            entry = unique(entry)
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if type(shape) is not list or type(entry["data_offsets"]) is not list:
                return None
            if not all(is_size(n) for n in (*shape, begin, end)) or len(shape) > 16:
                return None
            size = BYTES[dtype]
            if end - begin != size * math.prod(shape):
                return None
            if len(name) > 512 or name.encode() is None:  # also raises for half a surrogate pair
                return None
            if size * math.prod(n for n in shape if n) >= 2**63:
                return None
            found[name] = (dtype, tuple(shape), 8 + length + begin, 8 + length + end)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error):
        return None
    end = 8 + length
    for _, _, start, stop in sorted(found.values(), key=lambda entry: entry[2:]):
        if start != end:
            return None
        end = stop
    return found if end == len(data) else None


def check_header(data: bytes, path: pathlib.Path) -> bool:
    """Whether the file is accepted; that it is as the second parser and the package have it."""
    path.write_bytes(data)
    want = tensors_of(data)
    try:
        got = read_header(epath.Path(path))
    except CheckpointError as error:
        assert want is None, f"refused: {error}"
        assert all(line.isprintable() for line in str(error).split("\n"))
        return False
    ends = {i.name: (i.dtype, i.shape, i.offset, i.offset + i.num_bytes) for i in got}
    assert want is not None and ends == want
    # The package takes -0 for a float, and looks into fields that it does not know.
    (length,) = struct.unpack("<Q", data[:8])
    values = [value for name, value in parse(data[8 : 8 + length].decode()) if name in want]
    if b"-0" not in data and all(len(value) == 3 for value in values):
        theirs = {
            name: (entry["dtype"], tuple(entry["shape"]))
            for name, entry in safetensors.deserialize(data)
        }
        assert theirs == {name: entry[:2] for name, entry in want.items()}
    return True


# Inputs

NUMBERS = [
    0, -1, 1, 2, 3, 8, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 1e3, 1.5, True,
    False, None, float("nan"), float("inf"),
]  # fmt: skip
WORDS = [
    "",
    "F32",
    "F4",
    "f32",
    "BF16",
    "__metadata__",
    "a",
    "a\n\x1b[2J",
    "\ud800",
    "é",
    "x" * 600,
]
JUNK = st.recursive(
    st.sampled_from([*NUMBERS, *WORDS]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=2)
    ),
    max_leaves=6,
)
SNIPPETS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\xff", b"\x00", b"\xef\xbb\xbf", b"NaN",
    b"-0", b"1e400", b"1" * 4301, b"[" * 1100, b"\\ud800", b"null", b"\n", b"  ",
    b'"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},',
]  # fmt: skip


@st.composite
def entries(draw) -> list:
    """A correct header, as pairs."""
    names = draw(st.lists(st.sampled_from("abcdé") | st.text(max_size=4), max_size=4, unique=True))
    end, pairs = 0, []
    for name in names:
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(BYTES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        start, end = end, end + BYTES[dtype] * math.prod(shape)
        pairs.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}))
    if draw(st.booleans()):
        pairs.append(("__metadata__", {"format": "pt"}))
    return draw(st.permutations(pairs))


def dump(pairs) -> bytes:
    items = (f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs)
    return f"{{{','.join(items)}}}".encode()


def mutate_value(draw, pairs: list) -> None:
    """One change of the structure, which stays JSON."""
    if not pairs:
        return
    index = draw(st.integers(0, len(pairs) - 1))
    name, entry = pairs[index]
    kind = draw(st.sampled_from(["entry", "name", "twice", "field", "number", "drop", "extra"]))
    if kind == "entry":
        pairs[index] = (name, draw(JUNK))
    elif kind == "name":
        pairs[index] = (draw(st.sampled_from(WORDS)), entry)
    elif kind == "twice":
        pairs.append(pairs[index])
    elif isinstance(entry, dict) and entry:
        field = draw(st.sampled_from(sorted(entry)))
        if kind == "field":
            entry[field] = draw(JUNK)
        elif kind == "drop":
            del entry[field]
        elif kind == "extra":
            entry[draw(st.sampled_from(WORDS))] = draw(JUNK)
        elif isinstance(entry[field], list) and entry[field]:
            place = draw(st.integers(0, len(entry[field]) - 1))
            entry[field][place] = draw(st.sampled_from(NUMBERS))


def mutate_bytes(draw, data: bytes) -> bytes:
    place = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(["insert", "delete", "replace", "cut", "repeat"]))
    if kind == "insert":
        return data[:place] + draw(st.sampled_from(SNIPPETS) | st.binary(max_size=3)) + data[place:]
    if kind == "cut":
        return data[:place]
    count = draw(st.integers(1, 8))
    if kind == "delete":
        return data[:place] + data[place + count :]
    if kind == "repeat":
        return data[: place + count] + data[place:]
    octets = draw(st.binary(min_size=count, max_size=count))
    return data[:place] + octets + data[place + count :]


@st.composite
def safetensors_files(draw) -> bytes:
    pairs = draw(entries())
    size = max((v["data_offsets"][1] for n, v in pairs if n != "__metadata__"), default=0)
    pairs = copy.deepcopy(pairs)
    for _ in range(draw(st.integers(0, 2))):
        mutate_value(draw, pairs)
    text = dump(pairs) + b" " * draw(st.integers(0, 3))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        text = mutate_bytes(draw, text)
    length = len(text)
    if draw(st.integers(0, 9)) == 0:
        change = st.integers(-9, 9).map(lambda n: max(length + n, 0))
        length = draw(change | st.sampled_from([0, 2**31, 2**63, 2**64 - 1]))
    data = struct.pack("<Q", length) + text + bytes(size)
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("fuzz")


@given(data=safetensors_files())
def test_headers(data, place):
    check_header(data, place / "model.safetensors")


@given(
    data=st.binary(max_size=64) | st.builds(lambda b: struct.pack("<Q", len(b)) + b, st.binary())
)
def test_bytes_of_any_kind(data, place):
    check_header(data, place / "model.safetensors")


SHARDS = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}


@pytest.fixture(scope="module")
def shards(place) -> pathlib.Path:
    directory = place / "shards"
    directory.mkdir()
    for file in set(SHARDS.values()):
        header = {
            name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
            for i, name in enumerate(name for name in SHARDS if SHARDS[name] == file)
        }
        text = json.dumps(header).encode()
        (directory / file).write_bytes(struct.pack("<Q", len(text)) + text + bytes(len(header)))
    (place / "3.safetensors").write_bytes(b"")
    (directory / "secret.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    return directory


NAMES = [
    "1.safetensors", "2.safetensors", "3.safetensors", "../3.safetensors", "/etc/passwd", "", ".",
    "..", "secret.bin", INDEX_NAME, "1.safetensors\n", "a\0b", "\ud800", "x" * 300,
    "1.safetensors/",
]  # fmt: skip


@st.composite
def indexes(draw) -> bytes:
    pairs = list(SHARDS.items())
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(pairs) - 1))
        name, file = pairs[index]
        kind = draw(st.sampled_from(["file", "name", "twice", "drop", "junk"]))
        if kind == "drop" and len(pairs) > 1:
            del pairs[index]
        elif kind == "twice":
            pairs.append((name, draw(st.sampled_from(NAMES))))
        elif kind == "name":
            pairs[index] = (draw(st.sampled_from(WORDS)), file)
        else:
            pairs[index] = (name, draw(st.sampled_from(NAMES) if kind == "file" else JUNK))
    top = [("metadata", draw(JUNK)), ("weight_map", None)]
    text = dump(draw(st.permutations(top))).replace(
        b'"weight_map":null', b'"weight_map":' + dump(pairs)
    )
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        text = mutate_bytes(draw, text)
    return text


def check_index(data: bytes, directory: pathlib.Path) -> bool:
    """Whether it is accepted: only what names each tensor of the shards once, in its place."""
    (directory / INDEX_NAME).write_bytes(data)
    try:
        content = parse(data.decode())
        pending = [content]
        while pending:  # keys are unique in all of it
            item = pending.pop()
            if isinstance(item, list):
                pending += unique(item).values() if isinstance(item, Object) else item
        want = dict(unique(content)["weight_map"]) == SHARDS
    except (ValueError, KeyError, TypeError, RecursionError):
        want = False
    try:
        with SafetensorsDirectory(directory) as reader:
            assert want and {info.name: info.file for info in reader.tensors} == SHARDS
    except CheckpointError as error:
        assert not want, f"refused: {error}"
        assert all(line.isprintable() for line in str(error).split("\n"))
        return False
    return True


@given(data=indexes())
def test_indexes(data, shards):
    check_index(data, shards)


@st.composite
def configs(draw) -> bytes:
    config = released.config()
    for _ in range(draw(st.integers(1, 3))):
        part = config
        while True:
            key = draw(st.sampled_from(sorted(part)))
            if not isinstance(part[key], dict) or not part[key] or draw(st.integers(0, 3)) == 0:
                break
            part = part[key]
        kind = draw(st.sampled_from(["value", "item", "drop"]))
        if kind == "drop":
            del part[key]
        elif kind == "item" and isinstance(part[key], list) and part[key]:
            part[key][draw(st.integers(0, len(part[key]) - 1))] = draw(JUNK)
        else:
            part[key] = draw(JUNK)
        if not config:
            break
    text = json.dumps(config).encode()
    return mutate_bytes(draw, text) if draw(st.integers(0, 3)) == 0 else text


def check_config(data: bytes, path: pathlib.Path) -> None:
    path.write_bytes(data)
    try:
        config = Glm5NextConfig.from_hf(path)
    except ValueError as error:
        assert len(str(error)) < 1500 and all(line.isprintable() for line in str(error).split("\n"))
    else:
        assert Glm5NextConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@given(data=configs())
def test_configs(data, place):
    check_config(data, place / "config.json")


# Inputs that found a fault, or that others' readers fell over


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_the_corpus(path, tmp_path, shards):
    kind = path.name.partition("-")[0]
    if kind == "header":
        accepted = check_header(path.read_bytes(), tmp_path / "model.safetensors")
        assert accepted == ("-accepted-" in path.name)
    elif kind == "index":
        assert check_index(path.read_bytes(), shards) == ("-accepted-" in path.name)
    else:
        assert kind == "config"
        check_config(path.read_bytes(), tmp_path / "config.json")


def numbered(count: int, value: bytes) -> bytes:
    return b"{" + b",".join(b'"%d":%b' % (i, value) for i in range(count)) + b"}"


HOSTILE = {
    "open brackets": lambda: b"[" * (30 * MIB),
    "open objects": lambda: b'{"":' * (7 * MIB),
    "commas": lambda: b"," * (30 * MIB),
    "empty lists": lambda: b"{" + b"[]," * (10 * MIB),
    "spaces": lambda: b"{" + b" " * (30 * MIB),
    "quotes": lambda: b'{"' + b'""' * (15 * MIB),
    "escaped quotes": lambda: b'{"' + b'\\"' * (15 * MIB) + b'":0}',
    "digits": lambda: b'{"a":' + b"9" * (30 * MIB) + b"}",
    "digits of a float": lambda: b'{"a":0.' + b"9" * (30 * MIB) + b"}",
    "an exponent": lambda: b'{"a":1e' + b"9" * (30 * MIB) + b"}",
    "a long name": lambda: b'{"' + b"x" * (30 * MIB) + b'":0}',
    "a long name that an escape widens": lambda: b'{"\\ud83d\\ude00' + b"x" * (30 * MIB) + b'":0}',
    "characters of four bytes": lambda: b'{"' + "\U0001f600".encode() * (7 * MIB) + b'":0}',
    "as many lists as are allowed": lambda: b'{"a":[' + b",".join([b"[[]]"] * 660_000) + b"]}",
    "as many objects as are allowed": lambda: b'{"a":[' + b",".join([b'{"":0}'] * 490_000) + b"]}",
    "many entries": lambda: numbered(30_000, b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'),
    "many faults": lambda: numbered(30_000, b'{"dtype":"U8","shape":[],"data_offsets":[0,0]}'),
    "numbers": lambda: numbered(300_000, b"1.5"),
    "one long dtype": lambda: (
        b'{"a":{"dtype":"%b","shape":[],"data_offsets":[0,0]}}' % (b"F" * MIB)
    ),
    "many dimensions": lambda: (
        b'{"a":{"dtype":"U8","shape":[%b1],"data_offsets":[0,0]}}'
        % (b"9223372036854775807," * (MIB // 2))
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_memory_and_time_are_bounded(case, tmp_path):
    text = HOSTILE[case]()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"a byte too many")
    size = len(text)
    del text
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_header(epath.Path(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    seconds = time.process_time() - start
    assert size > MIB and len(str(caught.value)) < 30_000
    # Measured: 220 MB and 3 s at most. With 180,000 entries, the most that fit, 159 MB and 16 s,
    # nearly all of it the tracing.
    assert peak < 300e6 and seconds < 30
