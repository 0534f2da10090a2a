"""The Pallas kernel for GPUs."""
