"""`python -m harness` is `pagedbench`."""

import sys

from harness.cli import main

sys.exit(main())
