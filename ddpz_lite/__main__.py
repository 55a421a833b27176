"""`python -m ddpz_lite` is `ddpz`, for places where the command itself is not on the path."""

import sys

from ddpz_lite.course.cli import main

sys.exit(main())
