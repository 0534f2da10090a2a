"""What steers the texts of an engine.

``variants.py`` holds it for a request: ``grammars.py`` (those that are there, compiled
by ``compiling.py``) and ``rule_table.py`` (``penalties.py`` among the rules).
"""
