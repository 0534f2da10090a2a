"""Implementation of the commands; their `python -m` modules are in the root package."""

from jkv.commands.compiled_programs import keep_compiled_programs, remove_oldest

__all__ = ["keep_compiled_programs", "remove_oldest"]
