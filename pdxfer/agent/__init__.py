"""The agent: regions, arenas, leases, peers, offers and fetches of one rank (see ``service.py``)."""

from __future__ import annotations

from pdxfer.agent.config import AgentConfig
from pdxfer.agent.fetch import Fetch, Received
from pdxfer.agent.service import Agent

__all__ = ["Agent", "AgentConfig", "Fetch", "Received"]
