"""Simulator: production's agents, driver and state tables in one thread, on virtual time, among seeded faults.

``python -m pdxfer.testing.simulation --seeds 20`` runs it; see ``run.py`` for what must hold. Needs greenlet.
"""

from __future__ import annotations

from pdxfer.testing.simulation.run import Report, Simulation, simulate

__all__ = ["Report", "Simulation", "simulate"]
