"""How often to save: what a save costs against the work that a failure costs.

Of a run's time, saves take cost / interval, and work that is done again interval / (2 * between).
The sum is least for interval = sqrt(2 * cost * between), and changes little around it.

Source: Young, "A first order approximation to the optimum checkpoint interval", 1974.
"""

from __future__ import annotations

import math


def best_interval(cost: float, between: float) -> float:
    """Seconds of training between two saves.

    cost: seconds that training waits for one save. between: seconds between two failures of the
    whole run: those of one machine, divided by the number of machines.
    """
    return math.sqrt(2 * cost * between)
