"""``python -m crate_kernels SUBCOMMAND``."""

import sys

from crate_kernels.cli import main

sys.exit(main())
