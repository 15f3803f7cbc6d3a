"""The trajectory pool: whole groups in a TorchRL replay buffer, staleness-aware samplers, ledger, collation."""
