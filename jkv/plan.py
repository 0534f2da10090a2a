"""python -m jkv.plan: size a cache for a model (`jkv.commands.capacity`)."""

from jkv.commands.capacity import main

if __name__ == "__main__":
    main()
