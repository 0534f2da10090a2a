"""The host's side: what waits, what the device computes, and when requests end."""
