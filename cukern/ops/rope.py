"""Rotary position embedding."""

from __future__ import annotations

from cukern.ops._rope_table import rope_table

__all__ = ["rope_table"]
