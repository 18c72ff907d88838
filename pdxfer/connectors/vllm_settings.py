"""Settings of the vLLM connector: what ``kv_connector_extra_config`` may hold, and which vLLM we serve.

In comes the user's dict; out comes a frozen ``Settings`` or one error that names the key. Anything that is a
field of ``AgentConfig`` may be set by its name. This file imports no vLLM.

===================  ====================================================================================
key                  meaning (default)
===================  ====================================================================================
mode                 ``embedded``: an agent in every rank's process; ``sidecar``: at a daemon (embedded)
sidecar              path of the daemon's socket; what else is an agent's is then the daemon's to set
worker               name of this worker among its peers (the engine id)
control, listen      addresses to bind; rank r of a fixed port p binds p + r (private Unix sockets)
timeout_s            bound of one fetch, from its start to READY (60)
accept_state_dtypes  dtypes of S on the other side that we agree to convert with (none); both sides must agree
admin                HOST:PORT (rank r: PORT + r) of this machine for ``pdxfer status`` and its kin (none)
allow_untested       run on a vLLM version that this connector was not tested with (false)
===================  ====================================================================================
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pdxfer.agent import AgentConfig
from pdxfer.errors import MisuseError

__all__ = ["Settings", "check_version"]

#: Releases with which the connector's tests pass. Before 0.32 a failed receive of a hybrid model can't be reported
#: (no ``failed_recving``): the request would be answered from garbage, with HTTP 200 (vllm#52234).
_TESTED = ((0, 32),)
_OLDEST = (0, 32)


def check_version(version: str, *, allow_untested: bool) -> None:
    """Refuse a vLLM that can't be served; raises MisuseError that names the version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    tested = ", ".join(f"{major}.{minor}" for major, minor in _TESTED)
    if match and found < _OLDEST:
        raise MisuseError(
            f"vLLM {version} is not supported: it can't report a failed receive of a hybrid model as failed",
            hint=f"use vLLM {tested}",
        )
    if found not in _TESTED and not allow_untested:
        raise MisuseError(
            f"vLLM {version} is not supported: this connector is tested with {tested}",
            hint='"allow_untested": true in kv_connector_extra_config tries it all the same',
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a user can set, checked; ``agent_config`` makes a rank's agent of it."""

    worker: str
    timeout_s: float = 60.0
    accept_state_dtypes: tuple[str, ...] = ()
    allow_untested: bool = False
    admin: str = ""
    sidecar: str = ""
    agent: AgentConfig

    @classmethod
    def parse(cls, extra: Mapping[str, Any], engine_id: str) -> Settings:
        """Read ``kv_connector_extra_config``; raises MisuseError that names the key and what it may be."""
        own = {"admin", "mode", "sidecar", "worker", "timeout_s", "accept_state_dtypes", "allow_untested"}
        of_agent = {field.name for field in fields(AgentConfig)} - {"worker", "rank", "mode"} | {"transfer_mode"}
        for key in extra:
            if key not in own | of_agent:
                close = difflib.get_close_matches(key, sorted(own | of_agent), n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(own | of_agent))}"
                raise MisuseError(f"kv_connector_extra_config has no key {key!r}", hint=hint)
        mode, sidecar = extra.get("mode", "embedded"), _typed(extra, "sidecar", str, "")
        if mode not in ("embedded", "sidecar"):
            raise MisuseError(f"mode {mode!r} is not there; 'embedded' and 'sidecar' are")
        if (mode == "sidecar") != bool(sidecar):
            raise MisuseError("mode 'sidecar' and 'sidecar', the path of the daemon's socket, go together")
        if sidecar and (theirs := sorted((of_agent | {"admin"}) & set(extra))):
            raise MisuseError(f"{theirs[0]!r} is the sidecar's to set", hint="in the config of its pdxfer agent")
        worker = _typed(extra, "worker", str, engine_id)
        timeout_s = float(_typed(extra, "timeout_s", (int, float), 60.0))
        if not 0 < timeout_s < float("inf"):
            raise MisuseError(f"timeout_s must be positive and finite, got {timeout_s}")
        values = {key: _frozen(value) for key, value in extra.items() if key in of_agent}
        if "transfer_mode" in values:
            values["mode"] = values.pop("transfer_mode")
        try:
            agent = AgentConfig(worker=worker, **values)
        except TypeError as error:
            raise MisuseError(f"kv_connector_extra_config: {error}") from error
        return cls(
            worker=worker,
            timeout_s=timeout_s,
            accept_state_dtypes=tuple(_typed(extra, "accept_state_dtypes", (list, tuple), ())),
            allow_untested=_typed(extra, "allow_untested", bool, False),
            admin=_typed(extra, "admin", str, ""),
            sidecar=sidecar,
            agent=agent,
        )

    def agent_config(self, rank: int) -> AgentConfig:
        """The config of one rank's agent: fixed ports move up by the rank."""
        return self.agent.at_rank(rank)


def _typed(extra: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = extra.get(key, default)
    if not isinstance(value, kind):
        raise MisuseError(f"kv_connector_extra_config: {key} can't be {value!r}")
    return value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
