"""``python -m lightning_pipesync`` is ``pipesync``."""

import sys

from lightning_pipesync.cli import main

sys.exit(main())
