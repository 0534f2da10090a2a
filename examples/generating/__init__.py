"""Implementation of `examples/generate.py`, and helpers of all examples.

In reading order: ``command.py`` (the generation), ``prompts.py`` (tokenization),
``output.py`` (detokenization and printing), ``options.py`` (the command line). For all
examples: ``arguments.py`` (argument types) and ``exiting.py`` (exit on errors).
"""
