"""Sampling responses: engines, weight delivery, and the worker that turns prompts into trajectory groups."""
