"""What a checkpoint says about its quantisation: `quantization_config` or `hf_quant_config.json`.

What is stored decides how a tensor is read. From here come the block where a grid of factors leaves
a choice, and the modules that are said not to be quantised, which stored codes must not contradict.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from glm5next_jax.checkpoint.mapping import PREFIXES
from glm5next_jax.checkpoint.quantized import BLOCK_SHAPE

# Serving engines' names of the same module, which lists of modules use too.
_PREFIXES = ("language_model.model.", *PREFIXES)
_WILDCARDS = re.compile(r"[*?[]")
_REGEX = "re:"
_MAX_REGEX = 4096


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """The part of a quantisation config that reading needs.

    Attributes:
      method: "fp8", "modelopt", "compressed-tensors", …, as it stands there; None if unquantised.
      weight_block_size: rows and columns of an FP8 block.
      modules: entries of `modules_to_not_convert`: a module, or the components with which its name
        begins or ends.
      patterns: entries of `ignore` and `exclude_modules`: a name, a name with wildcards, or "re:"
        and a regular expression that the beginning of a name must match.

    Raises:
      ValueError: an entry that is no regular expression.
    """

    method: str | None = None
    weight_block_size: tuple[int, int] = BLOCK_SHAPE
    modules: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    def __post_init__(self):
        for pattern in self.patterns:
            _compiled(pattern)

    @classmethod
    def from_hf(
        cls, quantization_config: Any = None, hf_quant_config: Any = None
    ) -> QuantizationConfig:
        """Reads the parsed JSON of either, or both, of the places.

        Args:
          quantization_config: that field of `config.json`, or None.
          hf_quant_config: the content of `hf_quant_config.json`, or None.

        Raises:
          ValueError: a field of a wrong type or value; the message names it.
        """
        first = _object(quantization_config, "quantization_config")
        second = _object(hf_quant_config, "hf_quant_config")
        second = _object(second.get("quantization"), "hf_quant_config.quantization")
        method = first.get("quant_method")
        if method is not None and not isinstance(method, str):
            found = f"{method!r:.80}"
            raise ValueError(f"quantization_config.quant_method: found {found}, expected text")
        if method is None and second:
            method = "modelopt"
        patterns = [
            *_names(first, "quantization_config", "ignore"),
            *_names(first, "quantization_config", "exclude_modules"),
            *_names(second, "hf_quant_config.quantization", "exclude_modules"),
        ]
        return cls(
            method,
            _block(first),
            _names(first, "quantization_config", "modules_to_not_convert"),
            tuple(dict.fromkeys(patterns)),
        )

    def excludes(self, module: str) -> bool:
        """Whether the module of this name (a weight's name without ".weight") is listed."""
        return self.exclusion_of(module) is not None

    def exclusion_of(self, module: str) -> str | None:
        """The entry that excludes a module, or None. Names compare with and without a prefix."""
        if not self.modules and not self.patterns:
            return None
        name = _bare(module)
        ends = [at for at, character in enumerate(name) if character == "."]
        for part in (name, *(name[:at] for at in ends), *(name[at + 1 :] for at in ends)):
            if part in self._modules:
                return self._modules[part]
        if name in self._literals:
            return self._literals[name]
        names = [prefix + name for prefix in _PREFIXES]
        for entry in self._regexes:
            if _matches(_compiled(entry), names):
                return entry
        if not _matches(self._any_wildcard, names):
            return None
        return next(e for form, e in self._wildcards.items() if _matches(_compiled(form), names))

    @functools.cached_property
    def _modules(self) -> dict[str, str]:
        return {_bare(entry): entry for entry in self.modules}

    @functools.cached_property
    def _literals(self) -> dict[str, str]:
        return {_bare(entry): entry for entry in self.patterns if _compiled(entry) is None}

    @functools.cached_property
    def _regexes(self) -> list[str]:
        return [entry for entry in self.patterns if entry.startswith(_REGEX)]

    @functools.cached_property
    def _wildcards(self) -> dict[str, str]:
        """Entries by their forms: one with a prefix also stands without it."""
        entries = [e for e in self.patterns if not e.startswith(_REGEX) and _WILDCARDS.search(e)]
        return {form: entry for entry in entries for form in (_bare(entry), entry)}

    @functools.cached_property
    def _any_wildcard(self) -> re.Pattern[str] | None:
        """All of them at once: there are many names, and most match none."""
        forms = [fnmatch.translate(form) for form in self._wildcards]
        return re.compile("|".join(forms)) if forms else None


def _matches(pattern: re.Pattern[str] | None, names: Iterable[str]) -> bool:
    return pattern is not None and any(pattern.match(name) for name in names)


def _bare(name: str) -> str:
    return name.removeprefix(next(prefix for prefix in _PREFIXES if name.startswith(prefix)))


@functools.lru_cache(maxsize=4096)
def _compiled(entry: str) -> re.Pattern[str] | None:
    """The expression of an entry, or None for a plain name."""
    if entry.startswith(_REGEX):
        text = entry.removeprefix(_REGEX)
    elif _WILDCARDS.search(entry):
        text = fnmatch.translate(entry)
    else:
        return None
    if len(entry) > _MAX_REGEX:
        raise ValueError(
            f"ignore, exclude_modules: found {len(entry)} characters in one pattern "
            f"({entry[:40]!r}…), expected at most {_MAX_REGEX}"
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"ignore, exclude_modules: found {entry!r:.80}, expected a name, a wildcard or a "
            f"regular expression ({error})"
        ) from None


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}: found {type(value).__name__}, expected an object")
    return value


def _names(config: Mapping[str, Any], where: str, field: str) -> tuple[str, ...]:
    value = config.get(field)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where}.{field}: found {value!r:.80}, expected a list of names")
    return tuple(value)


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    """The first block that a config states, or the released one."""
    field, stated = "quantization_config.weight_block_size", [config.get("weight_block_size")]
    if stated == [None]:
        field = "quantization_config.config_groups"
        stated = list(_block_structures(_object(config.get("config_groups"), field).values()))
        field += ".*.weights.block_structure"
    for value in stated:
        if value is None:
            continue
        sizes = value.split("x") if isinstance(value, str) else value  # "128x128"
        if isinstance(value, str) and all(re.fullmatch("[0-9]{1,9}", n) for n in sizes):
            sizes = [int(n) for n in sizes]
        if isinstance(sizes, list) and len(sizes) == 2:
            rows, columns = sizes
            if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
                return rows, columns
        raise ValueError(f"{field}: found {value!r:.80}, expected two sizes")
    return BLOCK_SHAPE


def _block_structures(groups: Iterable[Any]) -> Iterable[Any]:
    for group in groups:
        field = "quantization_config.config_groups.*"
        weights = _object(_object(group, field).get("weights"), f"{field}.weights")
        yield weights.get("block_structure")
