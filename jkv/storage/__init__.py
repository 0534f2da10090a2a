"""What blocks hold: stored rows, copies, pieces on the host, files."""
