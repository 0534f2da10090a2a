"""Parts of `examples/generate.py`, shared by other examples.

Files in reading order: ``command.py`` (the generation), ``prompts.py`` (texts become
tokens), ``output.py`` (tokens become text), ``options.py`` (the command line); and for
all examples ``arguments.py`` (values that are checked) and ``exiting.py`` (how a
command ends).
"""
