"""Benchmarks: each operator and the model against its floor, its peers and its reference. ``cukern bench`` runs
them."""
