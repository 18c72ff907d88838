"""Generated from proto/pdxfer/control/v1 by proto/generate; only ``pdxfer.control.convert`` imports it."""
