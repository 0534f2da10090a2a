"""The device's side: three programs, what goes there, and what comes back."""
