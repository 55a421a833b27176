"""How often to save: the cost of saves against the work that a failure destroys.

Saves take the fraction cost / interval of a run's time, and repeated work interval / (2 * between).
The sum is smallest for interval = sqrt(2 * cost * between), and changes little around it.

Source: Young, "A first order approximation to the optimum checkpoint interval", 1974.
"""

from __future__ import annotations

import math


def best_interval(cost: float, between: float) -> float:
    """Seconds of training between two saves.

    cost: seconds that training waits for one save. between: mean seconds between two failures of
    the run: the time for one machine, divided by the number of machines.
    """
    return math.sqrt(2 * cost * between)
