"""Config: a daemon's settings from flags, environment, a file and defaults, each with where it came from.

In come texts and TOML or YAML tables; out comes a checked ``DaemonConfig``, or one MisuseError that names the key,
where it was said, and the key that was probably meant. What can be set are the fields of ``DaemonConfig`` and of the
dataclasses in it, by their type hints: a field added there is a key here.

::

    flags (--set a.b=c)  >  PDXFER_A__B=c  >  file  >  defaults        [a]
                                                                       b = c
    sizes (*_bytes): 4GiB, 64MB, 4096     times (*_s): 30s, 250ms, 2m, 1h, 0.5     lists: a,b in flags and environment
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from pdxfer.agent.config import DaemonConfig
from pdxfer.errors import MisuseError
from pdxfer.observe.admin import host_and_port

__all__ = ["Loaded", "load_config", "schema", "template"]

_PREFIX = "PDXFER_"
_NOT_OURS = {"PDXFER_CONFIG", "PDXFER_DEBUG"}  # the command line's own
_FROM_ENGINE = {"agent.worker", "agent.rank"}  # each rank's own: its engine says, or ``worker`` above
_BYTES = {"": 1, "B": 1}
_BYTES |= {f"{p}iB": 1 << 10 * (i + 1) for i, p in enumerate("KMGT")}
_BYTES |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate(("k", "M", "G", "T"))}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def default_socket() -> str:
    """Where a daemon listens unless told otherwise: in the user's run-time directory, or the system's."""
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or "/run", "pdxfer", "agent.sock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A config, and by dotted key where each value came from."""

    config: DaemonConfig
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Every key with its value and origin. There is no secret among them: those have files of their own."""
        found = dict(_flat(self.config))
        for key, _ in _hints(DaemonConfig):
            yield key, found.get(key), self.origins.get(key, "default")


def load_config(
    path: str = "", flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Loaded:
    """Read all sources; raises MisuseError for what is unknown, of the wrong type, or refused by the config itself.

    Args:
        path: of a ``.toml``, ``.yaml`` or ``.yml`` file; "" is none. flags: by dotted key; environ: the process's.
    """
    values: dict[str, tuple[Any, str]] = {"socket": (default_socket(), "default")}
    sources = [(_from_file(path), True), (_from_environ(os.environ if environ is None else environ), False)]
    sources.append(([(k, v, f"flag {k}") for k, v in (flags or {}).items()], False))
    hints = dict(_hints(DaemonConfig))
    for entries, is_file in sources:
        for key, value, origin in entries:
            if key not in hints:
                raise _unknown(key, origin, hints)
            try:
                parsed = value if is_file or not isinstance(value, str) else _from_text(value, hints[key])
                values[key] = _coerce(parsed, hints[key], key), origin
            except (ValueError, TypeError) as error:
                raise MisuseError(f"{key} can't be {value!r}: {error} ({origin})") from error
    config = _build(DaemonConfig, "", {key: value for key, (value, _) in values.items()})
    for name, probes_only in (("admin", False), ("metrics", True)):
        if (listen := getattr(config, name)) and not listen.startswith("unix://"):
            try:
                host_and_port(listen, probes_only=probes_only)
            except MisuseError as error:
                raise MisuseError(f"{name}: {error.message} ({values[name][1]})", hint=error.hint) from error
    return Loaded(config=config, origins={key: origin for key, (_, origin) in values.items()})


def _unknown(key: str, origin: str, known: Mapping[str, Any]) -> MisuseError:
    close = difflib.get_close_matches(key, known, n=1) or difflib.get_close_matches(
        key.rpartition(".")[2], [k for k in known if "." not in k] + [k.rpartition(".")[2] for k in known], n=1
    )
    meant = next((k for k in known if close and (k == close[0] or k.endswith(f".{close[0]}"))), "")
    if within := [k for k in known if k.startswith(f"{key}.")]:
        return MisuseError(f"{key!r} is a table, not a value ({origin})", hint=f"its keys are {', '.join(within)}")
    if (table := next((k for k in known if key.startswith(f"{k}.")), "")) and "Mapping" in str(known[table]):
        return MisuseError(f"{table!r} is one value ({origin})", hint=f"write the table as JSON: {table}={{...}}")
    hint = f"did you mean {meant!r}?" if meant else "pdxfer config init shows all keys"
    return MisuseError(f"there is no key {key!r} ({origin})", hint=hint)


# -- sources -----------------------------------------------------------------------------------------


def _from_file(path: str) -> list[tuple[str, Any, str]]:
    if not path:
        return []
    try:
        with open(path, "rb") as file:
            data = file.read()
        table = _parse(path, data.decode())
    except (OSError, ValueError) as error:
        raise MisuseError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(table, Mapping):
        raise MisuseError(f"{path} is no table of keys")
    return [(key, value, path) for key, value in _dotted(table, "", dict(_hints(DaemonConfig)))]


def _parse(path: str, text: str) -> Any:
    if path.endswith((".yaml", ".yml")):
        import yaml

        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _dotted(table: Mapping[str, Any], prefix: str, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key; a mapping that is itself a value of a known key stays whole."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known and any(k.startswith(f"{key}.") for k in known):
            yield from _dotted(value, f"{key}.", known)
        else:
            yield key, value


def _from_environ(environ: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """Keys of ours; what merely begins alike (a cluster sets PDXFER_SERVICE_HOST) is left alone, a slip is not."""
    known, found = dict(_hints(DaemonConfig)), []
    for name, value in environ.items():
        if not name.startswith(_PREFIX) or name in _NOT_OURS:
            continue
        key = name[len(_PREFIX) :].lower().replace("__", ".")
        if key in known or "." in key or difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            found.append((key, value, f"environment {name}"))
    return found


# -- values by type hint -----------------------------------------------------------------------------


def _hints(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and type of everything that can be set; nested dataclasses are tables."""
    types_of = get_type_hints(cls)
    for each in dataclasses.fields(cls):
        key, hint = f"{prefix}{each.name}", types_of[each.name]
        if key in _FROM_ENGINE:
            continue
        nested = _dataclass_in(hint)
        if nested is not None:
            yield from _hints(nested, f"{key}.")
        else:
            yield key, hint


