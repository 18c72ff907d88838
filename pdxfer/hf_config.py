"""Reading a Hugging Face config without trusting it: every value is checked, every error names its field.

In comes a preset's name or a ``config.json``; out come integers, names and per-layer lists. ``models.py``
says what they mean. This file knows no model family: it knows where configs lie and nest, that null means
absent, that a bool is not an integer, and that a per-layer list covers the layers or is refused.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pdxfer.errors import MisuseError
from pdxfer.spec import DTYPE_BYTES

__all__ = ["Fields", "decode_config", "did_you_mean", "load_config", "preset_names", "text_fields"]

#: Where multimodal wrappers keep the language model, tried in this order.
_WRAPPERS = ("text_config", "llm_config", "language_config")
#: Legacy layer names and what transformers 5 rewrites them to on load.
_LAYER_ALIASES = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
#: Fields that declare multi-token-prediction layers; their entries trail the per-layer lists.
_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
#: Lists of their own for those layers; then they trail no other list.
_MTP_LISTS = ("mtp_layers_block_type", "mtp_hybrid_override_pattern", "mtp_layer_types")
#: Bounds that keep a hostile config from costing memory; far above any model.
_LAYERS_MAX = 4096
_VALUE_MAX = 1 << 31
_MISSING_HINT = (
    "a file may rely on its class's defaults; load and save it with transformers to have every value written"
)


class Fields:
    """One level of a config, read by field name; dots reach into nested objects.

    Args:
        data: the decoded object.
        path: prefix of the field names in messages, e.g. ``"text_config."``.
    """

    __slots__ = ("_data", "_path")

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self._data = data
        self._path = path

    def error(self, name: str, what: str, *, hint: str = "") -> MisuseError:
        """Build (not raise) the error for field ``name``."""
        return MisuseError(f"{self._path}{name}: {what}", hint=hint, details={"field": f"{self._path}{name}"})

    def get(self, name: str) -> Any:
        """Value of a field, or None when it or an object on the way to it is absent or null."""
        value: Any = self._data
        for depth, part in enumerate(name.split(".")):
            if not isinstance(value, Mapping):
                raise self.error(".".join(name.split(".")[:depth]), f"must be an object, got {_show(value)}")
            value = value.get(part)
            if value is None:
                return None
        return value

    def has(self, *names: str) -> bool:
        """Whether any of the fields is present and not null."""
        return any(self.get(name) is not None for name in names)

    def integer(self, *names: str, minimum: int = 1, maximum: int = _VALUE_MAX, default: int | None = None) -> int:
        """First present of ``names`` as an integer in [minimum, maximum].

        Raises:
            MisuseError: absent without a default, of another type (a bool is one), or out of range.
        """
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise self.error(name, f"must be an integer, got {_show(value)}")
            if not minimum <= value <= maximum:
                raise self.error(name, f"is {_show(value)}; it must be between {minimum} and {maximum}")
            return value
        if default is None:
            raise self.missing(*names)
        return default

    def missing(self, *names: str) -> MisuseError:
        """Build the error for a value that none of ``names`` gives."""
        return self.error(" or ".join(names), "is missing", hint=_MISSING_HINT)

    def flag(self, name: str, *, default: bool) -> bool:
        """A true/false field."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {_show(value)}")
        return default if value is None else value

    def dtype(self, *names: str, default: str) -> str:
        """First present of ``names`` as a dtype name known to the spec; ``auto`` means the default."""
        for name in names:
            value = self.get(name)
            if value is None or value == "auto":
                continue
            bare = value.removeprefix("torch.") if isinstance(value, str) else value
            if not isinstance(bare, str) or bare not in DTYPE_BYTES:
                raise self.error(name, f"is {_show(value)}, not a dtype; known are {sorted(DTYPE_BYTES)}")
            return bare
        return default

    def divided(self, total: str, by: str) -> int:
        """``total`` / ``by``, which must be exact (hidden size per head)."""
        dividend, divisor = self.integer(total), self.integer(by)
        if dividend % divisor:
            raise self.error(total, f"{dividend} does not divide by {by} {divisor}")
        return dividend // divisor

    def sequence(self, name: str) -> tuple[Any, ...]:
        """A required list (or pattern string) as a tuple of its entries."""
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
            raise self.error(name, f"must be a list, got {_show(value)}")
        return tuple(value)

    def layer_count(self) -> int:
        """``num_hidden_layers``, required."""
        return self.integer("num_hidden_layers", maximum=_LAYERS_MAX)

    def mapped(
        self, name: str, meaning: Mapping[str, str] | Mapping[int, str], *, count: int | None = None
    ) -> tuple[str, ...]:
        """One kind per layer from the list or pattern string ``name``.

        Args:
            meaning: what each entry stands for; legacy names are rewritten to today's first.
            count: layers of the model; by default ``num_hidden_layers``, or the list's own length without it.

        A longer list is accepted only when the surplus is the declared number of MTP layers.
        """
        entries = self.sequence(name)
        if count is None:
            count = self.layer_count() if self.has("num_hidden_layers") else len(entries)
        surplus = len(entries) - count
        declared = {self.integer(field, minimum=0, default=0) for field in _MTP_FIELDS if not self.has(*_MTP_LISTS)}
        if not 1 <= count <= _LAYERS_MAX or (surplus and surplus not in declared):
            raise self.error(name, f"has {len(entries)} entries for {count} layers")
        return tuple(self._kind(name, entry, meaning) for entry in entries[:count])

    def _kind(self, name: str, entry: Any, meaning: Mapping[Any, str]) -> str:
        # True == 1 and 1.0 == 1 as dict keys, so the type is looked at before the table.
        usable = isinstance(entry, (str, int)) and not isinstance(entry, bool)
        key = _LAYER_ALIASES.get(entry, entry) if isinstance(entry, str) else entry
        if not usable or key not in meaning:
            raise self.error(name, f"has the unknown entry {_show(entry)}; known are {sorted(meaning)}")
        return meaning[key]

    def layer_types(self, meaning: Mapping[str, str]) -> tuple[str, ...] | None:
        """Kinds from ``layer_types`` or ``layers_block_type``; None when the config has neither."""
        return self.agreed(
            self.mapped(n, meaning) if self.has(n) else None for n in ("layer_types", "layers_block_type")
        )

    def agreed(self, readings: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
        """The one answer of several ways to read the layer pattern; raises when two contradict."""
        found = [kinds for kinds in readings if kinds is not None]
        if any(kinds != found[0] for kinds in found[1:]):
            raise self.error("layer_types", "contradicts another field of this config that lists the layers")
        return found[0] if found else None

    def layer_numbers(self, name: str) -> tuple[int, ...]:
        """A list of layer numbers, type-checked only."""
        numbers = self.sequence(name)
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool):
                raise self.error(name, f"must hold layer numbers, got {_show(number)}")
        return numbers

    def covered(self, lists: Mapping[str, str], count: int) -> tuple[str, ...]:
        """Kinds from one list of layer numbers per kind; together they hold each layer exactly once.

        Kimi counts from 1 and GLM-5.3 from 0: only an exact cover of 1..n or 0..n-1 decides which.
        """
        kind_of: dict[int, str] = {}
        total = 0
        for name, kind in lists.items():
            numbers = self.layer_numbers(name)
            kind_of.update(dict.fromkeys(numbers, kind))
            total += len(numbers)
        for base in (0, 1):
            if total == count and set(kind_of) == set(range(base, base + count)):
                return tuple(kind_of[base + layer] for layer in range(count))
        names = " and ".join(lists)
        raise self.error(names, f"must hold each of the {count} layers exactly once, counted from 0 or from 1")

    def chosen(self, name: str, inside: str, outside: str, count: int) -> tuple[str, ...]:
        """Kinds from one list of 0-based numbers: ``inside`` for the layers in it, ``outside`` for the others."""
        numbers = self.layer_numbers(name)
        if len(set(numbers)) != len(numbers) or any(not 0 <= n < count for n in numbers):
            raise self.error(name, f"must hold different layer numbers below {count}")
        return tuple(inside if layer in numbers else outside for layer in range(count))

    def override(self, layers: Sequence[int], name: str) -> int | None:
        """What ``per_layer_config`` (transformers 5) says about ``name`` for all of ``layers``, if anything.

        Raises:
            MisuseError: it says different things about layers that this spec describes as one component.
        """
        if not self.has("per_layer_config"):
            return None
        table = Fields(_by_layer_number(self.get("per_layer_config"), self), f"{self._path}per_layer_config.")
        found = [table.integer(f"{layer}.{name}") if table.has(f"{layer}.{name}") else None for layer in layers]
        if any(value != found[0] for value in found):
            raise self.error("per_layer_config", f"gives {name} a different value in layers of the same kind")
        return found[0] if found else None


