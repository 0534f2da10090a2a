"""python -m jkv.doctor: what works on this machine (`jkv.commands.diagnosis`)."""

import sys

from jkv.commands.diagnosis import main

if __name__ == "__main__":
    sys.exit(main())
