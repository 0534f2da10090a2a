"""What the kernel becomes for GPUs that are not there: lowered, exported, addressed."""