def _by_layer_number(value: Any, fields: Fields) -> Mapping[str, Any]:
    """Keys as plain decimal numbers; transformers pads them with zeros ("05")."""
    if not isinstance(value, Mapping):
        raise fields.error("per_layer_config", f"must be an object, got {_show(value)}")
    return {str(key).lstrip("0") or "0": item for key, item in value.items()}


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def text_fields(config: Mapping[str, Any]) -> tuple[list[str], Fields]:
    """Find the language model inside a config.

    Returns:
        The ``model_type`` of every level, outermost first, and the innermost level's fields. A dtype that
        only a wrapper states holds for the language model too.
    """
    if not isinstance(config, Mapping):
        raise MisuseError(f"a config must be a JSON object, got {_show(config)}")
    types: list[str] = []
    fields, level, path, dtype = Fields(config), config, "", None
    for _ in range(4):
        kind = fields.get("model_type")
        if kind is not None and not isinstance(kind, str):
            raise fields.error("model_type", f"must be a string, got {_show(kind)}")
        types.extend([kind] if kind else [])
        dtype = level.get("dtype") or level.get("torch_dtype") or dtype
        inner = next((name for name in _WRAPPERS if fields.has(name)), None)
        if inner is None:
            return types, Fields({**level, "dtype": dtype}, path)
        if not isinstance(level[inner], Mapping):
            raise fields.error(inner, f"must be an object, got {_show(level[inner])}")
        level, path = level[inner], f"{path}{inner}."
        fields = Fields(level, path)
    raise MisuseError("text_config: nests more than three deep")


