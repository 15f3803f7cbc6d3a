"""The papers, readable on their own: pure functions and small classes over tensors. Needs torch alone; no I/O, no logging."""
