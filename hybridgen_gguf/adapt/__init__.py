"""What follows measurement while a model runs.

threads  a governor of the thread count, by counters of progress
border   where attention to host cells is computed
"""

from .border import Feedback
from .threads import Governor

__all__ = ["Feedback", "Governor"]