# ---------------------------------------------------------------- configs by name


def preset_names() -> tuple[str, ...]:
    """Names of the configs that ship with the package, sorted."""
    return tuple(sorted(p.name.removesuffix(".json") for p in _presets().iterdir() if p.name.endswith(".json")))


def load_config(name_or_path: str) -> dict[str, Any]:
    """Read a config: a preset's name, a ``config.json``, or a directory that holds one.

    Raises:
        MisuseError: there is no such preset or file, or it holds no JSON object.
    """
    path = Path(name_or_path)
    if name_or_path.lower() in preset_names() and not path.is_file():
        return decode_config((_presets() / f"{name_or_path.lower()}.json").read_bytes(), name_or_path)
    try:
        path = path / "config.json" if path.is_dir() else path
        found = path.is_file()
    except OSError as error:  # too long for a name, or in a directory that we may not enter
        raise MisuseError(f"can't read {_show(name_or_path)}: {error.strerror}") from error
    if not found and (path.name == "config.json" or path.suffix == ".json" or os.path.isdir(name_or_path)):
        raise MisuseError(
            f"there is no file {path}", hint="pass a config.json, a directory that holds one, or a preset"
        )
    if not found:
        close = did_you_mean(name_or_path.rsplit("/", 1)[-1].lower(), preset_names())
        hint = close or f"pass the path of a config.json, or a preset: {', '.join(preset_names())}"
        raise MisuseError(f"{name_or_path!r} is neither a preset nor a file", hint=hint)
    try:
        return decode_config(path.read_bytes(), str(path))
    except OSError as error:
        raise MisuseError(f"can't read {path}: {error.strerror}") from error


def _presets() -> Any:
    return resources.files("pdxfer") / "presets"


def decode_config(data: bytes, name: str) -> dict[str, Any]:
    """A config from a file's bytes; raises MisuseError. ``name``: of the file, for the message."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MisuseError(f"{name} holds a JSON {type(value).__name__}, not an object")
    return value


def did_you_mean(name: str, known: tuple[str, ...]) -> str:
    """A hint with the known names that begin with ``name``, else the closest ones; or an empty string."""
    begin = [k for k in known if len(name) > 2 and k.startswith(name)]
    close = begin[:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else ""
