"""``python -m crate_kernels``."""

import sys

from crate_kernels.cli import main

sys.exit(main())
