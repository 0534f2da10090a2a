"""Logits processors of an engine.

``variants.py`` holds them for a request: ``grammars.py`` (the loaded grammars, compiled
by ``compiling.py``) and ``rule_table.py`` (``penalties.py`` among the rules).
"""
