"""Device side of the engine: the compiled programs, their inputs and reports."""
