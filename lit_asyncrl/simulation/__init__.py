"""Simulation of generation, pool and trainer with a virtual clock: staleness, rejection and length bias before a run."""
