"""What the elements of pools become inside a kernel, and in which columns."""
