"""Tests of pdxfer; a package, so that helpers are imported as ``tests.name`` once and the same everywhere."""