def _dataclass_in(hint: Any) -> type | None:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def _from_text(text: str, hint: Any) -> Any:
    """A flag's or the environment's text as what a file could have held."""
    origin = get_origin(hint) or hint
    if origin is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError("a JSON object is needed") from error
    if hint is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    return text


def _coerce(value: Any, hint: Any, key: str) -> Any:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _coerce(value, next(a for a in arguments if a is not type(None)), key)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError("a list is needed")
        return tuple(_coerce(item, arguments[0], key) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError("a table is needed")
        return {str(name): _coerce(item, arguments[1], key) for name, item in value.items()}
    if hint in (int, float) and not isinstance(value, bool):
        return hint(_number(value, key))
    if hint is Any or (isinstance(origin, type) and type(value) is origin):
        return value
    kind = {bool: "true or false", str: "a text"}.get(hint, getattr(origin, "__name__", origin))
    raise TypeError(f"{kind} is needed")


def _number(value: Any, key: str) -> int | float:
    """Plain numbers, and texts with a unit that the key's name asks for."""
    units: Mapping[str, float] = {"": 1}
    if key.endswith("_bytes"):
        units = _BYTES
    elif key.endswith("_s"):
        units = _SECONDS
    if isinstance(value, (int, float)):
        found: float = value
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2] not in units:
            raise ValueError(
                "a number is needed" + (f", with a unit of {', '.join(filter(None, units))}" * (len(units) > 1))
            )
        found = float(match[1]) * units[match[2]]
    if not key.endswith("_s") and found != int(found):
        raise ValueError("a whole number is needed")
    return found


def _build(cls: type, prefix: str, values: Mapping[str, Any]) -> Any:
    types_of, arguments = get_type_hints(cls), {}
    for each in dataclasses.fields(cls):
        key = f"{prefix}{each.name}"
        nested = _dataclass_in(types_of[each.name])
        if nested is not None and any(k.startswith(f"{key}.") for k in values):
            arguments[each.name] = _build(nested, f"{key}.", values)
        elif key in values:
            arguments[each.name] = values[key]
    if f"{prefix}worker" in _FROM_ENGINE:
        arguments["worker"] = "engine"
    needed = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [f"{prefix}{name}" for name in needed if name not in arguments]:
        said = ", ".join(f"{prefix}{name}" for name in arguments)
        raise MisuseError(f"{', '.join(missing)}: missing, while {said} is set", hint="set all of them, or none")
    return cls(**arguments)


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(config):
        key, value = f"{prefix}{each.name}", getattr(config, each.name)
        if key in _FROM_ENGINE:
            continue
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


# -- for people and tools ----------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """JSON Schema of the file."""
    root: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_table()}
    for key, hint in _hints(DaemonConfig):
        *tables, name = key.split(".")
        at = root
        for table in tables:
            at = at["properties"].setdefault(table, _table())
        at["properties"][name] = _schema_of(hint, name)
    return root


def _table() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _schema_of(hint: Any, name: str) -> dict[str, Any]:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return _schema_of(next(a for a in arguments if a is not type(None)), name)
    if origin is tuple:
        return {"type": "array", "items": _schema_of(arguments[0], name)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], name)}
    if hint in (int, float) and name.endswith(("_bytes", "_s")):
        units = _BYTES if name.endswith("_bytes") else _SECONDS
        pattern = rf"^[0-9.]+ *({'|'.join(filter(None, units))})?$"
        return {"type": ["number", "string"], "pattern": pattern}
    return {"type": {int: "integer", float: "number", bool: "boolean", str: "string"}[hint]} if hint is not Any else {}


def template() -> str:
    """A TOML file with every key at its default, as comments."""
    lines, table = (
        ["# pdxfer agent --config FILE; PDXFER_AGENT__LEASE_S=30s and --set agent.lease_s=30s go before it."],
        "",
    )
    rows = Loaded(config=DaemonConfig(socket=default_socket()), origins={}).rows()
    for key, value, _ in sorted(rows, key=lambda row: row[0].count(".")):
        head, _, name = key.rpartition(".")
        if head != table:
            lines, table = [*lines, "", f"# [{head}]"], head
        lines.append(f"# {name} = {'...' if value is None else '{}' if value == {} else json.dumps(value)}")
    return "\n".join(lines) + "\n"
