"""python -m jkv.plan: what cache fits beside a model (`jkv.commands.capacity`)."""

from jkv.commands.capacity import main

if __name__ == "__main__":
    main()
