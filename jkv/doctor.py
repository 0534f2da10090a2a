"""python -m jkv.doctor: diagnose the installation (`jkv.commands.diagnosis`)."""

from jkv.commands.diagnosis import main
from jkv.commands.exiting import run_process

if __name__ == "__main__":
    run_process(main)
