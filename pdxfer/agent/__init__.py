"""The agent: regions, arenas, leases, peers, offers and fetches of one rank (``service.py``).

It runs in the engine's process, or in a sidecar (``daemon.py``) with ``client.py`` in the engine.
"""

from __future__ import annotations

from pdxfer.agent.client import SidecarAgent, create_agent
from pdxfer.agent.config import AgentConfig
from pdxfer.agent.fetch import Fetch, Received
from pdxfer.agent.service import Agent
from pdxfer.agent.sidecar_fetch import SidecarFetch

__all__ = ["Agent", "AgentConfig", "Fetch", "Received", "SidecarAgent", "SidecarFetch", "create_agent"]
