"""What `examples/generate.py` does.

Files in reading order: ``command.py`` (the generation), ``prompts.py`` (texts become
tokens), ``output.py`` (tokens become text), ``options.py`` (the command line) and
``ending.py`` (how the command ends).
"""
