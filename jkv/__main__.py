"""python -m jkv: list the commands."""

import argparse

COMMANDS = {
    "python -m jkv.plan": "what cache fits beside a model",
    "python -m jkv.doctor": "what works on this machine",
}


def main(arguments: list[str] | None = None) -> None:
    """Print each command with a one-line description."""
    parser = argparse.ArgumentParser(
        prog="python -m jkv", description="List the commands."
    )
    parser.parse_args(arguments)
    print("The commands of jkv, a paged key/value cache for JAX:\n")
    width = max(map(len, COMMANDS))
    for name, what in COMMANDS.items():
        print(f"  {name:{width}}  {what}")
    print("\nEach says with --help what it takes.")


if __name__ == "__main__":
    main()
