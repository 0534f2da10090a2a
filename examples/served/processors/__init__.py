"""Logits processors of an engine, as variants for its requests.

``variants.py`` assigns them to requests. ``grammars.py`` holds the loaded grammars,
which ``compiling.py`` compiles; ``rule_table.py`` and ``penalties.py`` hold rules.
"""
